"""Log-probabilities along an order: the chain rule, step by step."""

import itertools
from typing import Any

import pytest
import torch

from tests.helpers import small_model
from tests.peers.small import small_peer
from tests.peers.test_dit import SYSTEMS, TRACFORMER, question, small_diffusion
from tracformer.evaluation.order_consistency import order_log_prob
from tracformer.model import ConditionalModel
from tracformer.model.batch import Batch

MODELS = ["tracformer", "bert", *SYSTEMS, "mdlm-tracformer"]


def build(name: str, **changes: Any) -> ConditionalModel:
    if name == "tracformer":
        return small_model(**changes)
    if name == "bert":
        pytest.importorskip("transformers")
        return small_peer("bert", **changes)
    if name == "mdlm-tracformer":
        return small_diffusion("mdlm", **TRACFORMER, **changes)
    return small_diffusion(name, **changes)


@pytest.mark.parametrize("name", MODELS)
def test_equals_a_literal_loop(name: str) -> None:
    model = build(name)
    tokens, context, lengths = question(3, 7)
    order = torch.stack(
        [torch.randperm(7, generator=torch.Generator().manual_seed(b)) for b in range(3)]
    )
    values = order_log_prob(model, Batch(tokens, context, lengths), order, rows_at_once=4)
    for b, n in enumerate(lengths.tolist()):
        known = context[b, :n].clone()
        for t in order[b].tolist():
            if t >= n or known[t]:
                continue
            wanted = torch.zeros(1, n, dtype=torch.bool)
            wanted[0, t] = True
            logits = model.logits_at(Batch(tokens[b : b + 1, :n], known[None]), "ac", wanted)[0]
            assert (
                abs(float((logits.log_softmax(-1)[tokens[b, t]] - values[b, t]).detach())) < 1e-10
            )
            known[t] = True
        assert not values[b, :n][context[b, :n]].any()
        assert not values[b, n:].any()


@pytest.mark.parametrize("name", MODELS)
def test_probabilities_sum_to_one_along_an_order(name: str) -> None:
    model = build(name, vocab_size=3)
    tokens = torch.tensor(list(itertools.product(range(3), repeat=3)))
    total = (
        order_log_prob(
            model,
            Batch(tokens, torch.zeros_like(tokens).bool()),
            torch.tensor([1, 2, 0]),
        )
        .sum(1)
        .exp()
        .sum()
    )
    assert abs(float(total) - 1) < 1e-10
    context = torch.tensor([False, True, False]).expand(9, -1)
    total = (
        order_log_prob(model, Batch(tokens[tokens[:, 1] == 2], context), torch.tensor([2, 1, 0]))
        .sum(1)
        .exp()
        .sum()
    )
    assert abs(float(total) - 1) < 1e-10


def test_what_is_no_order_is_refused() -> None:
    model, tokens = build("mdlm"), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"each of the positions 0\.\.2 once"):
        order_log_prob(
            model,
            Batch(tokens, torch.zeros_like(tokens).bool()),
            torch.tensor([0, 1, 1]),
        )
    with pytest.raises(ValueError, match="order has shape"):
        order_log_prob(model, Batch(tokens, torch.zeros_like(tokens).bool()), torch.tensor([0, 1]))
