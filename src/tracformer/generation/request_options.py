"""Options of filling, scoring and sampling: their names, help texts, bounds and defaults.

Each option is written here once. The keyword arguments of `LanguageModel`, the command line, the
fields of an HTTP request and the client are derived from these classes:

- `Sampler`: how a token is drawn from the model's distribution.
- `InfillOptions`, `ScoreOptions`, `SampleOptions`: the options of `LanguageModel.infill`, `score`
  and `sample`. `make` builds them from keyword arguments; the sampler's options may be given
  directly, as in `temperature=0.8`.
- `flat_options` lists all options of such a class, those of its sampler included.

This module does not import torch, so that `--help` is fast.
"""

import dataclasses
import operator
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tracformer.options import OptionInfo, check_options, default_of, did_you_mean, option
from tracformer.options import option_fields as fields_of

if TYPE_CHECKING:
    from tracformer.generation.orders import Order
else:
    Order = Any  # type hints are read at run time, without importing torch

# Weight of each length of a blank; blanks are independent
Prior = Callable[[int], float] | Mapping[int, float]
LENGTHS = ("sample", "rank")
QUALITIES = ("best", "fast", "raw")
ORDERS = ("left-to-right", "random", "ancestral", "probability", "entropy", "margin")


@dataclass(frozen=True)
class Sampler:
    """How a token is drawn from the model's distribution.

    The defaults sample from the model itself. Top-k, top-p and min-p are applied in this order,
    after the temperature; the most likely token is always kept.

    Args:
        temperature: Divides the logits; 0 always takes the most likely token.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the most likely tokens with total probability p.
        min_p: Keep tokens at least this fraction as likely as the most likely one.
        repetition_penalty: Above 1, tokens that the sequence already has become less likely.
        no_repeat_ngram: Never repeat a sequence of this many tokens; 0 allows it.
        banned: Token ids that are never used.
        allowed: Token ids that alone may be used; empty allows all.
        required: Token ids that must each be used at least once.

    Raises:
        ValueError: A value is out of bounds, or the token lists contradict each other.

    Example:
        >>> Sampler(temperature=0.8, top_p=0.95).top_k
        0
    """

    temperature: float = option(
        1.0,
        "sampling temperature; lower is more conservative, 0 always takes the most likely token",
        low=0,
        below=float("inf"),
        metavar="T",
    )
    top_k: int = option(0, "keep the K most likely tokens; 0 keeps all", low=0, metavar="K")
    top_p: float = option(
        1.0,
        "nucleus sampling: keep the most likely tokens with total probability P",
        above=0,
        high=1,
        metavar="P",
    )
    min_p: float = option(
        0.0,
        "keep tokens at least P times as likely as the most likely one",
        low=0,
        high=1,
        metavar="P",
    )
    repetition_penalty: float = option(
        1.0,
        "above 1 makes tokens less likely that the text already has",
        above=0,
        below=float("inf"),
        metavar="X",
    )
    no_repeat_ngram: int = option(
        0, "never repeat a sequence of N tokens; 0 allows it", low=0, metavar="N"
    )
    banned: tuple[int, ...] = option((), "token ids that are never used")
    allowed: tuple[int, ...] = option((), "token ids that alone may be used; empty allows all")
    required: tuple[int, ...] = option((), "token ids that must each be used at least once")

    def __post_init__(self) -> None:
        for name in ("banned", "allowed", "required"):
            # accept any sequence of integers, such as a tensor
            object.__setattr__(self, name, tuple(map(operator.index, getattr(self, name))))
        check_options(self)
        if overlap := set(self.required) & set(self.banned):
            raise ValueError(f"token {min(overlap)} is both required and banned")
        if self.allowed and (outside := set(self.required) - set(self.allowed)):
            raise ValueError(f"token {min(outside)} is required but not allowed")
        if self.allowed and set(self.allowed) <= set(self.banned):
            raise ValueError("every allowed token is banned")

    @cached_property
    def needs_history(self) -> bool:
        """Whether the distribution depends on the tokens that the sequence already has."""
        return self.repetition_penalty != 1.0 or self.no_repeat_ngram > 0


PLAIN = Sampler()  # samples from the model itself


