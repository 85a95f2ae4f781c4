"""Dense attention of the baselines, and the base of those that wrap a network of `transformers`.

- `attend`, `attend_at`: attention over all allowed keys, or over a few keys per query
- `DenseModel`: base of models whose attention would show a given position its own token
- `TransformerConfig`, `TransformersModel`: base of BART, BERT, BERT-bidir and GPT-2
- `inside_of`, `pick`, `shifted_right`: small tensor helpers
- `size_presets`: the presets that every baseline has
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer.devices import wide
from tracformer.files import optional_package
from tracformer.model.base import ConditionalModel, each_given_alone
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig

# On CPUs, up to this many tokens, the backward pass of PyTorch's fused attention takes longer than
# keeping all weights and multiplying by them: at 256 tokens in bfloat16 forward and backward take
# 31 ms fused, 18 ms plain (16 sequences, 3 heads of 32, one EPYC thread).
SHORT = 512


def trains_faster_plain(device: torch.device, length: int) -> bool:
    """Return whether plain matrix products train faster than fused attention (see `SHORT`)."""
    return device.type == "cpu" and length <= SHORT and torch.is_grad_enabled()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v over the keys that `mask` allows.

    Args:
        q: Queries (B, S, H, D).
        k: Keys (B, K, H, D).
        v: Values (B, K, H, D).
        mask: Bool (B or 1, S or 1, K), True where a query reads a key. None: all keys.

    Returns:
        (B, S, H, D); zero for a query that reads no key.
    """
    if k.shape[1] == 0:
        return torch.zeros_like(q)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    allowed = None if mask is None else mask[:, None]
    if trains_faster_plain(q.device, k.shape[2]):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        mixed = _softmax(scores, -1).to(v.dtype) @ v
    else:
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    mixed = mixed.transpose(1, 2)  # (B, S, H, D)
    return mixed if mask is None else mixed.masked_fill(~mask.any(-1)[..., None, None], 0.0)


def attend_at(q: Tensor, k: Tensor, v: Tensor, index: Tensor, present: Tensor) -> Tensor:
    """Return attention in which each query reads only a few keys.

    Args:
        q: Queries (B, S, H, D).
        k: Keys (B, K, H, D).
        v: Values (B, K, H, D).
        index: Keys of each query (B, S, N), each in 0..K-1.
        present: Bool (B, S, N), False where an entry of `index` is only a filler.

    Returns:
        (B, S, H, D); zero for a query that reads no key.
    """
    B, S, H, D = q.shape
    if k.shape[1] == 0:
        return torch.zeros_like(q)
    first = torch.arange(B, device=q.device)[:, None, None] * k.shape[1]
    rows = (index + first).flatten()
    k, v = (x.flatten(0, 1).index_select(0, rows).view(B, S, -1, H, D) for x in (k, v))
    scores = (q[:, :, None] * k).sum(-1) * D**-0.5  # (B, S, N, H)
    scores = scores.masked_fill(~present[..., None], torch.finfo(scores.dtype).min)
    mixed = (_softmax(scores, 2).to(v.dtype)[..., None] * v).sum(2)
    return mixed.masked_fill(~present.any(-1)[..., None, None], 0.0)


def _softmax(scores: Tensor, dim: int) -> Tensor:
    """Return the softmax in float32 or wider; in bfloat16 a weight has only two or three digits."""
    return scores.softmax(dim, dtype=wide(scores.dtype))


POSITIONS = ("normal", "sinusoids")
NORMS = ("post", "pre")  # after each branch is added, as in BART and BERT; or before it


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    """Shape of a network of `transformers`."""

    n_layer: int = 12
    n_head: int = 12
    d_model: int = 768
    dropout: float = 0.0  # where the network of `transformers` has it by default
    init_std: float = 0.02
    # Start of the table of positions: "normal" numbers or "sinusoids".
    positions_from: str = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions_from not in POSITIONS:
            raise ValueError(
                f"positions_from is {self.positions_from!r}; allowed: {', '.join(POSITIONS)}"
            )
        self.require_positive("n_layer", "n_head", "d_model")
        if self.d_model % self.n_head:
            raise ValueError(f"d_model is {self.d_model}, not divisible by n_head {self.n_head}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout!r}; it must lie in [0, 1)")
        if not self.init_std > 0.0:
            raise ValueError(f"init_std is {self.init_std!r}; it must be positive")


Size = tuple[int, int, int] | tuple[int, int, int, float]
"""Layers, heads, width and, where the system has one, a fourth value."""


