"""Rules and notes shared by texts that are filled and texts that are sampled.

- `text_rules`, `can_hold`: which tokens a text may have, and whether required ones find a place.
- `as_revealed`, `not_utf8`, `search_note`, `joined`: notes for the reader of a result.
"""

from collections.abc import Sequence
from dataclasses import replace

from tracformer.generation.request_options import Sampler
from tracformer.generation.search import Found
from tracformer.generation.template import TokenizedText
from tracformer.generation.token_text import HALF, Spelling
from tracformer.model.base import BOUND, ConditionalModel


def text_rules(sampler: Sampler, spelling: Spelling, allowed: Sequence[int] = ()) -> Sampler:
    """Return the sampler with special tokens banned, except those that it names or `allowed`."""
    named = {*sampler.allowed, *sampler.required, *allowed}
    banned = {*sampler.banned, *(set(spelling.special) - named)}
    return replace(sampler, banned=tuple(sorted(banned)))


def can_hold(given: TokenizedText, count: int, sampler: Sampler, spelling: Spelling) -> bool:
    """Return whether blanks of `count` tokens in all have places for every required token.

    A blank that a space moved into begins with a word start.
    """
    required, starts = set(sampler.required), sum(given.spaced)
    if len(required) <= count - starts:
        return True
    at_starts = len(required.intersection(spelling.word_starts))
    return len(required) <= count - starts + min(starts, at_starts)


def as_revealed(model: ConditionalModel, mode: str) -> str:
    """Return a note if fills in this mode have no probability of their own."""
    if model.answers[mode] != BOUND:
        return ""
    return (
        "log p is each token's when it was filled in, not that of the whole fill: score gives a "
        "bound on that"
    )


def not_utf8(what: str, text: str) -> str:
    """Return a note if a text holds bytes that are not UTF-8."""
    return f"{what} holds bytes that are not UTF-8, shown as U+FFFD" if HALF in text else ""


def joined(*notes: str) -> str:
    """Return notes as one, empty ones left out."""
    return "; ".join(note for note in notes if note)


def search_note(method: str, number: int, found: Found) -> str:
    """Return a note on how far a search proves its fill."""
    if found.proven:
        return (
            f"{method} search: proven; no fill of these lengths but those before it is more "
            "probable"
        )
    if method == "beam":
        return f"beam search of width {number}: approximate"
    return f"best-first search gave up after {found.expanded} nodes: not proven the most probable"
