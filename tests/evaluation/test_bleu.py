"""BLEU-4 by sacrebleu: the settings used, against sacrebleu's own calls and nltk, and its edges."""

import math
import sys

import numpy as np
import pytest

from tracformer.evaluation.metrics import COUNTS, Bleu

sacrebleu = pytest.importorskip("sacrebleu")

HYPOTHESES = [
    "The cat sat on the mat, and the dog slept by the door.",
    "In 2,006 there were about 3.5 million people (or so) in the city-state.",
    'He said: "I don\'t know -- perhaps $5.00?" and left & went home.',
    "the the the the the the the",
    "A river runs through it .",
]
REFERENCES = [
    "The cat sat on the mat while the dog slept near the door.",
    "In 2,006 there were some 3.5 million people (or more) in the old city-state, it was said.",
    'He said: "I don\'t know; perhaps $5.00?" and then left & went home.',
    "the cat is on the mat and the dog is not there",
    "A river ran through it .",
]
SHORT = [
    ("a cat", "the cat sat"),
    ("a b c d e f", "a b x d e y"),
    ("a", "b"),
    ("", "a b"),
    ("a", ""),
]


def summed(bleu: Bleu) -> np.ndarray:
    return sum(
        (bleu.count([h], [r]) for h, r in zip(HYPOTHESES, REFERENCES, strict=True)),
        np.zeros(COUNTS),
    )


def spaced(text: str) -> str:
    return " ".join(text)


def test_the_corpus_figure_is_what_sacrebleu_prints_by_default() -> None:
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score / 100
    assert Bleu().corpus(summed(Bleu())) == pytest.approx(expected, abs=1e-12)


def test_the_sentence_figure_is_what_sacrebleu_prints_by_default() -> None:
    bleu = Bleu()
    for hypothesis, reference in [*zip(HYPOTHESES, REFERENCES, strict=True), *SHORT]:
        expected = sacrebleu.sentence_bleu(hypothesis, [reference]).score / 100
        assert bleu.sentence(bleu.count([hypothesis], [reference])) == pytest.approx(
            expected, abs=1e-12
        )


def test_words_by_space_agree_with_nltk() -> None:
    nltk = pytest.importorskip("nltk.translate.bleu_score")
    bleu = Bleu("space")
    words = [h.split() for h in HYPOTHESES]
    expected = nltk.corpus_bleu([[r.split()] for r in REFERENCES], words)
    assert bleu.corpus(summed(bleu)) == pytest.approx(expected, abs=1e-12)
    smoothing = nltk.SmoothingFunction().method3
    for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
        expected = nltk.sentence_bleu(
            [reference.split()], hypothesis.split(), smoothing_function=smoothing
        )
        assert bleu.sentence(bleu.count([hypothesis], [reference])) == pytest.approx(
            expected, abs=1e-12
        )


def test_a_known_value() -> None:
    # Letters as words: 5 of 6, pairs 4 of 5, triples 3 of 4, quadruples 2 of 3; one short.
    expected = math.exp(1 - 7 / 6) * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    bleu = Bleu()
    assert bleu.corpus(bleu.count([spaced("abcdex")], [spaced("abcdefg")])) == pytest.approx(
        expected
    )


def test_the_ends_of_the_scale() -> None:
    bleu = Bleu()
    for score in (bleu.corpus, bleu.sentence):
        assert score(bleu.count([spaced("abcde")], [spaced("abcde")])) == pytest.approx(1)
        assert score(bleu.count([""], [spaced("abcde")])) == 0
        assert score(bleu.count([spaced("xy")], [spaced("abcde")])) == 0
        assert score(bleu.count([], [])) == 0


def test_counts_add_up_and_do_not_cross_texts() -> None:
    bleu = Bleu()
    both = bleu.count(["a b", "c d"], ["a b", "c d"])
    assert both.tolist() == [4, 2, 0, 0, 4, 2, 0, 0, 4, 4]
    assert (bleu.count(["a b"], ["a b"]) + bleu.count(["c d"], ["c d"])).tolist() == both.tolist()
    assert bleu.count(["a b c d"], ["a b c d"]).tolist()[:4] == [4, 3, 2, 1]


def test_the_settings_stand_in_the_signature() -> None:
    assert Bleu().signature == f"sacrebleu {sacrebleu.__version__}, tok:13a, smooth:exp"
    assert "tok:none" in Bleu("space").signature


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(
        ImportError, match=r"BLEU needs the package .*pip install 'tracformer\[eval\]'"
    ):
        Bleu()
