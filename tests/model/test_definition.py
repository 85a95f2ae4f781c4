"""The model is what the design says, whatever computes it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.literal import Literal
from tests.toys import random_batch, small_model
from tracformer.attention import implementations
from tracformer.model import MODES
from tracformer.model.batch import Batch

VARIANTS: list[dict[str, Any]] = [
    {},
    {"n_max": 2},
    {"n_max": 4},  # step 2 divides reach 8, leaves a far key at reach 16 of a fifth layer
    {"n_max": 6, "max_length": 32, "n_layer": 5},
    {"encoder": "full"},
    {"decoder": "dense"},
    {"key_set": "rounded", "n_max": 4},
    {"n_layer": 6},  # more layers than the length needs
    {"columns": True},
    {"columns": True, "n_max": 4, "max_length": 21, "n_layer": 5, "decoder": "dense"},
]


@pytest.mark.parametrize("attention", implementations())
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_equals_the_literal_model(variant: dict[str, Any], mode: str, attention: str) -> None:
    model = small_model(attention, **variant)
    literal = Literal(model)
    longest = model.config.max_length
    for length in (longest,) if model.config.columns else (1, 2, 5, longest):
        tokens, context, lengths = random_batch(model, 2, length, seed=length)
        lengths = torch.full_like(lengths, length) if model.config.columns else lengths
        logits = model(Batch(tokens, context, lengths), mode)
        for b, n in enumerate(lengths.tolist()):
            expected = literal.logits(tokens[b, :n].tolist(), context[b, :n].tolist(), mode)
            torch.testing.assert_close(logits[b, :n], expected, atol=1e-10, rtol=0)
            assert not logits[b, n:].any()


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 70),
    batch=st.integers(1, 3),
    n_max=st.integers(2, 20),
    extra_layers=st.integers(0, 2),
    mode=st.sampled_from(MODES),
    encoder=st.sampled_from(["multiscope", "multiscope", "multiscope", "full"]),
    decoder=st.sampled_from(["strided", "strided", "strided", "dense"]),
    key_set=st.sampled_from(["stepped", "stepped", "stepped", "rounded"]),
    seed=st.integers(0, 99),
)
def test_blocked_equals_reference_with_all_gradients(
    length: int,
    batch: int,
    n_max: int,
    extra_layers: int,
    mode: str,
    encoder: str,
    decoder: str,
    key_set: str,
    seed: int,
) -> None:
    config = {
        "max_length": length,
        "n_layer": max(1, (length - 1).bit_length() + extra_layers),
        "n_max": n_max,
        "encoder": encoder,
        "decoder": decoder,
        "key_set": key_set,
    }
    results = []
    for attention in ("reference", "blocked"):
        model = small_model(attention, seed, **config)
        tokens, context, lengths = random_batch(model, batch, length, seed)
        logits = model(Batch(tokens, context, lengths), mode)
        weight = torch.randn(
            logits.shape, generator=torch.Generator().manual_seed(seed), dtype=logits.dtype
        )
        gradients = torch.autograd.grad(
            (logits * weight).sum(), list(model.parameters()), allow_unused=True
        )
        results.append((logits, [torch.zeros(()) if g is None else g for g in gradients]))
    (expected, expected_gradients), (actual, actual_gradients) = results
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=1e-10)
    for a, b in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10 * max(1.0, float(b.abs().max())), rtol=0)


@pytest.mark.parametrize("attention", implementations())
@pytest.mark.parametrize("mode", MODES)
def test_padded_batch_equals_its_sequences_alone(mode: str, attention: str) -> None:
    model = small_model(attention, max_length=60, n_layer=6, n_max=5)
    tokens, context, _ = random_batch(model, 4, 60)
    lengths = torch.tensor([60, 1, 33, 17])
    together = model.log_prob(Batch(tokens, context, lengths), mode)
    for b, n in enumerate(lengths.tolist()):
        alone = model.log_prob(Batch(tokens[b : b + 1, :n], context[b : b + 1, :n]), mode)
        torch.testing.assert_close(together[b, :n], alone[0], atol=1e-12, rtol=0)
        assert not together[b, n:].any()


def test_the_padding_is_never_read() -> None:
    model = small_model()
    tokens, context, _ = random_batch(model, 2, 12)
    lengths = torch.tensor([12, 5])
    before = model.log_prob(Batch(tokens, context, lengths), "car")
    tokens[1, 5:] = -999
    context[1, 5:] = ~context[1, 5:]
    assert torch.equal(model.log_prob(Batch(tokens, context, lengths), "car"), before)