def size_presets(
    paper: Size, tiny: Size, mini: Size, laptop: Size, fourth: str = "init_std"
) -> dict[str, dict[str, Any]]:
    """Return the presets that every baseline has.

    They are the paper's size, about 1.5M parameters, 2M without embeddings, and 8M.

    Args:
        paper: Size of the preset "paper"; the others are for one machine without a GPU.
        tiny: Size of the preset "tiny".
        mini: Size of the preset "mini".
        laptop: Size of the preset "laptop".
        fourth: Configuration key of the fourth value of a size.
    """
    texts = {"paper": (50257, 1024), "tiny": (256, 128), "mini": (4096, 256), "laptop": (4096, 256)}
    sizes = {"paper": paper, "tiny": tiny, "mini": mini, "laptop": laptop}
    keys = ("vocab_size", "max_length", "n_layer", "n_head", "d_model", fourth)
    presets: dict[str, dict[str, Any]] = {
        name: dict(zip(keys, (*texts[name], *size), strict=False)) for name, size in sizes.items()
    }
    presets["paper"]["dropout"] = 0.1
    return presets


class DenseModel(ConditionalModel):
    """Base of models whose attention would show a given position its own token.

    A subclass implements `states`. To predict a given position, `hidden` adds a row in which that
    position is a target.
    """

    @abstractmethod
    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        """Return final states (N, d) where `wanted` (B, T) is True, in row-major order.

        Outside `ar` all wanted positions are targets.
        """

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        batch = batch.with_padding(0)
        inside = batch.inside()
        # In `ar` no position sees itself, given or not.
        targets = wanted if mode == "ar" else batch.targets()

        def states(row: Tensor, targets: Tensor, places: Tensor) -> Tensor:
            return self.states(batch.select(row).with_context(inside[row] & ~targets), mode, places)

        return each_given_alone(wanted, targets, states)


class TransformersModel(DenseModel):
    """Base of models that wrap a network of `transformers`, held in `network`."""

    config: TransformerConfig
    network: Any
    built_on_meta: ClassVar[bool] = False

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        self._recompute(self.checkpoint_activations)
        self._choose_attention(
            "eager" if trains_faster_plain(batch.device, batch.width) else "sdpa"
        )
        return super().hidden(batch, mode, wanted)

    def networks(self) -> list[Any]:
        """Return the networks of `transformers` that the model runs."""
        return [self.network]

    def _choose_attention(self, name: str) -> None:
        for network in self.networks():
            if network.config._attn_implementation != name:
                network.set_attn_implementation(name)

    def _recompute(self, wanted: bool) -> None:
        for network in self.networks():
            if wanted and not network.is_gradient_checkpointing:
                network.gradient_checkpointing_enable({"use_reentrant": False})
            elif not wanted and network.is_gradient_checkpointing:
                network.gradient_checkpointing_disable()


def check_norm(norm: str) -> None:
    """Raise a ValueError unless `norm` is one of `NORMS`."""
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; allowed: {', '.join(NORMS)}")


def start_positions(config: TransformerConfig, *tables: Tensor) -> None:
    """Fill tables of positions, one row each, with sinusoids if the configuration says so.

    Otherwise they keep the normal numbers that `transformers` drew.
    """
    if config.positions_from == "sinusoids":
        with torch.no_grad():
            for table in tables:
                # Scaled to the same mean square as the normal numbers.
                table.copy_(sinusoids(*table.shape) * (config.init_std * math.sqrt(2.0)))


def sinusoids(positions: int, d: int) -> Tensor:
    """Return (positions, d) sines, then cosines, of position * 10000^(-2i/d)."""
    rates = torch.exp(torch.arange(0, d, 2, dtype=torch.float64) * (-math.log(10000.0) / d))
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=1)[:, :d].float()


def transformers_for(system: str) -> Any:
    """Import `transformers`. This is done when a network is built, not to read a configuration."""
    return optional_package("transformers", f"the system {system!r}", "peers")


def pick(features: Tensor, places: Tensor) -> Tensor:
    """Return the rows (N, d) of features (B, T, d) where `places` (B, T) is True."""
    return features.flatten(0, 1)[places.flatten().nonzero()[:, 0]]


def shifted_right(tokens: Tensor, first: int) -> Tensor:
    """Return (B, T) ids: `first`, then all tokens but the last."""
    return torch.cat((torch.full_like(tokens[:, :1], first), tokens[:, :-1]), dim=1)
