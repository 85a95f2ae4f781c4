"""BLEU-4 (Papineni et al. 2002), between 0 and 1: over a corpus, and sentence by sentence.

With m_n the n-grams of the hypothesis that the reference has as well (each counted at most as often as it stands there), t_n all n-grams of
the hypothesis, h and r the two lengths, all summed over the corpus or over one sentence:

    BLEU-4 = min(1, exp(1 - r/h)) * (prod_{n=1..4} m_n / t_n)^(1/4)

The paper writes "BLEU-4" and figures between 0 and 1, and names neither a package nor a level. Corpus BLEU is the definition, and what
packages on that scale compute unless asked for sentences, so `bleu4` is that here; the mean over sentences stands beside it. With half of
the text given the two lie close together.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

ORDERS = (1, 2, 3, 4)
SMOOTHINGS = ("none", "floor", "exp")
FLOOR = 0.1

# The rules of the reference script mteval-v13a, in order: what stands on its own, and stops and commas that are not inside numbers.
_RULES_13A = (
    (re.compile(r"([ -&(-+:-@/\[-`{-~])"), r" \1 "),
    (re.compile(r"([^0-9])([.,])"), r"\1 \2 "),
    (re.compile(r"([.,])([^0-9])"), r" \1 \2"),
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)
_ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))


def words_by_space(text: str) -> list[str]:
    """As the text is spaced: a comma belongs to the word before it."""
    return text.split()


def words_13a(text: str) -> list[str]:
    """The tokenisation of mteval-v13a, which sacrebleu uses unless told otherwise: punctuation stands alone.

    >>> words_13a("In 2,006 (or so), it won.")
    ['In', '2,006', '(', 'or', 'so', ')', ',', 'it', 'won', '.']
    """
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in _ENTITIES:
        text = text.replace(entity, character)
    text = f" {text} "
    for pattern, spaced in _RULES_13A:
        text = pattern.sub(spaced, text)
    return text.split()


WORDS: dict[str, Callable[[str], list[str]]] = {"13a": words_13a, "space": words_by_space}


@dataclass(frozen=True)
class Counts:
    """What BLEU needs of a hypothesis and its reference. Counts add up: over spans to a sentence's, over sentences to a corpus's."""

    matches: tuple[int, ...] = (0, 0, 0, 0)  # m_n
    totals: tuple[int, ...] = (0, 0, 0, 0)  # t_n
    length: int = 0  # h
    reference: int = 0  # r

    def __add__(self, other: Self) -> "Counts":
        return Counts(
            tuple(a + b for a, b in zip(self.matches, other.matches, strict=True)),
            tuple(a + b for a, b in zip(self.totals, other.totals, strict=True)),
            self.length + other.length,
            self.reference + other.reference,
        )


def count(hypothesis: Sequence[Hashable], reference: Sequence[Hashable]) -> Counts:
    matches, totals = [], []
    for n in ORDERS:
        found, there = _ngrams(hypothesis, n), _ngrams(reference, n)
        matches.append((found & there).total())
        totals.append(found.total())
    return Counts(tuple(matches), tuple(totals), len(hypothesis), len(reference))


def bleu(counts: Counts, smoothing: str = "none") -> float:
    """`smoothing` is for single sentences, where one precision of zero would make the whole score zero: "floor" counts 0.1 of a match
    instead; "exp" counts 1/2 for the first order without a match, 1/4 for the next, and so on. Orders that a short hypothesis does not
    have at all count as no match under "none", and are left out of the mean under the other two.
    """
    if smoothing not in SMOOTHINGS:
        raise ValueError(f"smoothing is {smoothing!r}; allowed: {', '.join(SMOOTHINGS)}")
    if counts.length == 0 or counts.matches[0] == 0:  # not one word in common: nothing to smooth
        return 0.0
    logs, missed = [], 0
    for match, total in zip(counts.matches, counts.totals, strict=True):
        if smoothing == "none" and match == 0:
            return 0.0
        if total == 0:
            break
        if match == 0:
            missed += 1
        logs.append(math.log((match or (FLOOR if smoothing == "floor" else 0.5**missed)) / total))
    brevity = min(0.0, 1.0 - counts.reference / counts.length)
    return math.exp(brevity + math.fsum(logs) / len(logs))


def corpus_bleu(counts: Iterable[Counts]) -> float:
    return bleu(sum(counts, Counts()))


def sentence_bleu(hypothesis: Sequence[Hashable], reference: Sequence[Hashable], smoothing: str = "floor") -> float:
    return bleu(count(hypothesis, reference), smoothing)


def _ngrams(items: Sequence[Hashable], n: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1))
