"""The law of the samples: frequencies against probabilities that are enumerated,
filling by filling.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.toys import small_model
from tracformer import Tracformer
from tracformer.generation import scheduler
from tracformer.generation.decode import fill
from tracformer.generation.orders import Ancestral, ByConfidence, LeftToRight, Order, RandomOrder
from tracformer.model.batch import Batch

V, T, TARGETS, N = 3, 5, (0, 2, 3), 1000
Filling = tuple[int, ...]


def question(seed: int) -> tuple[Tracformer, Tensor, Tensor]:
    model = small_model(vocab_size=V, n_layer=3, max_length=8, seed=seed)
    context = torch.ones(1, T, dtype=torch.bool)
    context[0, list(TARGETS)] = False
    return model, torch.tensor([[0, 1, 0, 0, 2]]), context


def law_of_steps(
    model: Tracformer,
    tokens: Tensor,
    context: Tensor,
    turn: Callable[[list[int], Tensor], Sequence[int]],
) -> dict[Filling, float]:
    """Probability of each filling if at each step the positions of `turn(open, probabilities)` are
    drawn from their own marginals.
    """
    law: dict[Filling, float] = Counter()

    def walk(tokens: Tensor, context: Tensor, probability: float) -> None:
        still = (~context[0]).nonzero()[:, 0].tolist()
        if not still:
            law[tuple(tokens[0, list(TARGETS)].tolist())] += probability
            return
        p = model(Batch(tokens, context), "ac")[0].softmax(-1)
        now = list(turn(still, p[still]))
        for drawn in itertools.product(range(V), repeat=len(now)):
            after, known = tokens.clone(), context.clone()
            after[0, now], known[0, now] = torch.tensor(drawn), True
            walk(after, known, probability * float(p[now, list(drawn)].prod()))

    with torch.no_grad():
        walk(tokens, context, 1.0)
    return law


def law_of_schedules(
    model: Tracformer, tokens: Tensor, context: Tensor, schedules: list[list[tuple[int, ...]]]
) -> dict[Filling, float]:
    """Equally likely schedules, each a list of steps."""
    law: dict[Filling, float] = Counter()
    for schedule in schedules:

        def turn(
            still: list[int], p: Tensor, schedule: list[tuple[int, ...]] = schedule
        ) -> Sequence[int]:
            return next(step for step in schedule if set(step) <= set(still))

        for filling, probability in law_of_steps(model, tokens, context, turn).items():
            law[filling] += probability / len(schedules)
    return law


def joint(model: Tracformer, tokens: Tensor, context: Tensor, mode: str) -> dict[Filling, float]:
    fillings = list(itertools.product(range(V), repeat=len(TARGETS)))
    many = tokens.repeat(len(fillings), 1)
    many[:, list(TARGETS)] = torch.tensor(fillings)
    with torch.no_grad():
        values = model.log_prob(Batch(many, context.expand_as(many)), mode).sum(1).exp().tolist()
    return dict(zip(fillings, values, strict=True))


def check_law(
    monkeypatch: pytest.MonkeyPatch,
    law: dict[Filling, float],
    model: Tracformer,
    tokens: Tensor,
    context: Tensor,
    mode: str,
    order: Order,
) -> None:
    """Chi-square of N samples, seeds 0..N-1, four standard deviations; cells that expect fewer than
    five are taken together.
    """
    assert sum(law.values()) == pytest.approx(1.0)
    monkeypatch.setattr(scheduler, "AT_ONCE", N)
    filled = fill(
        model, Batch(tokens.expand(N, T), context.expand(N, T)), mode, order=order, seed=range(N)
    )
    counts = Counter(tuple(row) for row in filled.tokens[:, list(TARGETS)].tolist())
    rare = {filling for filling, p in law.items() if N * p < 5}
    cells = [(counts[filling], N * p) for filling, p in law.items() if filling not in rare]
    cells.append(
        (sum(counts[filling] for filling in rare), sum(N * law[filling] for filling in rare))
    )
    cells = [(seen, expected) for seen, expected in cells if expected > 0]
    chi, freedom = (
        sum((seen - expected) ** 2 / expected for seen, expected in cells),
        len(cells) - 1,
    )
    assert freedom >= 5  # else the model is too sure to tell laws apart
    assert chi < freedom + 4 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("mode", ["car", "ar"])
def test_samples_follow_the_exact_joint(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, context = question(1)
    check_law(
        monkeypatch,
        joint(model, tokens, context, mode),
        model,
        tokens,
        context,
        mode,
        LeftToRight(),
    )


def test_samples_in_random_order_follow_the_mean_over_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens, context = question(2)
    schedules = [[(position,) for position in order] for order in itertools.permutations(TARGETS)]
    check_law(
        monkeypatch,
        law_of_schedules(model, tokens, context, schedules),
        model,
        tokens,
        context,
        "ac",
        RandomOrder(),
    )


def test_samples_by_confidence_follow_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, context = question(3)

    def surest(still: list[int], p: Tensor) -> list[int]:
        return [still[int(p.amax(1).argmax())]]

    check_law(
        monkeypatch,
        law_of_steps(model, tokens, context, surest),
        model,
        tokens,
        context,
        "ac",
        ByConfidence("probability"),
    )


def test_ancestral_samples_follow_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps: each target falls into the first or the second, by a fair coin of its own."""
    model, tokens, context = question(4)
    schedules = []
    for coins in itertools.product((0, 1), repeat=len(TARGETS)):
        steps = [
            tuple(t for t, coin in zip(TARGETS, coins, strict=True) if coin == side)
            for side in (0, 1)
        ]
        schedules.append([step for step in steps if step])
    check_law(
        monkeypatch,
        law_of_schedules(model, tokens, context, schedules),
        model,
        tokens,
        context,
        "ac",
        Ancestral(2),
    )
