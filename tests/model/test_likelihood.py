"""Log-probabilities and the loss: exact, chunked, and the same under recomputation."""

from itertools import product

import pytest
import torch
from torch.nn.functional import log_softmax

from tests.attention.test_exactness import Largest
from tests.helpers import needs_compiler
from tests.toys import random_batch, small_model
from tracformer.model import MODES, Tracformer, likelihood
from tracformer.model.batch import Batch


@pytest.mark.parametrize("given", [(), (0,), (3,), (1, 4), (0, 2, 4)])
@pytest.mark.parametrize("mode", ["car", "ar"])
def test_completions_sum_to_one(mode: str, given: tuple[int, ...]) -> None:
    """Exact joints: over every completion of a small alphabet, whatever is given.

    AR ignores a suffix, so it is given a prefix.
    """
    T, alphabet = 5, 3
    if mode == "ar":
        given = tuple(range(len(given)))
    model = small_model(vocab_size=alphabet, n_max=2)
    targets = [t for t in range(T) if t not in given]
    fills = torch.tensor(list(product(range(alphabet), repeat=len(targets))))
    tokens = torch.ones(len(fills), T, dtype=torch.int64)
    tokens[:, targets] = fills
    context = torch.zeros_like(tokens, dtype=torch.bool)
    context[:, list(given)] = True
    total = model.log_prob(Batch(tokens, context), mode).sum(1).exp().sum()
    assert abs(total.item() - 1.0) < 1e-9


@needs_compiler
@pytest.mark.parametrize("mode", MODES)
def test_lengths_may_be_a_view(mode: str) -> None:
    model = small_model("native")
    tokens, context, _ = random_batch(model, 3, 11)
    length = torch.tensor([9])
    actual = model.log_prob(Batch(tokens, context, length.expand(3)), mode)
    torch.testing.assert_close(
        actual, model.log_prob(Batch(tokens, context, length.repeat(3)), mode), atol=0, rtol=0
    )


@pytest.mark.parametrize("mode", MODES)
def test_log_prob_and_loss_agree_with_the_logits(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(likelihood, "LOGITS_AT_ONCE", 7 * 5)  # five rows at a time
    model = small_model()
    tokens, context, lengths = random_batch(model, 3, 11)
    expected = log_softmax(model(Batch(tokens, context, lengths), mode), -1).gather(
        2, tokens[..., None]
    )[..., 0]
    target = ~context & (torch.arange(11) < lengths[:, None])
    expected = torch.where(target, expected, 0.0)
    actual = model.log_prob(Batch(tokens, context, lengths), mode)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    loss = model.loss(Batch(tokens, context, lengths), mode)
    torch.testing.assert_close(loss, -expected.sum() / target.sum(), atol=1e-12, rtol=0)
    parameters = list(model.parameters())
    weights = torch.rand(3, 11, dtype=torch.float64)
    weighted, count = model.nll(Batch(tokens, context, lengths), mode, weights=weights)
    assert count == int(target.sum())
    by_hand = torch.autograd.grad(
        -(expected * weights).sum(), parameters, retain_graph=True, allow_unused=True
    )
    by_chunks = torch.autograd.grad(weighted, parameters, allow_unused=True)
    by_log_prob = torch.autograd.grad(-(actual * weights).sum(), parameters, allow_unused=True)
    for a, b, c in zip(by_hand, by_chunks, by_log_prob, strict=True):
        assert (a is None) == (b is None) == (c is None)
        if a is not None and b is not None and c is not None:
            torch.testing.assert_close(b, a, atol=1e-11, rtol=0)
            torch.testing.assert_close(c, a, atol=1e-11, rtol=0)


def test_training_holds_logits_of_a_few_targets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = 5000
    monkeypatch.setattr(likelihood, "LOGITS_AT_ONCE", 4 * vocab_size)
    model = small_model(vocab_size=vocab_size, max_length=64, n_layer=6)
    tokens, context, _ = random_batch(model, 2, 64)
    with Largest() as largest:
        model.loss(Batch(tokens, context)).backward()
    # the embedding's gradient; 4 rows of logits are smaller
    assert largest.numel <= (vocab_size + 1) * model.config.d_model


def test_without_gradients_checkpoint_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first use of torch's `checkpoint` imports its compiler, which takes seconds."""
    model = small_model()
    tokens, context, _ = random_batch(model, 2, 8)
    expected = model.log_prob(Batch(tokens, context))
    monkeypatch.setattr(likelihood, "checkpoint", None)
    with torch.no_grad():
        assert torch.equal(model.log_prob(Batch(tokens, context)), expected)


def test_everything_given() -> None:
    model = small_model()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    context = torch.ones(1, 4, dtype=torch.bool)
    assert not model.log_prob(Batch(tokens, context)).any()
    with pytest.raises(ValueError, match="at least one target"):
        model.loss(Batch(tokens, context))
    total, count = model.nll(Batch(tokens, context))
    assert (float(total), count) == (0.0, 0)


def test_dropout_acts_in_training_only() -> None:
    model = small_model(dropout=0.5)
    tokens, context, _ = random_batch(model, 2, 8)
    assert torch.equal(model.loss(Batch(tokens, context)), model.loss(Batch(tokens, context)))
    model.train()
    assert not torch.equal(model.loss(Batch(tokens, context)), model.loss(Batch(tokens, context)))


# ---- switches of training change memory or precision, not the answer


def gradients(model: Tracformer, mode: str) -> list[torch.Tensor]:
    tokens, context, lengths = random_batch(model, 3, 16)
    return list(
        torch.autograd.grad(
            model.loss(Batch(tokens, context, lengths), mode), list(model.parameters())
        )
    )


@pytest.mark.parametrize("n_max", [3, 6])  # 6: a key off the grid in the last layer
@pytest.mark.parametrize("mode", MODES)
def test_recomputed_activations_give_the_same_gradients(mode: str, n_max: int) -> None:
    model = small_model(n_max=n_max).train()
    expected = gradients(model, mode)
    model.checkpoint_activations = True
    for a, b in zip(gradients(model, mode), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_stays_close(mode: str) -> None:
    model = small_model(d_model=32).float()
    tokens, context, lengths = random_batch(model, 3, 16)
    exact = model.loss(Batch(tokens, context, lengths), mode)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.loss(Batch(tokens, context, lengths), mode)
    rough.backward()
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
