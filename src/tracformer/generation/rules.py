"""What holds for every text that is filled or written: which tokens may come, and what its reader must know."""

from collections.abc import Sequence
from dataclasses import replace

from tracformer.generation.blanks import Frame, Laid
from tracformer.generation.samplers import Sampler
from tracformer.generation.spelling import HALF, Spelling
from tracformer.model.base import BOUND, ConditionalModel


def text_rules(sampler: Sampler, spelling: Spelling, allowed: Sequence[int] = ()) -> Sampler:
    """The sampler, with every token banned that is not text and that it does not name itself."""
    named = {*sampler.allowed, *sampler.required, *allowed}
    return replace(sampler, banned=tuple(sorted({*sampler.banned, *(set(spelling.special) - named)})))


def as_revealed(model: ConditionalModel, mode: str) -> str:
    """A note, where fillings in this mode have no probability of their own."""
    if model.answers[mode] != BOUND:
        return ""
    return "log p is each token's when it was revealed, not that of the whole filling: score gives a bound on that"


def not_utf8(what: str, text: str) -> str:
    """A note, where this is so."""
    return f"{what} holds bytes that are not UTF-8, shown as U+FFFD" if HALF in text else ""


def joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def word_start(of: Frame, laid: Laid, position: int, spelling: Spelling) -> tuple[int, ...] | None:
    """The tokens that may open a blank into which a space moved; None anywhere else."""
    starts = {start for start, moved in zip(laid.starts, of.spaced, strict=True) if moved}
    return spelling.word_starts if position in starts else None
