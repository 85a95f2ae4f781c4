"""BLEU-4 (Papineni et al. 2002) by sacrebleu, from 0 to 1: over a corpus, and by sentence.

With m_n the n-grams of the hypothesis that the reference has too (each counted at most as often as
it stands there), t_n all n-grams of the hypothesis, h and r the two lengths, all summed over the
corpus:

    BLEU-4 = min(1, exp(1 - r/h)) * (prod_{n=1..4} m_n / t_n)^(1/4)

Words are cut by sacrebleu's default tokenizer, `13a` (that of the reference script mteval-v13a,
which sets punctuation apart): figures of other work are quoted under it. Smoothing is sacrebleu's
default too, `exp`, which matters where an order has no match. The paper writes "BLEU-4" and figures
between 0 and 1, and names neither a package nor a level. Corpus BLEU is the definition, so `bleu4`
is that here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracformer.files import optional_package

Floats = NDArray[np.float64]

TOKENIZERS = {"13a": "13a", "space": "none"}  # the option `words` -> sacrebleu's name
COUNTS = 10  # m_1..m_4, t_1..t_4, h, r


class Bleu:
    """BLEU from counts that add up, over spans to a text's and over texts to a corpus's.

    Args:
        words: How words are cut: "13a", or "space" as the text is spaced.

    Raises:
        ImportError: if sacrebleu is not installed.

    Example:
        >>> bleu = Bleu()
        >>> counts = bleu.count(["the cat sat on it ."], ["the cat sat on a mat ."])
        >>> counts.tolist()
        [5.0, 3.0, 2.0, 1.0, 6.0, 5.0, 4.0, 3.0, 6.0, 7.0]
        >>> round(bleu.corpus(counts), 4)
        0.4548
    """

    def __init__(self, words: str = "13a") -> None:
        metrics = optional_package("sacrebleu.metrics", "BLEU", "eval")
        # force: do not warn about text that looks tokenized
        self._tokenizer = TOKENIZERS[words]
        self._metric: Any = metrics.BLEU(tokenize=self._tokenizer, force=True)

    def count(self, hypotheses: Sequence[str], references: Sequence[str]) -> Floats:
        """Return counts (COUNTS,) of texts against references; no n-gram crosses two texts."""
        if not hypotheses:
            return np.zeros(COUNTS)
        score = self._metric.corpus_score(hypotheses, [references])
        return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], np.float64)

    def corpus(self, counts: Floats) -> float:
        """Return the corpus BLEU of summed counts (COUNTS,)."""
        return self._score(counts, effective_order=False)

    def sentence(self, counts: Floats) -> float:
        """Return the sentence BLEU of one text's counts; orders that it lacks are left out."""
        return self._score(counts, effective_order=True)

    @property
    def signature(self) -> str:
        """The settings in sacrebleu's notation, and its version."""
        version = optional_package("sacrebleu", "BLEU", "eval").__version__
        return f"sacrebleu {version}, tok:{self._tokenizer}, smooth:{self._metric.smooth_method}"

    def _score(self, counts: Floats, effective_order: bool) -> float:
        whole = [round(each) for each in counts.tolist()]
        score = self._metric.compute_bleu(
            whole[:4],
            whole[4:8],
            *whole[8:],
            smooth_method=self._metric.smooth_method,
            smooth_value=self._metric.smooth_value,
            effective_order=effective_order,
        )
        return float(score.score) / 100
