from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.evaluation.laws import small_law, tokenizer, write_text
from tests.evaluation.ranks import on_ranks
from tests.helpers import small_model
from tracformer.baselines.mdlm import MDLM, MDLMConfig
from tracformer.evaluation.calibration import (
    Calibration,
    by_chance,
    expected_error,
    figures,
    reliability,
)
from tracformer.evaluation.exact import TruthModel
from tracformer.evaluation.result_files import Result
from tracformer.evaluation.task import Silent, Subject
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"), 1000)


def run(
    model: ConditionalModel,
    data: Path,
    mode: str = "ac",
    batch: int = 32,
    ranks: Any = None,
    **options: Any,
) -> Result:
    subject = Subject(
        model,
        tokenizer(),
        "model",
        mode,
        batch=batch,
        **({} if ranks is None else {"ranks": ranks}),
    )
    task = Calibration(
        **{"data": str(data), "rows": "documents", "length": 5, "mean": 2.0, **options}
    )
    return task.run(subject, Silent())


class Boastful(TruthModel):
    """The truth, said twice as sure."""

    def log_probs(self, tokens: Any, context: Any, mode: str) -> Any:
        return 2.0 * super().log_probs(tokens, context, mode)


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_the_truth_is_calibrated_and_a_boast_is_not(data: Path, mode: str) -> None:
    options: dict[str, Any] = {"sequences": 1000, "ratios": (0.6,), "bins": 10}
    truth, boast = (
        run(kind(small_law()), data, mode, batch=500, **options) for kind in (TruthModel, Boastful)
    )
    assert truth.find("ece").value < 0.04
    low = boast.find("ece").low
    assert low is not None
    assert low > 0.08
    assert boast.find("accuracy").value == truth.find("accuracy").value  # the same guesses
    assert boast.find("confidence").value > boast.find("accuracy").value + 0.08


def test_bins_by_hand(data: Path) -> None:
    model = small_model(vocab_size=6)
    result = run(model, data, "car", sequences=20, ratios=(0.4,), bins=5)
    (name,) = result.details
    task = Calibration(
        data=str(data), rows="documents", length=5, mean=2.0, sequences=20, ratios=(0.4,)
    )
    read = task.read(Subject(model, tokenizer(), "model", "car"))
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


def test_neither_batch_nor_ranks_change_a_number(data: Path) -> None:
    model = small_model(vocab_size=6)
    once = [row.value for row in run(model, data, sequences=70, bins=4).rows]
    assert [
        row.value for row in run(model, data, batch=13, sequences=70, bins=4).rows
    ] == pytest.approx(once, rel=1e-10)
    for each in on_ranks(2, lambda ranks: run(model, data, ranks=ranks, sequences=70, bins=4)):
        assert [row.value for row in each.rows] == pytest.approx(once, rel=1e-10)


def test_the_interval_covers_what_is_true() -> None:
    """One bin, 0.8 said, 0.7 right: the error is 0.1; about 95 of 100 intervals must hold it."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        targets = rng.integers(5, 15, size=(1, 200)).astype(float)
        right = rng.binomial(targets.astype(int), 0.7)
        low, high = expected_error(np.stack([targets, right, 0.8 * targets, 0.16 * targets]))[1:]
        assert low is not None
        assert high is not None
        held += low <= 0.1 <= high
    assert held >= 88


def test_empty_bins_are_left_out_and_one_sequence_has_no_interval() -> None:
    sums = np.zeros((4, 4, 1))
    sums[:, 3, 0] = 10, 9, 9.5, 0.5
    (entry,) = reliability(sums)
    assert (entry["low"], entry["accuracy"], entry["confidence"]) == (0.75, 0.9, 0.95)
    assert expected_error(sums) == (pytest.approx(0.05), None, None)


def test_what_chance_does_to_a_calibrated_model_is_known_and_told() -> None:
    """Two targets in each of 20 bins for each of 40 sequences, right as often as said; then the
    same guesses, said surer by 0.3.
    """
    rng = np.random.default_rng(0)
    said = np.broadcast_to((np.arange(20)[:, None] + 0.5) / 20, (20, 40))
    shown = []
    for _ in range(200):
        right = rng.binomial(2, said).astype(float)
        shown.append(
            expected_error(np.stack([2 + 0 * said, right, 2 * said, 2 * said * (1 - said)]))[0]
        )
    sums = np.stack([2 + 0 * said, right, 2 * said, 2 * said * (1 - said)])
    assert by_chance(sums) == pytest.approx(np.mean(shown), rel=0.05)
    subject = Subject(TruthModel(small_law()), None, "truth", "ac")
    assert "is chance" in figures({}, sums, subject)[0].note
    sums[2] += 0.6
    assert figures({}, sums, subject)[0].note == ""


def test_a_bound_cannot_be_asked(data: Path) -> None:
    model = MDLM(
        MDLMConfig(vocab_size=6, max_length=16, n_layer=1, n_head=2, d_model=8, d_condition=4)
    )
    with pytest.raises(ValueError, match="asks in mode car or ac or ar"):
        run(model, data, "diffusion")