class FlatOption(NamedTuple):
    """One option of a set of options, as `flat_options` lists it."""

    type: Any  # type hint of the field
    default: Any
    info: OptionInfo  # help text, bounds, metavar and flags


class TextOptions:
    """Methods of the option classes below, whose sampler's options count as their own."""

    @classmethod
    def make(cls, options: Self | None = None, **changes: Any) -> Self:
        """Return options from keyword arguments.

        Args:
            options: Options to change; the defaults if None.
            **changes: Fields of this class. Fields of `Sampler` change the sampler.

        Raises:
            ValueError: A name is unknown, a value is out of bounds, or options contradict.
        """
        if options is not None and not changes:
            return options
        known = {each.name for each in dataclasses.fields(cls)}  # type: ignore[arg-type]
        rules = set(fields_of(Sampler)) if "sampler" in known else set()
        for name in changes:
            if name not in (known | rules) - {"given"}:
                raise ValueError(f"unknown option {name!r}{did_you_mean(name, known | rules)}")
        own: dict[str, Any] = {name: value for name, value in changes.items() if name in known}
        if sampling := {name: value for name, value in changes.items() if name in rules}:
            base: Any = own.get("sampler") or getattr(options, "sampler", PLAIN)
            own["sampler"] = replace(base, **sampling)
        base_options: Any = options
        if "given" in known:
            named = {name for name, value in changes.items() if value is not None}
            named |= rules if "sampler" in changes else set()
            own["given"] = frozenset(named) | getattr(options, "given", frozenset())
        if options is None:
            return cls(**own)
        changed: Self = replace(base_options, **own)
        return changed

    def to_dict(self) -> dict[str, Any]:
        """Return all options by name, those of the sampler included, as JSON has them.

        An order becomes the options `order`, `k`, `threshold` and `steps`.

        Raises:
            ValueError: An option has no such form: a `GivenOrder` or a prior.
        """
        values = {name: getattr(self, name) for name in fields_of(self)}
        sampler = getattr(self, "sampler", None)
        if sampler is not None:
            values |= {name: getattr(sampler, name) for name in fields_of(sampler)}
        if not isinstance(values.get("order"), str | None):
            from tracformer.generation.orders import order_options

            values |= order_options(values["order"])
        if getattr(self, "prior", None) is not None:
            raise ValueError("prior is a Python object; it cannot be sent or written")
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }


def flat_options(kind: type[Any]) -> dict[str, FlatOption]:
    """Return the options of a class by name, those of its sampler included."""
    hints = typing.get_type_hints(kind)
    found = {
        name: FlatOption(hints[name], default_of(kind, name), info)
        for name, info in fields_of(kind).items()
    }
    return found | flat_options(Sampler) if "sampler" in hints else found


MODE = "what the model sees; car: both sides and all tokens before; ac: both sides, any order; "
WHOLE = "treat the text as cut from a longer one, not as a whole document"
TOP = "number of most likely tokens to return for each position"
BATCH = "number of sequences processed at once"


