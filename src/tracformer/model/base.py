"""What every model answers, whatever its network.

`ConditionalModel` is the base class of all systems: logits, log-probabilities, a loss, a cache for
generation, a folder on disk. A system adds its `ModelConfig` and one method, `hidden`: the final
states of some positions, from which `head` makes logits. Training, generation, evaluation and the
command line use only this class.

Also here: `check_batch` and `check_mode` (does a batch fit a model?), `Passes` (work that runs one
pass of the network at a time, so that others can run between), and `each_given_alone` (for networks
that would show a given position its own token).
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from os import PathLike
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from tracformer.devices import require_memory
from tracformer.model import likelihood, storage
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig
from tracformer.model.fast_step import check_kind

A = TypeVar("A")

Passes = Generator[None, None, A]
"""Work in passes: each `next` runs the network at most once; the result is the return value.

The caller may run something else between two passes, or stop.
"""


def finish(passes: Passes[A]) -> A:
    """Run all passes and return the result."""
    while True:
        try:
            next(passes)
        except StopIteration as end:
            result: A = end.value
            return result


def at_once(f: Callable[[], A]) -> Passes[A]:
    """Return the call `f()` as work in a single pass."""
    yield from ()
    return f()


PREFERRED = ("car", "ac", "ar")


def check_batch(config: ModelConfig, batch: Batch, mode: str) -> None:
    """Raise a ValueError unless a model with this configuration can answer the batch in this mode.

    Shapes, dtypes and lengths were checked when the batch was made. Token ids in the padding may
    be anything.
    """
    check_mode(config, mode)
    if not isinstance(batch, Batch):
        raise TypeError(
            f"the first argument is a {type(batch).__name__}; it must be a Batch: "
            "Batch(tokens, context, lengths)"
        )
    if batch.width > config.max_length:
        raise ValueError(
            f"sequences are {batch.width} tokens long; this model takes at most max_length = "
            f"{config.max_length}"
        )
    batch.check_length(config)
    low, high = (int(x) for x in batch.tokens.masked_fill(~batch.inside(), 0).aminmax())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(
            f"token id {wrong} is out of range; ids must lie in 0..{config.vocab_size - 1} "
            f"(vocab_size {config.vocab_size})"
        )


def check_mode(config: ModelConfig, mode: str) -> None:
    """Raise a ValueError unless the model has this mode and its weights were trained in it."""
    if mode not in config.possible_modes:
        raise ValueError(
            f"mode is {mode!r}; allowed for {config.model_type}: {', '.join(config.possible_modes)}"
        )
    if mode not in config.modes:
        raise ValueError(
            f"mode is {mode!r}, but these weights were trained for: {', '.join(config.modes)}"
        )


def preferred_mode(config: ModelConfig) -> str:
    """Return the default mode: of the trained modes the first of car, ac, ar, else the first."""
    return next((mode for mode in PREFERRED if mode in config.modes), config.modes[0])


EXACT, MARGINAL, BOUND = "exact", "marginal", "bound"


class Estimate(NamedTuple):
    """Log-probabilities of targets, or a bound on them."""

    values: Tensor  # (B, T) share of each target, zero where given and in the padding
    standard_error: Tensor | None  # (B,) of each sequence's sum; None: the values are exact


class ConditionalModel(nn.Module):
    """A model of p(targets | given tokens), in one or more modes.

    Every method takes a `Batch` first and checks it against the configuration once.
    """

    config: ModelConfig
    config_class: ClassVar[type[ModelConfig]]
    # mode -> EXACT (joint by the chain rule), MARGINAL (of each target) or BOUND (on the joint)
    answers: ClassVar[Mapping[str, str]]
    # mode -> what it cannot do; shown with its results
    limits: ClassVar[Mapping[str, str]] = {}
    # noise draws of an estimate, unless the caller says how many
    default_draws: ClassVar[int | None] = None
    # recompute each block in the backward pass instead of keeping its inner tensors
    checkpoint_activations: bool = False
    weights: str = "float32"  # their precision; `lean` lowers it
    # False where buffers are computed at construction or tensors are tied
    built_on_meta: ClassVar[bool] = True

    @abstractmethod
    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the final states of the positions where `wanted` (B, T) is True.

        Returns:
            The states (N, d), and their positions as ascending flat indices b * T + t (N,).
        """

    @property
    @abstractmethod
    def head(self) -> Tensor:
        """The output matrix (vocab_size, d). The mask is never predicted and has no row."""

    @property
    def head_bias(self) -> Tensor | None:
        """The output bias (vocab_size,), if there is one."""
        return None

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """Return the repeated layers, which training shards and compiles one by one."""

    @abstractmethod
    def embedding_tables(self) -> list[Tensor]:
        """Return the tables that `num_parameters(embeddings=False)` does not count."""

    def forward(self, batch: Batch, mode: str = "car") -> Tensor:
        """Return logits (B, T, vocab_size) at every position; zero in the padding.

        A given position is answered as if it alone were unknown.
        """
        check_batch(self.config, batch, mode)
        hidden, rows = self.hidden(batch, mode, batch.inside())
        return _spread(
            likelihood.logits_of(hidden, self.head, self.head_bias), rows, batch.tokens.shape
        )

    def logits_at(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        """Return logits (N, vocab_size) where `wanted` (B, T) is True, in row-major order."""
        check_batch(self.config, batch, mode)
        hidden, _ = self.hidden(batch, mode, wanted)
        return likelihood.logits_of(hidden, self.head, self.head_bias)

    def log_prob(
        self, batch: Batch, mode: str = "car", *, draws: int | None = None, seed: int = 0
    ) -> Tensor:
        """Return the log-probability (B, T) of each target; zero where given and in the padding.

        Where `answers[mode]` is exact, its sum over a sequence is the exact joint log-probability.

        Args:
            batch: Sequences with their true tokens.
            mode: One of the modes that the weights were trained in.
            draws: Noise draws of the estimate, where `answers[mode]` is a bound; None: the model's
                default.
            seed: Seed of these draws.
        """
        return self.estimate(batch, mode, draws=draws, seed=seed).values

    def estimate(
        self, batch: Batch, mode: str = "car", *, draws: int | None = None, seed: int = 0
    ) -> Estimate:
        """Return what `log_prob` returns, with its standard error."""
        check_batch(self.config, batch, mode)
        hidden, rows = self.hidden(batch, mode, batch.targets())
        values = likelihood.token_log_probs(
            hidden, self.head, batch.tokens.flatten()[rows].long(), self.head_bias
        )
        return Estimate(_spread(values, rows, batch.tokens.shape), None)

    def candidates(self, batch: Batch, mode: str, top: int = 5) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens at each target, and their log-probabilities.

        Args:
            batch: Sequences with their true tokens: what `log_prob` conditions on, this does too.
            mode: One of the modes that the weights were trained in.
            top: Number of tokens to return for each target.

        Returns:
            Token ids (B, T, top), -1 where given and in the padding, and log-probabilities
            (B, T, top).

        Raises:
            ValueError: The mode answers with a bound, which ranks no tokens.
        """
        check_batch(self.config, batch, mode)
        if self.answers[mode] == BOUND:
            raise ValueError(
                f"mode {mode!r} gives a bound, which has no most likely tokens; use top = 0, or "
                "another mode"
            )
        hidden, rows = self.hidden(batch, mode, batch.targets())
        ids, values = likelihood.likeliest(
            hidden, self.head, min(top, self.config.vocab_size), self.head_bias
        )
        shape = batch.tokens.shape
        return _spread(ids, rows, shape, fill=-1), _spread(values, rows, shape)

    def loss(self, batch: Batch, mode: str = "car") -> Tensor:
        """Return the negative log-likelihood per target of the whole batch (Eqs. 7 and 8)."""
        total, count = self.nll(batch, mode)
        if count == 0:
            raise ValueError(
                "context gives every token of the batch; a loss needs at least one target"
            )
        return total / count

    def nll(
        self, batch: Batch, mode: str = "car", *, weights: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """Return the negative log-likelihood summed over targets, and the number of targets.

        For a loss that is normalised over a larger batch.

        Args:
            batch: Sequences with their true tokens.
            mode: One of the modes that the weights were trained in.
            weights: (B, T) factor of each target's term; None: 1.
        """
        check_batch(self.config, batch, mode)
        hidden, rows = self.hidden(batch, mode, batch.targets())
        row_weights = None if weights is None else weights.flatten()[rows]
        total = likelihood.weighted_nll(
            hidden, self.head, batch.tokens.flatten()[rows].long(), row_weights, self.head_bias
        )
        return total, len(rows)

    def empty_cache(self, mode: str, rows: int, length: int) -> Any:
        """Return a cache for generation in this mode, or None if the model has none.

        Without a cache, generation runs the whole network for each step. A cache has the interface
        of `generation.sessions.Session`.

        Args:
            mode: Mode of generation.
            rows: Number of sequences that the cache holds.
            length: Longest sequence, in tokens.
        """
        return None

    def cache(self, batch: Batch, mode: str) -> Any:
        """Return an `empty_cache` that holds these sequences, in their order.

        The tokens at targets are ignored.
        """
        check_batch(self.config, batch.without_targets(), mode)
        cache = self.empty_cache(mode, *batch.tokens.shape)
        if cache is not None:
            cache.admit(batch)
        return cache

    def lean(self, kind: str) -> Self:
        """Round the weights to `bfloat16` or `int8` in place, for faster generation.

        See `model.fast_step`. This cannot be undone; load the model again for the full weights.
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

    def card(self, training: str) -> str | None:
        """Return a model card for what training writes, as Markdown; None: it writes none.

        Args:
            training: How the model was trained, a sentence.
        """
        return None

    def num_parameters(self, embeddings: bool = True) -> int:
        """Return the number of parameters, or of those outside the embedding tables."""
        counted = sum(parameter.numel() for parameter in self.parameters())
        return (
            counted
            if embeddings
            else counted - sum(table.numel() for table in self.embedding_tables())
        )

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by name; by default all."""
        return dict(self.named_parameters())

    def round_frozen(self, dtype: torch.dtype) -> None:
        """Round the parameters that training does not change, in place."""
        trained = set(map(id, self.trained_parameters().values()))
        for parameter in self.parameters():
            if id(parameter) not in trained:
                parameter.data = parameter.data.to(dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that `save_pretrained` writes: parameters and buffers.

        A parameter with several names appears once, under the first.
        """
        kept = self.state_dict(keep_vars=True)
        first: dict[int, str] = {}  # name of each distinct tensor
        for name, tensor in kept.items():
            first.setdefault(id(tensor), name)
        return {name: kept[name] for name in first.values()}

    def save_pretrained(
        self, folder: str | PathLike[str], dtype: torch.dtype | None = None
    ) -> None:
        """Write `config.json` and `model.safetensors`, each atomically.

        Args:
            folder: Folder to write to; made if missing.
            dtype: Round the weights to this dtype.
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
        if torch.device(device).type == "cpu":
            numbers = sum(map(math.prod, expected.values()))
            require_memory(numbers * dtype.itemsize, f"the model of {folder}")
        weights = storage.load_weights(folder, expected, dtype, device, config.old_tensor_names)
        if cls.built_on_meta:
            model.load_state_dict(weights, assign=True)
        else:
            # names were compared above; the rest are tied to these
            model.to(device, dtype).load_state_dict(weights, strict=False)
        return model.eval()


def _spread(values: Tensor, rows: Tensor, shape: torch.Size, fill: float = 0.0) -> Tensor:
    """Return (B, T, ...) with `values` (N, ...) at the flat indices `rows` and `fill` elsewhere."""
    if len(rows) == shape.numel():
        return values.unflatten(0, shape)
    whole = values.new_full((shape.numel(), *values.shape[1:]), fill)
    return whole.index_copy(0, rows, values).unflatten(0, shape)


def each_given_alone(
    wanted: Tensor,
    targets: Tensor,
    states: Callable[[Tensor, Tensor, Tensor], Tensor],
    tokens_at_once: int = 2**14,
) -> tuple[Tensor, Tensor]:
    """Compute `hidden` for a network that would show a given position its own token.

    All wanted targets are answered in one pass. Each wanted given position gets a row of its own
    in which it is a target too, which is expensive if there are many.

    Args:
        wanted: (B, T) bool, positions to answer.
        targets: (B, T) bool, positions that the network must not see.
        states: `states(rows (M,), targets (M, T), asked (M, T))` returns the final states of the
            asked targets of some rows, where the network reads `targets` as unknown.
        tokens_at_once: Tokens in the rows of one pass.

    Returns:
        What `ConditionalModel.hidden` returns.
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
