"""The fast arithmetic of adapters equals that of `transformers` and `peft`."""

import functools

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.baselines.test_causal_lm import ARCHITECTURES, adapted, some_batch, write_network
from tracformer.baselines import causal_lm, causal_training
from tracformer.baselines.causal_training import choose_attention


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_transformers_and_peft(name, tmp_path, monkeypatch):
    folder, batch = write_network(tmp_path, name, attn_pdrop=0.0), some_batch()

    def gradients(kind: str) -> dict[str, torch.Tensor]:
        model = adapted(folder).double()
        loss, _ = model.nll(batch, "car")
        loss.backward()
        assert model.network.config._attn_implementation == kind
        return {n: p.grad for n, p in model.trained_parameters().items()} | {"loss": loss}

    # norms of transformers are float32 in any network; the next test is of ours
    monkeypatch.setattr(causal_training, "normalised", lambda layer, slow, x: slow(x))
    found = gradients(causal_training.PLAIN)
    monkeypatch.setattr(causal_lm, "train_fast", lambda *_: None)
    monkeypatch.setattr(causal_training, "trains_faster_plain", lambda *_: False)
    expected = gradients("sdpa")
    assert len(expected) > 8
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-9, rtol=1e-9, msg=key)


def test_the_norm_is_that_of_transformers_and_its_gradient_is_right():
    torch.manual_seed(3)
    norm = LlamaRMSNorm(6).double().requires_grad_(False)
    norm.weight.normal_()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    fast = functools.partial(causal_training.normalised, norm, norm.forward)
    torch.testing.assert_close(fast(x), norm(x), atol=1e-6, rtol=1e-6)
    assert type(fast(x).grad_fn).__name__ == "_NormalisedBackward"
    torch.autograd.gradcheck(fast, x)


def test_long_rows_and_dropout_keep_the_fused_attention(tmp_path):
    network = adapted(write_network(tmp_path, "llama")).network
    for length, dropout, kind in ((100, 0.0, "tracformer-plain"), (100, 0.1, "sdpa")):
        network.config.attention_dropout = dropout
        choose_attention(network, torch.device("cpu"), length)
        assert network.config._attn_implementation == kind
    network.config.attention_dropout = 0.0
    choose_attention(network, torch.device("cpu"), 10_000)
    assert network.config._attn_implementation == "sdpa"


def test_frozen_weights_are_rounded_and_trained_ones_are_not(tmp_path):
    model, batch = adapted(write_network(tmp_path, "llama")), some_batch()
    before = model.nll(batch, "car")[0].item()
    model.round_frozen(torch.bfloat16)
    trained = model.trained_parameters()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model.nll(batch, "car")
        loss.backward()
    assert loss.item() == pytest.approx(before, rel=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in trained.values())


def test_rows_have_padding_at_their_ends_alone(tmp_path, monkeypatch):
    """Few given tokens and few targets in one batch: as wide as the longest row."""
    model, batch = adapted(write_network(tmp_path, "llama")), some_batch((12, 12))
    context = torch.zeros_like(batch.context)
    context[0, 1:] = True  # 11 given, 1 body row; the other has 12 body rows
    widths: list[int] = []
    plain = model.read
    monkeypatch.setattr(
        model, "read", lambda ids, *rest: widths.append(ids.shape[1]) or plain(ids, *rest)
    )
    model.log_prob(batch.with_context(context), "car")
    assert widths == [12]
