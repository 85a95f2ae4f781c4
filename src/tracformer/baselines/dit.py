"""The diffusion transformer (DiT) of SEDD and MDLM, also used by D3PM and PLAID.

Attention is bidirectional. An encoding of the noise level shifts, scales and gates every branch
(adaptive layer norm):

    c = silu(MLP(e(sigma)))
    x <- x + gate_1(c) * Attention(LN(x) * (1 + scale_1(c)) + shift_1(c))
    x <- x + gate_2(c) * MLP(LN(x) * (1 + scale_2(c)) + shift_2(c))

Tensor names are those of the published checkpoints, which therefore load without renaming
(`published.py`).
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

FREQUENCIES = 128  # of the noise level's encoding, for any size of model
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class DiTShape:
    """Size of a DiT."""

    rows: int  # ids that can be read: real tokens and, for masked diffusion, the mask
    n_layer: int
    n_head: int
    d_model: int
    d_condition: int
    dropout: float


class Trunk(nn.Module):
    """The blocks and the output layer, for any input of shape (B, T, d)."""

    shape: DiTShape
    sigma_map: "NoiseLevel"
    blocks: nn.ModuleList
    output_layer: "Output"

    def transform(
        self, x: Tensor, sigma: Tensor, lengths: Tensor, checkpointed: bool = False
    ) -> Tensor:
        """Return states (B, T, d), which `output_layer.linear` turns into logits.

        Args:
            x: Inputs (B, T, d).
            sigma: Noise levels (B,).
            lengths: True lengths (B,); padding is never a key.
            checkpointed: Recompute each block in the backward pass instead of storing its
                activations.
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
    """Tokens (B, T), the mask among them, and noise levels (B,) -> states (B, T, d)."""

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
    """A table of token embeddings, under the name of the published checkpoints."""

    def __init__(self, rows: int, d: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(rows, d))
        nn.init.kaiming_uniform_(self.embedding, a=math.sqrt(5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]


class NoiseLevel(nn.Module):
    """MLP(e(sigma)), where e = [cos | sin] of sigma * exp(-ln(10^4) i / 128)."""

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
    """LayerNorm without bias, computed in float32 or wider."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return (
            layer_norm(x.to(wide(x.dtype)), self.weight.shape, eps=1e-5).to(x.dtype) * self.weight
        )


class DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the noise level."""

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
        """Return states (B, T, d).

        Args:
            x: States (B, T, d).
            condition: Encoded noise level (B, d_condition).
            angles: Rotary angles.
            seen: (B, 1, T) bool, False in the padding; None where nothing is padded.
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
    """Final norm, shifted and scaled by the noise level.

    `linear` maps states to logits. `forward` does not apply it, so that callers compute logits only
    for the rows that they need.
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
    """Return a linear layer of zeros, so that every block starts as the identity."""
    linear = nn.Linear(d_condition, size)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
