"""BLEU-4 against sacrebleu and nltk on fixed texts, and its edges."""

import math

import pytest

from tracformer.evaluation.bleu import SMOOTHINGS, WORDS, Counts, bleu, corpus_bleu, count, sentence_bleu, words_13a

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
ODD = ["&quot;x&quot; &amp; y&lt;z", "1990-1995, 10,000.5; a.b c,d", "line one-\nline two\nthree", "[a]{b}|c~`d`^e_f\\g", "", " é, ü. "]


def counts(words: str) -> list[Counts]:
    return [count(WORDS[words](h), WORDS[words](r)) for h, r in zip(HYPOTHESES, REFERENCES, strict=True)]


def test_words_are_cut_as_sacrebleu_cuts_them() -> None:
    tokenizer = pytest.importorskip("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    for text in [*HYPOTHESES, *REFERENCES, *ODD]:
        assert words_13a(text) == tokenizer(text).split()


def test_corpus_bleu_agrees_with_sacrebleu_and_nltk() -> None:
    sacrebleu, nltk = pytest.importorskip("sacrebleu"), pytest.importorskip("nltk.translate.bleu_score")
    assert corpus_bleu(counts("13a")) == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score / 100, abs=1e-12)
    plain = nltk.corpus_bleu([[r.split()] for r in REFERENCES], [h.split() for h in HYPOTHESES])
    assert corpus_bleu(counts("space")) == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize("smoothing", ["floor", "exp"])
def test_sentence_bleu_agrees_with_sacrebleu(smoothing: str) -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    short = [("a cat", "the cat sat"), ("a b c d e f", "a b x d e y"), ("one two three", "one two four five six"), ("a", "b")]
    for hypothesis, reference in [*zip(HYPOTHESES, REFERENCES, strict=True), *short]:
        expected = sacrebleu.sentence_bleu(hypothesis, [reference], smooth_method=smoothing).score / 100
        assert sentence_bleu(words_13a(hypothesis), words_13a(reference), smoothing) == pytest.approx(expected, abs=1e-12)


def test_sentence_bleu_agrees_with_nltk() -> None:
    nltk = pytest.importorskip("nltk.translate.bleu_score")
    ways = nltk.SmoothingFunction()
    for hypothesis, reference in zip(HYPOTHESES, REFERENCES, strict=True):
        h, r = hypothesis.split(), reference.split()
        assert sentence_bleu(h, r, "floor") == pytest.approx(nltk.sentence_bleu([r], h, smoothing_function=ways.method1), abs=1e-12)
        assert sentence_bleu(h, r, "exp") == pytest.approx(nltk.sentence_bleu([r], h, smoothing_function=ways.method3), abs=1e-12)


def test_a_known_value() -> None:
    # Letters as words: 5 of 6, pairs 4 of 5, triples 3 of 4, quadruples 2 of 3; one short.
    expected = math.exp(1 - 7 / 6) * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    assert sentence_bleu("abcdex", "abcdefg", "none") == pytest.approx(expected)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_the_ends_of_the_scale(smoothing: str) -> None:
    assert sentence_bleu("abcde", "abcde", smoothing) == pytest.approx(1)
    assert sentence_bleu("", "abcde", smoothing) == 0
    assert sentence_bleu("xy", "abcde", smoothing) == 0


def test_counts_add_up_and_do_not_cross_texts() -> None:
    both = count("ab", "ab") + count("cd", "cd")
    assert both == Counts((4, 2, 0, 0), (4, 2, 0, 0), 4, 4)
    assert count("abcd", "abcd").matches == (4, 3, 2, 1)


def test_an_unknown_smoothing_is_named() -> None:
    with pytest.raises(ValueError, match="smoothing is 'add-one'; allowed: none, floor, exp"):
        bleu(Counts(), "add-one")
