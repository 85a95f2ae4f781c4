"""What answers depend on, their log-probabilities, and the loss."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from tests.attention.test_exactness import Largest
from tests.helpers import needs_compiler
from tests.toys import random_batch, small_model
from tracformer import Tracformer
from tracformer.attention import Layout, implementations
from tracformer.geometry import scope_size
from tracformer.model import MODES, likelihood
from tracformer.model.batch import Batch
from tracformer.model.blocks import rotary_angles

# ---- inputs that a mode may see

LENGTH = 13


def visible(mode: str, context: Tensor, i: int, t: int) -> bool:
    """Return whether the answer at t may depend on x_i.

    `car` sees the given tokens and all before t; `ac` the given tokens; `ar` all before t.
    """
    if i == t:
        return False
    return {"car": i < t or bool(context[i]), "ac": bool(context[i]), "ar": i < t}[mode]


@pytest.mark.parametrize("attention", implementations())
@pytest.mark.parametrize("variant", [{}, {"encoder": "full"}, {"decoder": "dense"}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_an_answer_depends_on_exactly_the_inputs_its_mode_may_see(
    mode: str, variant: dict[str, str], attention: str
) -> None:
    model = small_model(attention, n_max=4, **variant)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(7, (1, LENGTH), generator=generator)
    context = torch.rand(1, LENGTH, generator=generator) < 0.5
    assert context.any()
    assert not context.all()
    with torch.no_grad():
        before = model(Batch(tokens, context), mode)[0]
        for i in range(LENGTH):
            changed = tokens.clone()
            changed[0, i] = (changed[0, i] + 1) % 7
            difference = (model(Batch(changed, context), mode)[0] - before).abs().amax(-1)
            for t in range(LENGTH):
                if visible(mode, context[0], i, t):
                    assert difference[t] > 1e-9
                else:
                    assert difference[t] == 0.0


def test_car_without_given_tokens_is_not_ar() -> None:
    """In `car` the suffix of masks is read, which reveals the length; `ar` does not read it."""
    model = small_model()
    tokens = torch.arange(6)[None]
    nothing = torch.zeros(1, 6, dtype=torch.bool)
    assert (model(Batch(tokens, nothing), "car") - model(Batch(tokens, nothing), "ar"))[
        0, 0
    ].abs().max() > 1e-6
    shorter = model(Batch(tokens[:, :4], nothing[:, :4]), "ar")
    torch.testing.assert_close(
        model(Batch(tokens, nothing), "ar")[:, :4], shorter, atol=1e-12, rtol=0
    )


# ---- scopes of encoder layers


@pytest.mark.parametrize("attention", implementations())
# 4, 6 and 7 have steps that do not divide some reach
@pytest.mark.parametrize("n_max", [2, 3, 4, 6, 7, 16])
def test_layer_l_depends_on_exactly_2_to_the_l_inputs(n_max: int, attention: str) -> None:
    T = 40
    model = small_model(attention, max_length=64, n_layer=6, n_max=n_max)
    layout = Layout(torch.tensor([T]), T, readings=2, rows=torch.arange(T))
    angles = rotary_angles(
        layout.positions, model.config.head_size, model.config.rotary_base, torch.float64
    )
    inputs = model.embedding(torch.arange(T).remainder(7).expand(2, T)).detach().requires_grad_()
    x = inputs
    for layer_number, layer in enumerate(model.encoder, start=1):
        x = layer(x, angles, layout, model.attention)
        for t in (0, 1, 7, 20, T - 1):
            # each row looks back in its reading order; for the mirrored row that is the text's future
            for reading in (0, 1):
                (gradient,) = torch.autograd.grad(
                    x[reading, t].square().sum(), inputs, retain_graph=True
                )
                touched = {(r, i) for r, i in gradient.abs().sum(-1).nonzero().tolist()}
                assert touched == {
                    (reading, i) for i in range(max(0, t - scope_size(layer_number) + 1), t + 1)
                }


# ---- several contexts of one sequence in a batch are encoded once


@pytest.mark.parametrize("attention", ["reference", "blocked"])
@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_contexts_of_one_sequence_side_by_side_answer_as_alone(attention: str, mode: str) -> None:
    model = small_model(attention)
    tokens, _, lengths = random_batch(model, 4, 13)
    number = torch.tensor([0, 0, 0, 1, 2, 2, 3, 0])
    context = torch.rand(len(number), 13, generator=torch.Generator().manual_seed(3)) < 0.5
    together = model.log_prob(Batch(tokens[number], context, lengths[number]), mode)
    alone = torch.cat(
        [
            model.log_prob(Batch(tokens[[i]], context[[row]], lengths[[i]]), mode)
            for row, i in enumerate(number.tolist())
        ]
    )
    assert torch.allclose(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention", ["reference", "blocked"])
def test_sequences_of_different_length_do_not_share_features(attention: str) -> None:
    model = small_model(attention)
    tokens, context = (
        torch.zeros(2, 5, dtype=torch.long),
        torch.tensor([[True, True, False, False, False]] * 2),
    )
    # the padding of the first and the masks of the second read alike
    lengths = torch.tensor([3, 5])
    together = model.log_prob(Batch(tokens, context, lengths), "ac")
    alone = [
        model.log_prob(Batch(tokens[[i], :length], context[[i], :length]), "ac")[0]
        for i, length in enumerate((3, 5))
    ]
    for row, own in zip(together, alone, strict=True):
        assert torch.allclose(row[: len(own)], own, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mode", "rows"), [("car", 2 + 6), ("ac", 12), ("ar", 2)])
def test_equal_neighbouring_rows_are_encoded_once(
    mode: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model()
    encoded: list[int] = []
    encode = Tracformer._encode

    def counted(self: Tracformer, readings: torch.Tensor, *rest: object) -> list[torch.Tensor]:
        encoded.append(len(readings))
        return encode(self, readings, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Tracformer, "_encode", counted)
    tokens, context, _ = random_batch(model, 6, 9)
    context[:, 0] = torch.arange(6) % 2 == 0  # no two neighbours have the same given tokens
    model.log_prob(Batch(tokens[torch.tensor([0, 0, 0, 1, 1, 1])], context), mode)
    assert encoded == [rows]


# ---- without gradients, only the features on which targets depend are computed


def few_targets(model: Tracformer, rows: int, length: int) -> Batch:
    """Return sequences of different lengths with one to three targets each."""
    tokens, _, lengths = random_batch(model, rows, length)
    generator = torch.Generator().manual_seed(5)
    context = torch.ones_like(tokens, dtype=torch.bool)
    for row, size in enumerate(lengths.tolist()):
        context[row, torch.randint(size, (1 + row % 3,), generator=generator)] = False
    return Batch(tokens, context, lengths)


@pytest.mark.parametrize("attention", implementations())
@pytest.mark.parametrize(
    "variant",
    [{}, {"n_max": 5}, {"encoder": "full"}, {"decoder": "dense"}, {"decoder": "neighbours"}],
    ids=str,
)
def test_needed_features_give_what_all_features_give(
    attention: str, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(attention, **{"max_length": 32, "n_layer": 5, **variant})
    batch = few_targets(model, 7, 29)
    everything = {mode: model.log_prob(batch, mode).detach() for mode in MODES}

    def refuse(*_: object) -> None:
        raise AssertionError("all features are computed")

    monkeypatch.setattr(Tracformer, "_encode", refuse)
    with torch.no_grad():
        for mode, expected in everything.items():
            found = model.log_prob(batch, mode)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("variant", [{}, {"decoder": "dense"}], ids=str)
def test_needed_features_are_those_on_the_paths_to_a_target(variant: dict[str, Any]) -> None:
    """By gradients: a feature is needed if it is a key of the decoder or of a needed feature."""
    model = small_model(max_length=32, n_layer=5, **variant)
    T, target = 29, 17
    layout = Layout(torch.tensor([T]), T, readings=2, rows=torch.tensor([target]))
    needed = model.needed(layout)
    assert needed.share < 0.7
    context = torch.arange(T)[None] != target
    kept: list[Tensor] = []
    for layer in model.encoder:
        layer.register_forward_hook(lambda *found: kept.append(found[-1]))
    total = model.log_prob(Batch(torch.arange(T)[None] % 7, context), "car").sum()
    gradients = torch.autograd.grad(total, kept)
    for gradient, flags in zip(gradients, needed.features[1:], strict=True):
        assert (gradient.abs().sum(-1) > 0).equal(flags)


# ---- log-probabilities and the loss: exact, chunked, and the same under recomputation


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
