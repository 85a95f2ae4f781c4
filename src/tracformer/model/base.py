"""What every system answers, the checks of a batch, and work in several passes.

Work that takes several passes of the network, of which each can wait for its turn: others
compute in between.

Every complaint about a batch, in one place: each quotes the value and says what is allowed.

What every system offers, whatever its network: logits, log-probabilities, a loss, a folder on disk.

A system is a `ModelConfig` and a `ConditionalModel` that says one thing: the final hidden states of
the wanted positions (`hidden`), from which `head` makes logits. Training, generation, evaluation
and the command line speak to this class alone.
"""

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from os import PathLike
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from tracformer.model import likelihood, storage
from tracformer.model.config import ModelConfig
from tracformer.model.fast_step import check_kind

A = TypeVar("A")

Passes = Generator[None, None, A]
"""Each `next` computes for at most one pass; the result comes at the end. It may stop anywhere."""


def finish(passes: Passes[A]) -> A:
    """All of them, one right after another."""
    while True:
        try:
            next(passes)
        except StopIteration as end:
            result: A = end.value
            return result


def at_once(f: Callable[[], A]) -> Passes[A]:
    """Everything in one."""
    yield from ()
    return f()


PREFERRED = ("car", "ac", "ar")
IDS = (torch.int32, torch.int64)  # what embeddings take
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_batch(
    config: ModelConfig,
    tokens: Tensor,
    context: Tensor,
    mode: str,
    lengths: Tensor | None,
    insist: bool = False,
) -> Tensor:
    """The batch's true lengths (B,), or a ValueError."""
    check_mode(config, mode, insist)
    if tokens.dim() != 2 or tokens.dtype not in IDS:
        raise ValueError(
            f"tokens is {_describe(tokens)}; it must be a (B, T) tensor of int64 or int32"
        )
    B, T = tokens.shape
    if B == 0 or T == 0:
        raise ValueError(
            f"tokens has shape {tuple(tokens.shape)}: an empty batch; give at least one sequence "
            "of at least one token"
        )
    if T > config.max_length:
        raise ValueError(
            f"sequences are {T} tokens long; this model takes at most max_length = "
            f"{config.max_length}"
        )
    if context.shape != tokens.shape or context.dtype != torch.bool:
        raise ValueError(
            f"context is {_describe(context)}; it must be a bool tensor of tokens' shape "
            f"{tuple(tokens.shape)}"
        )
    if context.device != tokens.device:
        raise ValueError(
            f"context is on {context.device} and tokens on {tokens.device}; they must be on one "
            "device"
        )
    if lengths is None:
        lengths = torch.full((B,), T, device=tokens.device)
        inside = tokens
    else:
        if lengths.shape != (B,) or lengths.dtype not in INTEGERS:
            raise ValueError(
                f"lengths is {_describe(lengths)}; it must be a ({B},) tensor of integers"
            )
        # compiled code walks over them
        lengths = lengths.to(tokens.device, torch.int64).contiguous()
        low, high = (int(x) for x in lengths.aminmax())
        if low < 1 or high > T:
            raise ValueError(
                f"lengths range from {low} to {high}; each must lie in 1..{T}, the padded length"
            )
        inside = tokens[torch.arange(T, device=tokens.device) < lengths[:, None]]
    low, high = (int(x) for x in inside.aminmax())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"token id {wrong} is out of range; ids must lie in 0..{config.vocab_size - 1} "
            f"(vocab_size {config.vocab_size})"
        )
    return lengths


def check_mode(config: ModelConfig, mode: str, insist: bool = False) -> None:
    if mode not in config.possible_modes:
        raise ValueError(
            f"mode is {mode!r}; allowed for {config.model_type}: {', '.join(config.possible_modes)}"
        )
    if mode not in config.modes and not insist:
        raise ValueError(
            f"mode is {mode!r}, but these weights were trained for: {', '.join(config.modes)}; "
            "pass insist=True, in Python, to run it all the same"
        )


