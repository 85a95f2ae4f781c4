"""Fused attention and plain products: the same answers and the same gradients."""

import pytest
import torch

from tests.helpers import random_batch
from tests.peers.small import small_peer
from tracformer.baselines import transformer as dense
from tracformer.model.batch import Batch

FAMILIES = ["bart", "bert", "bert-bidir", "gpt2", "gpt2-fim", "mdlm"]


def loss_and_gradients(family: str, used: str) -> tuple[float, list[torch.Tensor]]:
    model = small_peer(family)
    mode = model.config.modes[0]
    tokens, context, lengths = random_batch(model, 3, 12, seed=4)
    torch.manual_seed(0)  # diffusion draws its noise
    loss = model.loss(Batch(tokens, context, lengths), mode)
    loss.backward()
    if family != "mdlm":
        assert model.network.config._attn_implementation == used
    return float(loss.detach()), [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_ways_agree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_gradients = loss_and_gradients(family, "eager")
    monkeypatch.setattr(dense, "SHORT", 0)
    fused, fused_gradients = loss_and_gradients(family, "sdpa")
    assert plain == pytest.approx(fused, abs=1e-10)
    assert len(plain_gradients) == len(fused_gradients) > 0
    for one, other in zip(plain_gradients, fused_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_plain_products_only_where_gradients_are_wanted_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert dense.trains_faster_plain(cpu, dense.SHORT)
    assert not dense.trains_faster_plain(cpu, dense.SHORT + 1)
    assert not dense.trains_faster_plain(torch.device("cuda"), 8)
    with torch.no_grad():
        assert not dense.trains_faster_plain(cpu, 8)
