"""What an answer depends on, exactly: by perturbing inputs, by gradients, and in a batch."""

import pytest
import torch
from torch import Tensor

from tests.toys import random_batch, small_model
from tracformer import Tracformer
from tracformer.attention import Layout, implementations
from tracformer.geometry import scope_size
from tracformer.model import MODES
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
