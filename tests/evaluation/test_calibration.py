"""Tasks calibration and orders: intervals cover the true error, the truth is consistent."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.toys import random_mdlm, small_model, small_source, small_tokenizer
from tracformer.evaluation.consistency import (
    Calibration,
    Orders,
    along_all_orders,
    by_chance,
    expected_error,
    figures,
    order_log_prob,
    orders,
    reliability,
)
from tracformer.evaluation.exact import TruthModel
from tracformer.evaluation.result_files import Result
from tracformer.evaluation.task import Progress, Subject, parse_task
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch

# ---- the task orders


def run(
    model: ConditionalModel,
    data: Path,
    mode: str = "ac",
    batch: int = 32,
    **options: Any,
) -> Result:
    subject = Subject(model, small_tokenizer(), "model", mode, batch)
    task = Calibration(
        **{"data": str(data), "rows": "documents", "length": 5, "mean": 2.0, **options}
    )
    return task.run(subject, Progress())


class Overconfident(TruthModel):
    """The truth with doubled logits."""

    def log_probs(self, tokens: Any, context: Any, mode: str) -> Any:
        return 2.0 * super().log_probs(tokens, context, mode)


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_the_truth_is_calibrated_and_an_overconfident_model_is_not(data: Path, mode: str) -> None:
    options: dict[str, Any] = {"sequences": 1000, "ratios": (0.6,), "bins": 10}
    truth, overconfident = (
        run(kind(small_source()), data, mode, batch=500, **options)
        for kind in (TruthModel, Overconfident)
    )
    assert truth.find("ece").value < 0.04
    low = overconfident.find("ece").low
    assert low is not None
    assert low > 0.08
    assert overconfident.find("accuracy").value == truth.find("accuracy").value  # the same guesses
    assert overconfident.find("confidence").value > overconfident.find("accuracy").value + 0.08


def test_bins_by_hand(data: Path) -> None:
    model = small_model(vocab_size=6)
    result = run(model, data, "car", sequences=20, ratios=(0.4,), bins=5)
    (name,) = result.details
    task = Calibration(
        data=str(data), rows="documents", length=5, mean=2.0, sequences=20, ratios=(0.4,)
    )
    read = task.read(Subject(model, small_tokenizer(), "model", "car"))
    tokens, context = torch.from_numpy(read.tokens), torch.from_numpy(task.contexts(read)[0])
    with torch.no_grad():
        top = model(Batch(tokens, context), "car")[~context].softmax(1).max(1)
    right = (top.indices == tokens[~context]).double()
    error = 0.0
    for entry in result.details[name]["bins"]:
        here = (top.values >= entry["low"]) & (top.values < entry["high"])
        assert int(here.sum()) == entry["targets"]
        assert entry["accuracy"] == pytest.approx(float(right[here].mean()))
        assert entry["confidence"] == pytest.approx(float(top.values[here].mean()))
        error += abs(float((right - top.values)[here].sum())) / len(right)
    assert result.find("ece").value == pytest.approx(error)
    assert (
        result.find("ece").targets
        == len(right)
        == sum(entry["targets"] for entry in result.details[name]["bins"])
    )


def test_the_interval_covers_the_true_error() -> None:
    """One bin of confidence 0.8 and accuracy 0.7: about 95 of 100 intervals must cover 0.1."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        targets = rng.integers(5, 15, size=(1, 200)).astype(float)
        right = rng.binomial(targets.astype(int), 0.7)
        low, high = expected_error(np.stack([targets, right, 0.8 * targets, 0.16 * targets]))[1:]
        assert low is not None
        assert high is not None
        covered += low <= 0.1 <= high
    assert covered >= 88


def test_empty_bins_are_left_out_and_one_sequence_has_no_interval() -> None:
    sums = np.zeros((4, 4, 1))
    sums[:, 3, 0] = 10, 9, 9.5, 0.5
    (entry,) = reliability(sums)
    assert (entry["low"], entry["accuracy"], entry["confidence"]) == (0.75, 0.9, 0.95)
    assert expected_error(sums) == (pytest.approx(0.05), None, None)