@dataclass(frozen=True)
class InfillOptions(TextOptions):
    """Options of `LanguageModel.infill`.

    Args:
        quality: "best" ranks candidates of a beam search and of nucleus samples, "fast" draws
            nucleus samples, "raw" draws exact samples. None: the model's setting, see
            `generation_config`.
        n: Number of fills per text. Fill i has the seed `derived_seed(seed, i)`; under `best` they
            differ and come in the order of their scores.
        seed: Random seed.
        mode: `car`, `ac`, `ar` or `diffusion`. None: the first of car, ac, ar that the model has,
            or ac if an order is given.
        sampler: Temperature, truncation and token constraints.
        order: An order or its name, for modes ac and diffusion. None: left to right.
        k: Number of tokens per step, for an order given by name.
        threshold: Fill all positions at least this confident in one step, for an order by
            confidence given by name.
        steps: Number of steps of the order `ancestral` and of mode diffusion; 0: the default.
        best_of: Draw this many fills and return the n most probable distinct ones; 0: off.
        search: "beam:WIDTH" or "best-first:BUDGET" searches for the most probable fills.
        reread: Rank candidates of `best_of` or a beam also by the left-to-right probability of the
            whole text.
        whole: The text is a whole document: its end is given. False: it is cut from a longer one.
        lengths: How the length of a blank is chosen: "sample" draws it, "rank" gives fill i the
            i-th most likely length.
        max_blank: Maximum number of tokens of a blank of any length.
        length_draws: Number of samples that estimate the probability of each length.
        top: Number of most likely tokens to return for each position.
        batch: Number of sequences processed at once.
        prior: Weight of each length of a blank, as a function or a mapping; None: all alike.
        given: Names of the options that the caller set; the model's settings fill in the others.
            Options whose value is not the default are added.

    Raises:
        ValueError: A value is out of bounds, or options contradict each other.

    Example:
        >>> InfillOptions.make(n=3, temperature=0.8).sampler.temperature
        0.8
    """

    quality: str | None = option(
        None,
        "best: rank candidates of a beam search and of nucleus samples; fast: nucleus samples; "
        "raw: exact samples (default: the model's setting)",
        choices=QUALITIES,
        metavar="best | fast | raw",
    )
    n: int = option(1, "number of fills per text", low=1, metavar="N", flags=("-n",))
    seed: int = option(0, "random seed", metavar="N")
    mode: str | None = option(
        None, MODE + "diffusion: the model's reverse process (default: chosen by model and order)"
    )
    sampler: Sampler = PLAIN
    order: "str | Order | None" = option(
        None,
        f"order of filling in mode ac: {', '.join(ORDERS)} (default: left-to-right)",
        metavar="NAME",
    )
    k: int = option(1, "number of tokens per step", low=1, metavar="K", flags=("--per-step",))
    threshold: float | None = option(
        None,
        "fill all positions at least this confident at once (orders probability, entropy, margin)",
        metavar="X",
    )
    steps: int = option(
        0,
        "number of steps of the order ancestral (default: 64) and of mode diffusion",
        low=1,
        high=2**53,
        metavar="N",
    )
    best_of: int = option(
        0,
        "draw N fills, return the most probable distinct ones (default: off)",
        low=1,
        metavar="N",
    )
    search: str | None = option(
        None,
        "search for the most probable fills: beam search of width K, or best-first search that "
        "opens at most N nodes",
        metavar="beam:K | best-first:N",
    )
    reread: bool = option(
        False,
        "rank candidates of best-of or a beam also by the left-to-right probability of the text",
    )
    whole: bool = option(True, WHOLE, flags=("--fragment",))
    lengths: str = option(
        "sample",
        "how to choose the length of a blank: sample draws it, rank takes the most likely",
        choices=LENGTHS,
        metavar="HOW",
    )
    max_blank: int = option(32, "most tokens of a blank [[]] of any length", low=1, metavar="N")
    length_draws: int = option(
        8, "number of samples that estimate the probability of each length", low=2, metavar="N"
    )
    top: int = option(0, TOP, low=0, metavar="N")
    batch: int = option(16, BATCH, low=1, metavar="N")
    prior: Prior | None = None
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", int(self.seed))  # NumPy's integers are not JSON
        check_options(self)
        changed = {name for name in fields_of(self) if getattr(self, name) != DEFAULTS[name]} | {
            name for name in fields_of(Sampler) if getattr(self.sampler, name) != DEFAULTS[name]
        }
        object.__setattr__(self, "given", self.given | changed)
        if self.best_of and self.best_of < self.n:
            raise ValueError(
                f"best_of is {self.best_of}; it must be at least n = {self.n}, or 0 for plain "
                "samples"
            )
        if self.mode in ("car", "ar") and self.fill_order is not None:
            from tracformer.generation.orders import orders_in

            orders_in(self.mode, self.fill_order, 1)
        method = None if self.search is None else parse_search(self.search)[0]
        if (
            self.quality in ("fast", "raw")
            and self.reread
            and not (self.best_of or method == "beam")
        ):
            raise ValueError(
                "reread ranks candidates: ask for several with best_of, or with search "
                "beam:WIDTH, or use quality best"
            )
        if method is None or self.quality == "best":
            return
        if self.best_of:
            raise ValueError(
                f"best_of is {self.best_of} and search is {self.search!r}; both pick the most "
                "probable fills: leave one of them out"
            )
        if self.fill_order is not None:
            raise ValueError("search fills from left to right; leave order out")
        if self.sampler != Sampler(banned=self.sampler.banned, allowed=self.sampler.allowed):
            raise ValueError(
                "search does not sample: of the sampler's options only banned and allowed have "
                "an effect; leave the others out"
            )

    @property
    def draws(self) -> int:
        """Number of samples drawn of each text."""
        return 1 if self.search else max(self.n, self.best_of)

    @property
    def fill_order(self) -> "Order | None":
        """The order of filling, made from its name if need be; None if no option names one."""
        if not isinstance(self.order, str | None):
            if self.k != 1 or self.threshold is not None or self.steps:
                raise ValueError(
                    f"order is {self.order!r}; k, threshold and steps belong to an order given by "
                    "its name"
                )
            return self.order
        if self.order is None and self.k == 1 and self.threshold is None and not self.steps:
            return None
        from tracformer.generation.orders import parse_order

        return parse_order(self.order, self.k, self.threshold, self.steps)


