"""Results of text-level functions: frozen records, each with `to_dict()` for JSON.

- `Infilled`, `Scored`, `Sampled`, `Marginal`: what `LanguageModel` returns, with their parts
  `Span`, `Candidate` and `LengthChoice`.
- `Token`: one token as it arrives; `Callback`, `TokenCallback`: functions that receive tokens.

Log-probabilities are natural logarithms, the model's own, before temperature or any other change by
the sampler.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """Base class of results."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON has them; infinite and undefined numbers become None."""
        return {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__}


class NonFiniteError(FloatingPointError):
    """The model computed a probability that is no number."""


def require_finite(log_probs: Sequence[float]) -> None:
    """Raise NonFiniteError if one of these log-probabilities is infinite or NaN."""
    for log_prob in log_probs:
        if not math.isfinite(log_prob):
            raise NonFiniteError(
                f"the model computed the log-probability {log_prob}; its weights are damaged, or "
                "too large for their precision"
            )


@dataclass(frozen=True)
class Candidate(Record):
    """One of the most likely tokens of a position."""

    token_id: int
    text: str
    probability: float
    log_prob: float


# of each position, most likely first; empty if none were asked for
Candidates = tuple[tuple[Candidate, ...], ...]


@dataclass(frozen=True)
class Span(Record):
    """A filled blank, or a marked part of a scored text.

    Args:
        start: Where it begins in the text of the result.
        stop: Where it ends: its text is `text[start:stop]` of the result.
        text: Its text.
        token_ids: Its tokens.
        tokens: Text of each token; a part of a UTF-8 character is shown as U+FFFD.
        log_probs: Log-probability of each token.
        first_token: Position of its first token in the sequence.
        candidates: Most likely tokens at each position, if requested.
    """

    start: int
    stop: int
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    log_probs: tuple[float, ...]
    first_token: int = 0
    candidates: Candidates = ()

    def __post_init__(self) -> None:
        require_finite(self.log_probs)

    @property
    def log_prob(self) -> float:
        """Log-probability of all tokens."""
        return math.fsum(self.log_probs)


@dataclass(frozen=True)
class LengthChoice(Record):
    """How the lengths of blanks were chosen.

    Args:
        lengths: The candidates; each has one length per blank, fixed ones included.
        log_weights: Logarithm of estimated probability times prior, for each candidate.
        standard_errors: Standard errors of the log-weights.
        chosen: The candidate that was chosen.
    """

    lengths: tuple[tuple[int, ...], ...]
    log_weights: tuple[float, ...]
    standard_errors: tuple[float, ...]
    chosen: tuple[int, ...]

    @property
    def log_probabilities(self) -> tuple[float, ...]:
        """The log-weights, normalised over the candidates."""
        top = max(self.log_weights)
        total = top + math.log(math.fsum(math.exp(weight - top) for weight in self.log_weights))
        return tuple(weight - total for weight in self.log_weights)

    @property
    def probabilities(self) -> tuple[float, ...]:
        """The weights, normalised over the candidates."""
        return tuple(math.exp(value) for value in self.log_probabilities)


@dataclass(frozen=True)
class Infilled(Record):
    """A text with its blanks filled.

    Args:
        text: The whole text.
        spans: The filled blanks.
        log_prob: Log-probability of all fills together, given the rest and their lengths. Exact
            under `car` and `ar`; under `ac` exact given the order, one token per step.
        seed: Seed of this sample.
        mode: Mode that was used.
        token_ids: The whole sequence, with the end of text where it was given.
        length_choice: How the lengths of blanks were chosen, if they were not fixed.
        note: What a reader of this result must know, such as an approximation.
        score: Score by which quality `best` ranked the fill, in nats; None if it was not ranked.

    Example:
        >>> result = Infilled("a cat", (), -0.5, 0, "car", (1, 2))
        >>> result.to_dict()["log_prob"]
        -0.5
    """

    text: str
    spans: tuple[Span, ...]
    log_prob: float
    seed: int
    mode: str
    token_ids: tuple[int, ...]
    length_choice: LengthChoice | None = None
    note: str = ""
    score: float | None = None


@dataclass(frozen=True)
class Scored(Record):
    """The score of the marked parts of a text, given the rest.

    Args:
        text: The whole text.
        spans: The marked parts.
        log_prob: Log-probability of all marked parts.
        tokens: Number of marked tokens.
        bits_per_byte: Bits per byte of the marked text in UTF-8.
        perplexity: Perplexity per token.
        mode: Mode that was used.
        kind: "exact" (joint probability), "marginal" (of each token) or "bound" (on the joint).
        standard_error: Standard error of `log_prob`, where it is estimated.
        note: What a reader of this result must know.

    Example:
        >>> Scored("a cat", (), -2.0, 1, 0.7, 7.4, "car", "exact").kind
        'exact'
    """

    text: str
    spans: tuple[Span, ...]
    log_prob: float
    tokens: int
    bits_per_byte: float
    perplexity: float
    mode: str
    kind: str
    standard_error: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Marginal(Record):
    """The most likely tokens of one position of a blank.

    Args:
        position_in_text: Position in the token sequence.
        blank: Number of the blank, from 0.
        index: Number of the token in the blank, from 0.
        candidates: The tokens, most likely first.

    Example:
        >>> Marginal(3, 0, 0, (Candidate(7, " cat", 0.5, -0.69),)).candidates[0].text
        ' cat'
    """

    position_in_text: int
    blank: int
    index: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Sampled(Record):
    """A text that was sampled, prompt included.

    Args:
        text: The text, cut before a stop string.
        token_ids: The sampled tokens, end of text included.
        log_probs: Log-probability of each sampled token.
        log_prob: Log-probability of all of them.
        seed: Seed of this sample.
        ended: Whether the end of text was sampled.
        mode: Mode that was used.
        note: What a reader of this result must know.
        stopped: The stop string that ended the text, if one did.
        candidates: Most likely tokens at each position, if requested.

    Example:
        >>> Sampled("a cat", (2,), (-0.5,), -0.5, 0, False, "ar").ended
        False
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

    def __post_init__(self) -> None:
        require_finite(self.log_probs)


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
        candidates: Most likely tokens at this position, if requested.
        draft: The token may still change: it is the most likely one at a position that is still
            open, or belongs to a sample that may not be among the best.
        text: Number of the text, from 0.
        blank: Number of the blank in the text, from 0.
        index: Number of the token in the blank, from 0.
        token: The token's own text.

    Example:
        >>> Token(0, 3, 7, -0.5, token=" cat").to_dict()["token"]
        ' cat'
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
