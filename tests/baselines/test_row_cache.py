"""Cached generation computes the same logits as whole passes, step by step."""

import pytest
import torch
from torch import Tensor

from tests.toys import SYSTEM_MODES, random_question, small_baseline
from tracformer.generation.decode import fill
from tracformer.generation.scheduler import empty_session, open_session
from tracformer.model.batch import Batch

CACHED = [
    (family, mode)
    for family, mode in SYSTEM_MODES
    if mode != "ac" and small_baseline(family).empty_cache(mode, 1, 4) is not None
]


def stepwise(session: object, tokens: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """Return (targets, V) logits: predict each sequence's next target, then reveal its token."""
    turns = [row.nonzero()[:, 0].tolist() for row in targets]
    logits: dict[tuple[int, int], Tensor] = {}
    for turn in range(max(map(len, turns))):
        active = [number for number, mine in enumerate(turns) if turn < len(mine)]
        places = torch.tensor([turns[number][turn] for number in active])
        answer = session.logits(rows[active], places)
        logits.update(zip(zip(active, places.tolist(), strict=True), answer, strict=True))
        session.reveal(rows[active], places, tokens[active, places])
    return torch.stack([logits[key] for key in sorted(logits)])


def test_which_systems_have_a_cache() -> None:
    assert {family.split()[0] for family, _ in CACHED} == {
        "ac-gpt",
        "as-arm",
        "sigma-gpt",
        "compact",
        "aligned",
    }


@pytest.mark.parametrize(("family", "mode"), CACHED)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_step_equals_a_whole_pass(family: str, mode: str, seed: int) -> None:
    model = small_baseline(family, seed=seed)
    tokens, context, lengths = random_question(4, 11, seed)
    if seed == 2:
        context[1] = False  # nothing given
    targets = Batch(tokens, context, lengths).targets()
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), mode)[targets]
    session = empty_session(model, mode, 6, 12)
    stale = session.admit(
        Batch(tokens[:2, :5], torch.ones_like(context[:2, :5]), torch.tensor([5, 5]))
    )
    session.release(stale)  # rows are used again, and nothing of their earlier sequences remains
    rows = session.admit(Batch(tokens.masked_fill(~context, 6), context, lengths))
    torch.testing.assert_close(stepwise(session, tokens, targets, rows), whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("family", "mode"), CACHED)
def test_a_selection_is_independent_of_its_source(family: str, mode: str) -> None:
    model = small_baseline(family)
    tokens, context, lengths = random_question(3, 9, 5)
    targets = Batch(tokens, context, lengths).targets()
    session = open_session(model, Batch(tokens, context, lengths), mode)
    first = torch.tensor([int(row.nonzero()[0]) for row in targets])
    session.logits(torch.arange(3), first)
    chosen = session.select([2, 2, 0])
    chosen.reveal(torch.arange(3), first[[2, 2, 0]], torch.tensor([1, 2, 3]))
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), mode)[targets]
    torch.testing.assert_close(
        stepwise(session, tokens, targets, torch.arange(3)), whole, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(("family", "mode"), CACHED)
def test_a_position_can_be_predicted_twice(family: str, mode: str) -> None:
    model = small_baseline(family)
    tokens, context, lengths = random_question(2, 9, 3)
    targets = Batch(tokens, context, lengths).targets()
    session = open_session(model, Batch(tokens, context, lengths), mode)
    first = torch.tensor([int(row.nonzero()[0]) for row in targets])
    once, again = (session.logits(torch.arange(2), first) for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=1e-12)
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), mode)[targets]
    torch.testing.assert_close(
        stepwise(session, tokens, targets, torch.arange(2)), whole, rtol=0, atol=1e-10
    )


@pytest.mark.parametrize(("family", "mode"), CACHED)
def test_samples_do_not_depend_on_the_cache(family: str, mode: str) -> None:
    model = small_baseline(family)
    tokens, context, lengths = random_question(5, 10, 7)
    cached, plain = (
        fill(model, Batch(tokens, context, lengths), mode, seed=3, cached=cached)
        for cached in (True, False)
    )
    assert torch.equal(cached.tokens, plain.tokens)
    torch.testing.assert_close(cached.log_prob, plain.log_prob, rtol=0, atol=1e-9)
