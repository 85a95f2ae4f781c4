"""Perturb an input; whatever must not see it changes by exactly nothing, whatever
must see it changes.
"""

import pytest
import torch
from torch import Tensor

from tests.helpers import small_model
from tracformer.attention import implementations
from tracformer.model import MODES
from tracformer.model.batch import Batch

T = 13


def visible(mode: str, context: Tensor, i: int, t: int) -> bool:
    """May the answer at t depend on x_i?

    (DESIGN: CAR sees C and all before t; AC sees C; AR sees all before t.)
    """
    if i == t:
        return False
    return {"car": i < t or bool(context[i]), "ac": bool(context[i]), "ar": i < t}[mode]


@pytest.mark.parametrize("attention", implementations())
@pytest.mark.parametrize("variant", [{}, {"encoder": "full"}, {"decoder": "dense"}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_answers_depend_on_what_they_may_see_and_on_nothing_else(
    mode: str, variant: dict[str, str], attention: str
) -> None:
    model = small_model(attention, n_max=4, **variant)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(7, (1, T), generator=generator)
    context = torch.rand(1, T, generator=generator) < 0.5
    assert context.any()
    assert not context.all()
    with torch.no_grad():
        before = model(Batch(tokens, context), mode)[0]
        for i in range(T):
            changed = tokens.clone()
            changed[0, i] = (changed[0, i] + 1) % 7
            difference = (model(Batch(changed, context), mode)[0] - before).abs().amax(-1)
            for t in range(T):
                if visible(mode, context[0], i, t):
                    assert difference[t] > 1e-9
                else:
                    assert difference[t] == 0.0


def test_empty_context_car_is_not_ar() -> None:
    """The all-mask suffix is attended and reveals the length."""
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