def preferred_mode(config: ModelConfig) -> str:
    """The mode of a question that names none: of those the weights were trained for, the first of
    car, ac, ar, else the first.
    """
    return next((mode for mode in PREFERRED if mode in config.modes), config.modes[0])


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


EXACT, MARGINAL, BOUND = "exact", "marginal", "bound"


class Estimate(NamedTuple):
    """Each target's share (B, T), zero where given; and where it was estimated, the standard error
    (B,) of each sequence's sum.
    """

    values: Tensor
    standard_error: Tensor | None


class ConditionalModel(nn.Module):
    """p(targets | given) in one or more modes. `tokens` is (B, T) integers, `context` (B, T) bool,
    True where given; `lengths` (B,) where sequences are padded on the right. What stands in the
    padding is never looked at.
    """

    config: ModelConfig
    config_class: ClassVar[type[ModelConfig]]
    # mode -> exact joint (chain rule), marginal of each target, or bound on the joint
    answers: ClassVar[Mapping[str, str]]
    # mode -> what it cannot do, shown wherever its figures are
    limits: ClassVar[Mapping[str, str]] = {}
    # of noise, for an estimate that nobody asked for more or fewer of
    default_draws: ClassVar[int | None] = None
    # recompute each block in the backward pass instead of keeping its inner tensors
    checkpoint_activations: bool = False
    weights: str = "float32"  # what they were rounded to, see `lean`
    # False where buffers are computed at construction or tensors are tied
    built_on_meta: ClassVar[bool] = True

    @abstractmethod
    def hidden(
        self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Final states (N, d) of the positions where `wanted` (B, T) is True, and those positions
        as flat rows (N,), ascending.
        """

    @property
    @abstractmethod
    def head(self) -> Tensor:
        """(vocab_size, d): rows of real tokens; the mask is never predicted."""

    @property
    def head_bias(self) -> Tensor | None:
        """(vocab_size,)"""
        return None

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated layers, which training shards and compiles one by one."""

    @abstractmethod
    def embedding_tables(self) -> list[Tensor]:
        """What `num_parameters(embeddings=False)` leaves out."""

    def forward(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str = "car",
        lengths: Tensor | None = None,
        *,
        insist: bool = False,
    ) -> Tensor:
        """Logits (B, T, vocab_size) at every position, given ones too; zero in the padding.

        A given position is answered as if it alone were unknown. `insist` lifts the refusal of
        modes the weights were not trained in.
        """
        lengths = self._check(tokens, context, mode, lengths, insist)
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        hidden, rows = self.hidden(tokens, context, mode, lengths, inside)
        logits = likelihood.logits_of(hidden, self.head, self.head_bias)
        if len(rows) == tokens.numel():
            return logits.unflatten(0, tokens.shape)
        return (
            logits.new_zeros(tokens.numel(), logits.shape[-1])
            .index_copy(0, rows, logits)
            .unflatten(0, tokens.shape)
        )

    def logits_at(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str,
        lengths: Tensor | None,
        wanted: Tensor,
        *,
        insist: bool = False,
    ) -> Tensor:
        """Logits (N, vocab_size) of the positions where `wanted` (B, T) is True, in
        row-major order.
        """
        lengths = self._check(tokens, context, mode, lengths, insist)
        hidden, _ = self.hidden(tokens, context, mode, lengths, wanted)
        return likelihood.logits_of(hidden, self.head, self.head_bias)

    def log_prob(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str = "car",
        lengths: Tensor | None = None,
        *,
        draws: int | None = None,
        seed: int = 0,
        insist: bool = False,
    ) -> Tensor:
        """(B, T): log-probability of each target, zero where given and in the padding.

        Under `car` and `ar` its sum is the exact joint.
        """
        return self.estimate(
            tokens, context, mode, lengths, draws=draws, seed=seed, insist=insist
        ).values

    def estimate(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str = "car",
        lengths: Tensor | None = None,
        *,
        draws: int | None = None,
        seed: int = 0,
        insist: bool = False,
    ) -> Estimate:
        """`log_prob` with its standard error.

        `draws` and `seed` matter only where `answers[mode]` is a bound.
        """
        lengths = self._check(tokens, context, mode, lengths, insist)
        hidden, rows = self.hidden(tokens, context, mode, lengths, targets_of(context, lengths))
        values = likelihood.token_log_probs(
            hidden, self.head, tokens.flatten()[rows].long(), self.head_bias
        )
        return Estimate(
            values.new_zeros(tokens.numel()).index_copy(0, rows, values).unflatten(0, tokens.shape),
            None,
        )

    def candidates(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str,
        lengths: Tensor | None = None,
        top: int = 5,
        *,
        insist: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """(B, T, top): the likeliest tokens at each target, where `log_prob` answers for the one
        that stands there, and their log-probabilities; token -1 where given. Not where the answer
        is a bound.
        """
        lengths = self._check(tokens, context, mode, lengths, insist)
        if self.answers[mode] == BOUND:
            raise ValueError(
                f"mode {mode!r} gives a bound, which lists no candidates; ask for none, or in "
                "another mode"
            )
        hidden, rows = self.hidden(tokens, context, mode, lengths, targets_of(context, lengths))
        ids, values = likelihood.likeliest(
            hidden, self.head, min(top, self.config.vocab_size), self.head_bias
        )
        shape = (*tokens.shape, ids.shape[1])
        token_ids = ids.new_full((tokens.numel(), ids.shape[1]), -1).index_copy(0, rows, ids)
        return token_ids.view(shape), values.new_zeros(tokens.numel(), ids.shape[1]).index_copy(
            0, rows, values
        ).view(shape)

    def loss(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str = "car",
        lengths: Tensor | None = None,
        *,
        insist: bool = False,
    ) -> Tensor:
        """Negative log-likelihood per target of the whole batch (Eqs. 7 and 8)."""
        total, count = self.nll(tokens, context, mode, lengths, insist=insist)
        if count == 0:
            raise ValueError(
                "context gives every token of the batch; a loss needs at least one target"
            )
        return total / count

    def nll(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str = "car",
        lengths: Tensor | None = None,
        *,
        weights: Tensor | None = None,
        insist: bool = False,
    ) -> tuple[Tensor, int]:
        """Sum over targets of their negative log-likelihood, and their number, for a loss
        normalised over a larger batch.

        `weights` (B, T), if given, multiplies each target's term.
        """
        lengths = self._check(tokens, context, mode, lengths, insist)
        hidden, rows = self.hidden(tokens, context, mode, lengths, targets_of(context, lengths))
        row_weights = None if weights is None else weights.flatten()[rows]
        total = likelihood.weighted_nll(
            hidden, self.head, tokens.flatten()[rows].long(), row_weights, self.head_bias
        )
        return total, len(rows)

    def empty_cache(self, mode: str, rows: int, length: int) -> Any:
        """What generation can hold on to in this mode (see `generation.sessions.Session`), for
        `rows` sequences of at most `length` tokens; or None: then it runs whole passes.
        """
        return None

    def cache(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str,
        lengths: Tensor | None = None,
        *,
        insist: bool = False,
    ) -> Any:
        """An `empty_cache` with these sequences in it, in their order.

        What stands at targets is ignored.
        """
        lengths = self._check(tokens.masked_fill(~context, 0), context, mode, lengths, insist)
        cache = self.empty_cache(mode, *tokens.shape)
        if cache is not None:
            cache.admit(tokens, context, lengths)
        return cache

    def lean(self, kind: str) -> Self:
        """Round the weights to `bfloat16` or `int8` where they stand, for quicker generation; see
        `model.fast_step`. There is no way back.
        """
        if kind != self.weights:
            self._check_lean(kind)
            raise ValueError(
                f"weights is {kind!r}; a model of type {self.config.model_type!r} has only "
                f"{self.weights}"
            )
        return self

    def _check_lean(self, kind: str) -> None:
        check_kind(kind)
        if self.weights != "float32":
            raise ValueError(
                f"the weights are already rounded to {self.weights}; load the model again for "
                f"{kind}"
            )

    def num_parameters(self, embeddings: bool = True) -> int:
        counted = sum(parameter.numel() for parameter in self.parameters())
        return (
            counted
            if embeddings
            else counted - sum(table.numel() for table in self.embedding_tables())
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return what a folder holds: each parameter once, by its first name, and buffers."""
        kept = self.state_dict(keep_vars=True)
        first: dict[int, str] = {}  # name of each distinct tensor
        for name, tensor in kept.items():
            first.setdefault(id(tensor), name)
        return {name: kept[name] for name in first.values()}

    def save_pretrained(
        self, folder: str | PathLike[str], dtype: torch.dtype | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors`, each whole or not at all;
        `dtype` rounds the weights.
        """
        storage.save(folder, self.config, self.tensors(), dtype)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        document: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Load a folder that `save_pretrained` wrote, in eval mode.

        Args:
            folder: Folder with `config.json` and `model.safetensors`.
            dtype: Type of the weights.
            device: Device of the weights.
            document: Content of `config.json`, if the caller has read it already.
            **options: Passed to the constructor.

        Raises:
            FileNotFoundError: A file is missing.
            ValueError: A tensor is missing, unexpected or of the wrong shape.
        """
        config = storage.load_config(folder, cls.config_class, document)
        with storage.on_meta() if cls.built_on_meta else torch.device("cpu"):
            model = cls(config, **options)
        expected = {name: tuple(tensor.shape) for name, tensor in model.tensors().items()}
        weights = storage.load_weights(folder, expected, dtype, device, config.old_tensor_names)
        if cls.built_on_meta:
            model.load_state_dict(weights, assign=True)
        else:
            # names were compared above; the rest are tied to these
            model.to(device, dtype).load_state_dict(weights, strict=False)
        return model.eval()

    def _check(
        self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor | None, insist: bool
    ) -> Tensor:
        return check_batch(self.config, tokens, context, mode, lengths, insist)


def each_given_alone(
    wanted: Tensor,
    targets: Tensor,
    states: Callable[[Tensor, Tensor, Tensor], Tensor],
    tokens_at_once: int = 2**14,
) -> tuple[Tensor, Tensor]:
    """`hidden` for networks that would show a given position its own token: each of those is asked
    in a row of its own, as a target too.

    `states(rows (M,), targets (M, T), asked (M, T))` are the final states of the asked targets,
    where the network reads `targets` as unknown. Costly for many given positions, so ask for
    targets where these suffice. wanted, targets: (B, T)
    """
    B, T = wanted.shape
    plain, extra = wanted & targets, (wanted & ~targets).nonzero()
    parts = [states(torch.arange(B, device=wanted.device), targets, plain)]
    for row, position in (
        some.unbind(1) for some in extra.split(max(1, tokens_at_once // T)) if len(some)
    ):
        alone = torch.zeros_like(wanted[row]).scatter(1, position[:, None], True)
        parts.append(states(row, targets[row] | alone, alone))
    rows, order = torch.cat((plain.flatten().nonzero()[:, 0], extra[:, 0] * T + extra[:, 1])).sort()
    return (torch.cat(parts)[order] if len(extra) else parts[0]), rows


def targets_of(context: Tensor, lengths: Tensor) -> Tensor:
    """(B, T): not given, and not padding."""
    inside = torch.arange(context.shape[1], device=context.device) < lengths[:, None]
    return ~context & inside


def without_targets(tokens: Tensor, context: Tensor) -> Tensor:
    """Zero wherever a token is not given, so that anything may stand there.

    A context that does not fit is left to the batch's check.
    """
    fits = (
        context.shape == tokens.shape
        and context.dtype == torch.bool
        and context.device == tokens.device
    )
    return tokens.masked_fill(~context, 0) if fits else tokens
