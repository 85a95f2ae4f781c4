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


@dataclass(frozen=True, slots=True)
class Token(Record):
    """One token as it arrives, or a draft of it.

    Token-level functions such as `fill` set the first fields. `LanguageModel` also says where the
    token is in the text.

    Args:
        sample: Number of the sample, or of the sequence in the batch, from 0.
        position: Position in the sequence, from 0.
        token_id: Id of the token.
        log_prob: Log-probability of the token when it was filled in.
        candidates: Most likely tokens at this position, if they were asked for.
        draft: The token may still change: it is the most likely one at a position that is still
            open, or belongs to a sample that may not be among the best.
        text: Number of the text, from 0.
        blank: Number of the blank in the text, from 0.
        index: Number of the token in the blank, from 0.
        token: The token's own text.
    """

    sample: int
    position: int
    token_id: int
    log_prob: float
    candidates: tuple[Candidate, ...] = ()
    draft: bool = False
    text: int = 0
    blank: int = 0
    index: int = 0
    token: str = ""


class Callback:
    """A token callback that also receives drafts, and the lengths of blanks before any token."""

    def __call__(self, tokens: list[Token]) -> object:
        """Receive tokens and drafts as they arrive. Return False to receive no more."""

    def lengths(self, text: int, sample: int, lengths: tuple[int, ...]) -> None:
        """Receive the number of tokens of each blank of a sample."""


# Called with the tokens of each step; one that returns False is not called again
TokenCallback = Callable[[list[Token]], object]


def until_false(callback: TokenCallback) -> TokenCallback:
    """Return the callback for use in several batches: after it returned False it is not called."""
    wanted = True

    def call(tokens: list[Token]) -> bool:
        nonlocal wanted
        wanted = wanted and callback(tokens) is not False
        return wanted

    return call


def _plain(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
