"""Sessions: what the filling loop and search ask of a model."""

import pytest
import torch

from tests.helpers import random_batch, small_model
from tracformer.generation import sessions
from tracformer.generation.sessions import WholePasses, open_session
from tracformer.model.batch import Batch
from tracformer.model.cache import Cache


@pytest.mark.parametrize("mode", ["car", "ar", "ac"])
def test_a_selection_keeps_what_was_revealed_and_stands_alone(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "AT_ONCE", 1)
    model = small_model()
    tokens, context, _ = random_batch(model, 2, 9)
    context[:, 2:5] = False
    lengths = torch.tensor([9, 7])
    session = open_session(
        model, Batch(tokens, context | (torch.arange(9) < 2), lengths), mode, cached=False
    )
    rows, positions = torch.arange(2), torch.tensor([3, 3])
    session.reveal(rows, torch.tensor([2, 2]), torch.tensor([4, 5]))
    expected = session.logits(rows, positions)
    fork = session.select([1, 0, 1])
    torch.testing.assert_close(
        fork.logits(torch.arange(3), torch.tensor([3, 3, 3])),
        expected[[1, 0, 1]],
        rtol=0,
        atol=1e-12,
    )
    fork.reveal(torch.tensor([0, 1]), torch.tensor([2, 2]), torch.tensor([0, 0]))
    assert torch.equal(session.logits(rows, positions), expected)
    changed = fork.logits(torch.arange(3), torch.tensor([3, 3, 3]))
    assert not torch.allclose(changed[0], expected[1])
    torch.testing.assert_close(changed[2], expected[1], rtol=0, atol=1e-12)


def test_whole_passes_answer_alike_whatever_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    tokens, context, lengths = random_batch(model, 5, 11, seed=2)
    wanted = (~context & (torch.arange(11) < lengths[:, None])).nonzero()
    answers = []
    for batch in (1, 2, 16):
        monkeypatch.setattr(sessions, "AT_ONCE", batch)
        answers.append(
            open_session(model, Batch(tokens, context, lengths), "ac", cached=False).logits(
                *wanted.unbind(1)
            )
        )
    with torch.no_grad():
        whole = model(Batch(tokens, context, lengths), "ac")[*wanted.unbind(1)]
    for answer in answers:
        torch.testing.assert_close(answer, whole, rtol=0, atol=1e-12)


def test_the_cache_where_there_is_one() -> None:
    model = small_model()
    tokens, context, lengths = random_batch(model, 2, 9)
    assert isinstance(open_session(model, Batch(tokens, context, lengths), "car"), Cache)
    assert isinstance(
        open_session(model, Batch(tokens, context, lengths), "car", cached=False), WholePasses
    )
    assert isinstance(open_session(model, Batch(tokens, context, lengths), "ac"), WholePasses)


def test_without_targets() -> None:
    tokens, context = torch.tensor([[5, -1, 6]]), torch.tensor([[True, False, True]])
    assert Batch(tokens, context).without_targets().tokens.tolist() == [[5, 0, 6]]
