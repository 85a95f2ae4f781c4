"""What the text level answers with: plain frozen records, each with `to_dict()` for JSON.

Log-probabilities are natural logarithms, the model's own, before temperature or any other change of
the sampler.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    def to_dict(self) -> dict[str, Any]:
        """Names to numbers, strings, lists and dicts, as JSON has them; an infinite or undefined
        number becomes None.
        """
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclass(frozen=True)
class Candidate(Record):
    """One of the likeliest tokens of a position."""

    token_id: int
    text: str
    probability: float
    log_prob: float


# of each token, likeliest first; empty where none were asked for
Candidates = tuple[tuple[Candidate, ...], ...]


@dataclass(frozen=True)
class Span(Record):
    """One blank's filling, or one marked part. `text[start:stop]` of the result is its text; its
    tokens start at `first_token` of the sequence. A token that is half of a UTF-8 character shows
    as U+FFFD in `tokens`; in `text` the halves come together. `candidates`, where they were asked
    for: the likeliest tokens in each token's place, likeliest first.
    """

    start: int
    stop: int
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    log_probs: tuple[float, ...]
    first_token: int = 0
    candidates: Candidates = ()

    @property
    def log_prob(self) -> float:
        return math.fsum(self.log_probs)


@dataclass(frozen=True)
class LengthChoice(Record):
    """How a length was chosen: by `log_weights`, one for each candidate, the logarithm of
    (estimated mass times prior).

    A candidate is one length a blank, in the order of the blanks, fixed ones too. `standard_errors`
    are those of the log-weights.
    """

    lengths: tuple[tuple[int, ...], ...]
    log_weights: tuple[float, ...]
    standard_errors: tuple[float, ...]
    chosen: tuple[int, ...]

    @property
    def log_probabilities(self) -> tuple[float, ...]:
        """The weights, normalised over the candidates."""
        top = max(self.log_weights)
        total = top + math.log(math.fsum(math.exp(weight - top) for weight in self.log_weights))
        return tuple(weight - total for weight in self.log_weights)

    @property
    def probabilities(self) -> tuple[float, ...]:
        return tuple(math.exp(value) for value in self.log_probabilities)


@dataclass(frozen=True)
class Infilled(Record):
    """A text with its blanks filled. `log_prob` is of all fillings together, given the rest and
    their lengths: exact under `car` and `ar`; under `ac` exact given the order, one token a step.
    `token_ids` is the whole sequence, with the end of text where it was given.
    """

    text: str
    spans: tuple[Span, ...]
    log_prob: float
    seed: int
    mode: str
    token_ids: tuple[int, ...]
    length_choice: LengthChoice | None = None
    note: str = ""  # what the reader of this result must know: an approximation, a fall-back


@dataclass(frozen=True)
class Scored(Record):
    """Marked parts given the rest.

    `kind` says what the numbers are: exact joint, marginal of each token, or bound on the joint.
    """

    text: str
    spans: tuple[Span, ...]
    log_prob: float
    tokens: int  # how many were marked
    bits_per_byte: float  # of the marked text in UTF-8
    perplexity: float  # a token
    mode: str
    kind: str
    standard_error: float | None = None  # of log_prob, where it is estimated
    note: str = ""


@dataclass(frozen=True)
class Marginal(Record):
    """The likeliest tokens of one blank position, likeliest first."""

    position_in_text: int  # which token of the sequence
    blank: int  # which blank, from 0
    index: int  # which of the blank's tokens, from 0
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Sampled(Record):
    """A text from its prompt on. `token_ids` and `log_probs` are of all that was generated, end of
    text included where it came (`ended`). Where a stop string came it is named in `stopped`, and
    `text` ends before it.
    """

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    log_prob: float
    seed: int
    ended: bool
    mode: str
    note: str = ""
    stopped: str | None = None
    candidates: Candidates = ()


@dataclass(frozen=True)
class Arrival(Record):
    """One token as it comes, for `watch`: sample number `sample` of text number `text`, token
    `index` of blank `blank`, all from 0.

    A draft may still change: what looks likeliest in a place that is open, or a sample that need
    not be among the best.
    """

    text: int
    sample: int
    blank: int
    index: int
    token_id: int
    token: str
    log_prob: float
    draft: bool = False
    candidates: tuple[Candidate, ...] = ()


class Watcher:
    """A `watch` that hears more than a function does: drafts too, and each sample's lengths before
    its first token.
    """

    def __call__(self, arrivals: list[Arrival]) -> object:
        """Tokens and drafts as they come. Returns False when it wants to hear no more."""

    def lengths(self, text: int, sample: int, lengths: tuple[int, ...]) -> None:
        """How many tokens each blank gets."""


Watch = Callable[[list[Arrival]], object]  # one that returns False wants to hear no more


def heeded(watch: Watch) -> Watch:
    """The same for several batches: once it has returned False it is not called again."""
    wanted = True

    def told(arrivals: list[Arrival]) -> bool:
        nonlocal wanted
        wanted = wanted and watch(arrivals) is not False
        return wanted

    return told


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
