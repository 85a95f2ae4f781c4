"""Dense attention, and what the systems built on the package `transformers` share.

Dense attention of the baselines: PyTorch's own, and plain products where those train faster.

What the peers built on the package `transformers` share: the shape of a plain Transformer, and how
given positions are answered.
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
from tracformer.model.config import ModelConfig

# On CPUs, up to this many tokens, the backward pass of PyTorch's fused attention takes longer than
# keeping all weights and multiplying by them: at 256 tokens in bfloat16 forward and backward take
# 31 ms fused, 18 ms plain (16 sequences, 3 heads of 32, one EPYC thread).
SHORT = 512


def trains_faster_plain(device: torch.device, length: int) -> bool:
    return device.type == "cpu" and length <= SHORT and torch.is_grad_enabled()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v over the keys that `mask` allows; zero for a query that
    reads no key.

    Args: q: Queries (B, S, H, D). k: Keys (B, K, H, D). v: Values (B, K, H, D). mask: Bool (B or 1,
        S or 1, K), True where a query reads a key; None: every query reads every key.
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
    """Return attention in which each query reads a few keys of its own; zero for a query that reads
    none.

    Args:
        q: Queries (B, S, H, D).
        k: Keys (B, K, H, D).
        v: Values (B, K, H, D).
        index: Keys of each query (B, S, N), each in 0..K-1.
        present: Bool (B, S, N), False where an entry of `index` is only a filler.
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
    """In float32 at least: bfloat16 scores would keep two or three digits of a weight."""
    return scores.softmax(dim, dtype=wide(scores.dtype))


POSITIONS = ("normal", "sinusoids")
NORMS = ("post", "pre")  # after each branch is added, as in BART and BERT; or before it


@dataclass(frozen=True)
class TransformerConfig(ModelConfig):
    n_layer: int = 12
    n_head: int = 12
    d_model: int = 768
    dropout: float = 0.0  # wherever the network of `transformers` has it by default
    init_std: float = 0.02
    # or "sinusoids": what the table of positions is before it is trained
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


class DenseModel(ConditionalModel):
    """A model whose attention would show a given position its own token. A subclass implements
    `states`.

    Each given position that is asked for gets a row of its own, in which it is a target too.
    """

    @abstractmethod
    def states(
        self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, asked: Tensor
    ) -> Tensor:
        """Final states (N, d) of the positions where `asked` (B, T) is True, in row-major order.

        Outside `ar` they are all targets.
        """

    def hidden(
        self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        inside = inside_of(tokens, lengths)
        tokens = tokens.long().masked_fill(~inside, 0)  # anything may stand in the padding
        # in `ar` no position sees itself, given or not
        targets = wanted if mode == "ar" else ~context & inside

        def states(row: Tensor, targets: Tensor, asked: Tensor) -> Tensor:
            return self.states(tokens[row], inside[row] & ~targets, mode, lengths[row], asked)

        return each_given_alone(wanted, targets, states)


class TransformerPeer(DenseModel):
    """A subclass keeps its network of `transformers` in `network` and implements `states`."""

    config: TransformerConfig
    network: Any
    built_on_meta: ClassVar[bool] = False

    def hidden(
        self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._recompute(self.checkpoint_activations)
        self._choose_attention(
            "eager" if trains_faster_plain(tokens.device, tokens.shape[1]) else "sdpa"
        )
        return super().hidden(tokens, context, mode, lengths, wanted)

    def networks(self) -> list[Any]:
        """The networks of `transformers` that the model runs."""
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
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; allowed: {', '.join(NORMS)}")


def start_positions(config: TransformerConfig, *tables: Tensor) -> None:
    """What `transformers` drew from a normal law, as the configuration says.

    A table has a row a position.
    """
    if config.positions_from == "sinusoids":
        with torch.no_grad():
            for table in tables:
                # of the same mean square
                table.copy_(sinusoids(*table.shape) * (config.init_std * math.sqrt(2.0)))


def sinusoids(positions: int, d: int) -> Tensor:
    """(positions, d): sines, then cosines, of position * 10000^(-2i/d)."""
    rates = torch.exp(torch.arange(0, d, 2, dtype=torch.float64) * (-math.log(10000.0) / d))
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=1)[:, :d].float()


def transformers_for(system: str) -> Any:
    """The package, imported when a network is built: reading a configuration does not need it."""
    return optional_package("transformers", f"the system {system!r}", "peers")


def inside_of(tokens: Tensor, lengths: Tensor) -> Tensor:
    """(B, T): not padding."""
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]


def pick(features: Tensor, places: Tensor) -> Tensor:
    """The rows of features (B, T, d) where places (B, T) is True: (N, d), in row-major order."""
    return features.flatten(0, 1)[places.flatten().nonzero()[:, 0]]


def shifted_right(tokens: Tensor, first: int) -> Tensor:
    """(B, T): `first`, then all but the last token."""
    return torch.cat((torch.full_like(tokens[:, :1], first), tokens[:, :-1]), dim=1)