DEFAULTS = {
    name: default_of(kind, name) for kind in (InfillOptions, Sampler) for name in fields_of(kind)
}


@dataclass(frozen=True)
class ScoreOptions(TextOptions):
    """Options of `LanguageModel.score`.

    Args:
        mode: `car`, `ac`, `ar` or `diffusion`; None: the first of car, ac, ar that the model has.
        whole: The text is a whole document: its end is given. False: it is cut from a longer one.
        draws: Number of random draws of an estimate, where the score is a bound.
        seed: Random seed of these draws.
        top: Number of most likely tokens to return for each position.
        batch: Largest number of texts processed at once; of long texts, it is smaller.

    Raises:
        ValueError: A value is out of bounds.

    Example:
        >>> ScoreOptions.make(mode="ar", top=3).top
        3
    """

    mode: str | None = option(
        None,
        "car: exact joint probability; ac: marginal of each token; ar: sees only what comes "
        "before (default: the first of these that the model has)",
    )
    whole: bool = option(True, WHOLE, flags=("--fragment",))
    draws: int | None = option(
        None, "number of random draws where the score is an estimated bound", low=1, metavar="N"
    )
    seed: int = option(0, "random seed of these draws", metavar="N")
    top: int = option(0, TOP, low=0, metavar="N")
    batch: int = option(64, "largest number of texts processed at once", low=1, metavar="N")

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", int(self.seed))
        check_options(self)


@dataclass(frozen=True)
class SampleOptions(TextOptions):
    """Options of `LanguageModel.sample`.

    Args:
        n: Number of texts. Text i has the seed `derived_seed(seed, i)`.
        max_tokens: Maximum number of tokens to write; None: as many as the model takes.
        seed: Random seed.
        sampler: Temperature, truncation and token constraints.
        stop: Strings that end a text; it is cut before the first of them.
        top: Number of most likely tokens to return for each position.
        batch: Number of sequences processed at once.

    Raises:
        ValueError: A value is out of bounds.

    Example:
        >>> SampleOptions.make(max_tokens=20, temperature=0.7).max_tokens
        20
    """

    n: int = option(1, "number of texts", low=1, metavar="N", flags=("-n",))
    max_tokens: int | None = option(
        None,
        "maximum number of tokens to write (default: as many as the model takes)",
        low=1,
        metavar="N",
    )
    seed: int = option(0, "random seed", metavar="N")
    sampler: Sampler = PLAIN
    stop: tuple[str, ...] = option((), "strings that end a text")
    top: int = option(0, TOP, low=0, metavar="N")
    batch: int = option(16, BATCH, low=1, metavar="N")

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", int(self.seed))
        if isinstance(self.stop, str):
            raise ValueError(
                f"stop is {self.stop!r}; it must be a list of strings, for instance [{self.stop!r}]"
            )
        object.__setattr__(self, "stop", tuple(self.stop))
        check_options(self)


def parse_search(text: str) -> tuple[str, int]:
    """Return method and number of a search such as "beam:8" or "best-first:2000".

    Raises:
        ValueError: The text is neither.
    """
    method, _, number = text.partition(":")
    if method not in ("beam", "best-first") or not number.isdecimal() or int(number) == 0:
        raise ValueError(
            f"search is {text!r}; allowed: beam:WIDTH, for instance beam:8, or best-first:BUDGET, "
            "for instance best-first:2000"
        )
    return method, int(number)
