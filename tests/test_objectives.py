from collections import Counter

import numpy as np
import pytest
import torch

from tests.helpers import small_model
from tracformer.model.batch import Batch
from tracformer.training.objectives import OBJECTIVES, Questioner, low_discrepancy, parse_objective


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_asks_for_something(name: str) -> None:
    questioner = Questioner(parse_objective(name), seed=1)
    modes = {part.mode for part in parse_objective(name).parts}
    for number in range(50):
        question = questioner.ask(number, length=20)
        assert question.mode in modes
        assert question.context.shape == (20,)
        assert not question.context.all()


def test_shares_of_a_mixture() -> None:
    questioner = Questioner(parse_objective("all-modes"), seed=0)
    modes = Counter(questioner.ask(number, 16).mode for number in range(4000))
    for part in OBJECTIVES["all-modes"]:
        assert abs(modes[part.mode] / 4000 - part.share) < 0.03


def test_a_question_depends_on_seed_and_number_alone() -> None:
    first, second = (Questioner(parse_objective("all-modes"), seed=5) for _ in range(2))
    forwards = [first.ask(number, 30) for number in range(40)]
    backwards = [second.ask(number, 30) for number in reversed(range(40))][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert a.mode == b.mode
        assert np.array_equal(a.context, b.context)
    other = Questioner(parse_objective("all-modes"), seed=6)
    assert any(
        not np.array_equal(a.context, other.ask(number, 30).context)
        for number, a in enumerate(forwards)
    )


def test_contexts_replace_those_of_car_and_ac_rows() -> None:
    objective = parse_objective("all-modes", "random:0.25")
    assert [part.contexts for part in objective.parts] == ["random:0.25", "random:0.25", "empty"]
    with pytest.raises(ValueError, match="fixes its own contexts"):
        parse_objective("ar", "random:0.25")


def test_fim_rows_have_one_hole_mostly_and_several_sometimes() -> None:
    questioner = Questioner(parse_objective("fim"), seed=0)
    questions = [questioner.ask(number, 400) for number in range(2000)]
    holes = Counter(
        int((np.diff((~q.context).astype(int), prepend=0) == 1).sum())
        for q in questions
        if q.mode == "car"
    )
    assert abs(sum(holes.values()) / 2000 - 0.5) < 0.04
    assert 0.75 < holes[1] / sum(holes.values()) < 0.85
    assert all(not q.context.any() for q in questions if q.mode == "ar")


def test_diffusion_is_the_nelbo_of_the_any_order_model() -> None:
    """E over k uniform and a uniform subset of n/k * sum over targets = the bound averaged over all
    subsets, by enumeration.
    """
    n = 4
    model = small_model()
    tokens = torch.tensor([[1, 3, 0, 2]])
    exact = 0.0
    for k in range(1, n + 1):
        subsets = [mask for mask in range(2**n) if bin(mask).count("1") == k]
        for mask in subsets:
            context = torch.tensor([[not mask >> t & 1 for t in range(n)]])
            exact -= (
                float(model.log_prob(Batch(tokens, context), "ac").sum().detach())
                * n
                / k
                / len(subsets)
                / n
            )
    questioner = Questioner(parse_objective("diffusion"), seed=3)
    questions = [questioner.ask(number, n) for number in range(3000)]
    assert all(question.count == n for question in questions)
    contexts = torch.from_numpy(np.stack([question.context for question in questions]))
    terms = -model.log_prob(Batch(tokens.expand(len(questions), -1), contexts), "ac").sum(1)
    estimate = terms * torch.tensor(
        [question.weight for question in questions], dtype=torch.float64
    )
    error = float(estimate.std().detach()) / len(questions) ** 0.5
    assert abs(float(estimate.mean().detach()) - exact) < 4 * error


def test_low_discrepancy_points_cover_every_stretch_evenly() -> None:
    for start in (0, 777):
        points = np.sort([low_discrepancy(9, number) for number in range(start, start + 64)])
        assert np.abs(points - (np.arange(64) + 0.5) / 64).max() < 3 / 64