def test_the_note_states_how_much_is_chance() -> None:
    """Two targets in each of 20 bins for each of 40 sequences: calibrated, then 0.3 too sure."""
    rng = np.random.default_rng(0)
    confidence = np.broadcast_to((np.arange(20)[:, None] + 0.5) / 20, (20, 40))
    errors = []
    for _ in range(200):
        right = rng.binomial(2, confidence).astype(float)
        errors.append(
            expected_error(
                np.stack(
                    [2 + 0 * confidence, right, 2 * confidence, 2 * confidence * (1 - confidence)]
                )
            )[0]
        )
    sums = np.stack([2 + 0 * confidence, right, 2 * confidence, 2 * confidence * (1 - confidence)])
    assert by_chance(sums) == pytest.approx(np.mean(errors), rel=0.05)
    subject = Subject(TruthModel(small_source()), None, "truth", "ac")
    assert "is chance" in figures({}, sums, subject)[0].note
    sums[2] += 0.6
    assert figures({}, sums, subject)[0].note == ""


def test_a_bound_has_no_calibration(data: Path) -> None:
    with pytest.raises(ValueError, match="works in mode car or ac or ar"):
        run(random_mdlm(), data, "diffusion")


def run_orders(model: ConditionalModel, data: Path, **options: Any) -> Result:
    subject = Subject(model, small_tokenizer(), "model", "ac")
    task = Orders(data=str(data), rows="documents", **{"text": "ABBA", **options})
    return task.run(subject, Progress())


@pytest.mark.parametrize("build", [lambda: small_model(vocab_size=6), random_mdlm])
def test_every_order_by_the_chain_rule_itself(build: Any) -> None:
    model = build()
    tokens = torch.randint(6, (3, 4), generator=torch.Generator().manual_seed(0))
    found = along_all_orders(Subject(model, None, "model", "ac", batch=7), tokens.numpy())
    for number, order in enumerate(orders(4)):
        expected = order_log_prob(
            model, Batch(tokens, torch.zeros_like(tokens).bool()), torch.from_numpy(order)
        ).sum(1)
        np.testing.assert_allclose(found[:, number], expected.numpy(), rtol=1e-10)


def test_conditionals_of_one_joint_have_no_spread(data: Path) -> None:
    result = run_orders(TruthModel(small_source()), data, sequences=20, text="")
    assert result.find("spread").value < 1e-12
    assert result.find("log_prob", order="forward").value == pytest.approx(
        result.find("log_prob", order="reverse").value, rel=1e-12
    )


def test_rows_histogram_and_text(data: Path) -> None:
    model = small_model(vocab_size=6)
    result = run_orders(model, data, sequences=30, bins=7)
    found, histogram = result.details["sequences"], result.details["histogram"]
    assert result.details["orders"] == 120
    assert result.find("spread").value == pytest.approx(np.mean(found["highest"] - found["lowest"]))
    assert result.find("spread").value > result.find("order_std").value > 0.0
    assert (len(histogram["edges"]), sum(histogram["counts"])) == (8, 30)
    assert all(
        (found["lowest"] <= found[way]).all() and (found[way] <= found["highest"]).all()
        for way in ("forward", "reverse")
    )
    text = torch.tensor([small_tokenizer().encode("ABBA")])
    backwards = order_log_prob(
        model, Batch(text, torch.zeros_like(text).bool()), torch.arange(4).flip(0)
    )[0]
    assert result.details["text"]["reverse"] == pytest.approx(backwards.tolist())
    assert result.find("log_prob", text="ABBA", order="reverse").value == pytest.approx(
        float(backwards.sum())
    )


def test_a_text_outside_the_alphabet_is_left_out_with_a_note(data: Path) -> None:
    result = run_orders(small_model(vocab_size=6), data, sequences=2, text="The cat is cute")
    assert "outside the tokenizer's alphabet" in result.details["text"]["note"]
    assert not [row for row in result.rows if "text" in row.setting]


def test_wrong_options_raise(data: Path) -> None:
    with pytest.raises(ValueError, match=r"length is 9; it must be in \[2, 7\]"):
        parse_task("orders:length=9")
    with pytest.raises(ValueError, match="works in mode ac"):
        Orders(data=str(data)).check(Subject(small_model(), small_tokenizer(), "model", "car"))


def test_the_seed_is_no_part_of_the_question(data: Path) -> None:
    subject = Subject(small_model(vocab_size=6), small_tokenizer(), "model", "ac")
    assert Orders(data=str(data), seed=3, count_eos=True).canonical(subject) == Orders(
        data=str(data)
    )
