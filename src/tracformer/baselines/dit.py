"""The diffusion transformer of SEDD and MDLM: bidirectional attention, and a noise level that
shifts, scales and gates every branch.

Tensor names are those of the published checkpoints, so these load as they are
(`dit_checkpoints.py`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, layer_norm, silu
from torch.utils.checkpoint import checkpoint

from tracformer.baselines.transformer import attend
from tracformer.devices import wide
from tracformer.model.blocks import Angles, rotary_angles, rotate

FREQUENCIES = 128  # of the noise level's encoding, whatever the model's size
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class DiTShape:
    rows: int  # ids that can be read: real tokens and the mask
    n_layer: int
    n_head: int
    d_model: int
    d_condition: int
    dropout: float


class Trunk(nn.Module):
    """The blocks under a noise level, whatever they read."""

    shape: DiTShape
    sigma_map: "NoiseLevel"
    blocks: nn.ModuleList
    output_layer: "Output"

    def transform(
        self, x: Tensor, sigma: Tensor, lengths: Tensor, checkpointed: bool = False
    ) -> Tensor:
        """Inputs (B, T, d) at noise levels (B,) -> states (B, T, d), which `output_layer.linear`
        turns into logits.
        """
        positions = torch.arange(x.shape[1], device=x.device)
        dtype = self.output_layer.linear.weight.dtype
        # (T, 1, D/2)
        angles = rotary_angles(
            positions, self.shape.d_model // self.shape.n_head, ROTARY_BASE, dtype
        )
        inside = positions < lengths[:, None]
        seen = None if bool(inside.all()) else inside[:, None]  # (B, 1, T): padding is never a key
        condition = silu(self.sigma_map(sigma.to(dtype)))  # (B, d_condition)
        for block in self.blocks:
            inputs = (x, condition, angles, seen)
            x = checkpoint(block, *inputs, use_reentrant=False) if checkpointed else block(*inputs)
        return self.output_layer(x, condition)


class DiT(Trunk):
    """tokens (B, T), the mask among them; sigma (B,) -> states (B, T, d)."""

    def __init__(self, shape: DiTShape) -> None:
        super().__init__()
        self.shape = shape
        self.vocab_embed = Embedding(shape.rows, shape.d_model)
        self.sigma_map = NoiseLevel(shape.d_condition)
        self.blocks = nn.ModuleList(DiTBlock(shape) for _ in range(shape.n_layer))
        self.output_layer = Output(shape)

    def forward(
        self, tokens: Tensor, sigma: Tensor, lengths: Tensor, checkpointed: bool = False
    ) -> Tensor:
        return self.transform(self.vocab_embed(tokens), sigma, lengths, checkpointed)


class Embedding(nn.Module):
    def __init__(self, rows: int, d: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(rows, d))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]


class NoiseLevel(nn.Module):
    """MLP(e(sigma)), e = [cos | sin] of sigma * exp(-ln(10^4) i / 128)."""

    def __init__(self, d_condition: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(2 * FREQUENCIES, d_condition), nn.SiLU(), nn.Linear(d_condition, d_condition)
        )

    def forward(self, sigma: Tensor) -> Tensor:
        i = torch.arange(FREQUENCIES, device=sigma.device, dtype=sigma.dtype)
        angle = sigma[:, None] * torch.exp(-math.log(10000.0) * i / FREQUENCIES)
        return self.mlp(torch.cat((angle.cos(), angle.sin()), dim=-1))


class Norm(nn.Module):
    """LayerNorm without a bias, taken in float32 at least."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return (
            layer_norm(x.to(wide(x.dtype)), self.weight.shape, eps=1e-5).to(x.dtype) * self.weight
        )


class DiTBlock(nn.Module):
    def __init__(self, shape: DiTShape) -> None:
        super().__init__()
        d = shape.d_model
        self.n_head, self.dropout = shape.n_head, shape.dropout
        self.norm1 = Norm(d)
        self.attn_qkv = nn.Linear(d, 3 * d, bias=False)
        self.attn_out = nn.Linear(d, d, bias=False)
        self.norm2 = Norm(d)
        self.mlp = nn.Sequential(
            nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d)
        )
        self.adaLN_modulation = modulation(shape.d_condition, 6 * d)

    def forward(self, x: Tensor, condition: Tensor, angles: Angles, seen: Tensor | None) -> Tensor:
        """x: (B, T, d); condition: (B, d_condition); seen: (B, 1, T) bool, or None
        where nothing is padded
        """
        chunks = self.adaLN_modulation(condition)[:, None].chunk(6, dim=-1)  # each (B, 1, d)
        shift, scale, gate = chunks[:3]
        # (B, T, 3, H, D)
        qkv = self.attn_qkv(self.norm1(x) * (1 + scale) + shift).unflatten(-1, (3, self.n_head, -1))
        q, k, v = qkv.unbind(2)
        q, k = rotate(q, angles), rotate(k, angles)
        mixed = attend(q, k, v, seen)  # (B, T, H, D)
        x = x + gate * self._drop(self.attn_out(mixed.flatten(-2)))
        shift, scale, gate = chunks[3:]
        return x + gate * self._drop(self.mlp(self.norm2(x) * (1 + scale) + shift))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


class Output(nn.Module):
    """Norm, shift and scale.

    `linear` is applied by whoever needs logits, to the rows that need them.
    """

    def __init__(self, shape: DiTShape) -> None:
        super().__init__()
        self.norm_final = Norm(shape.d_model)
        self.linear = nn.Linear(shape.d_model, shape.rows)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.adaLN_modulation = modulation(shape.d_condition, 2 * shape.d_model)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition)[:, None].chunk(2, dim=-1)
        return self.norm_final(x) * (1 + scale) + shift


def modulation(d_condition: int, size: int) -> nn.Linear:
    """Zero at the start: every block is the identity, and the noise level does nothing yet."""
    linear = nn.Linear(d_condition, size)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
