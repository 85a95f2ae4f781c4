"""The task `orders`: log-likelihoods along all orders are those of the chain rule."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.toys import random_mdlm, small_model, small_source, small_tokenizer
from tracformer.evaluation.consistency import Orders, along_all_orders, order_log_prob, orders
from tracformer.evaluation.exact import TruthModel
from tracformer.evaluation.result_files import Result
from tracformer.evaluation.task import Progress, Subject, parse_task
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch


def run(model: ConditionalModel, data: Path, **options: Any) -> Result:
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
    result = run(TruthModel(small_source()), data, sequences=20, text="")
    assert result.find("spread").value < 1e-12
    assert result.find("log_prob", order="forward").value == pytest.approx(
        result.find("log_prob", order="reverse").value, rel=1e-12
    )


def test_rows_histogram_and_text(data: Path) -> None:
    model = small_model(vocab_size=6)
    result = run(model, data, sequences=30, bins=7)
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
    result = run(small_model(vocab_size=6), data, sequences=2, text="The cat is cute")
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
