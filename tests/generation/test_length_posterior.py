"""Lengths of blanks are chosen by the probability that the model gives them."""

import math
from itertools import product

import pytest
import torch

from tests.toys import Chain
from tracformer.data import char_tokenizer
from tracformer.generation.decode import Runner, fill
from tracformer.generation.language_model import LanguageModel
from tracformer.generation.length_posterior import (
    LengthVectors,
    Masses,
    candidates,
    choose,
    explore,
    masses,
    middle,
    summarise,
)
from tracformer.generation.samplers import Sampler
from tracformer.generation.template import BlankLayout, TokenizedText
from tracformer.model.batch import Batch

EOT = 3
NO_END = Sampler(banned=(EOT,))
FRAME = TokenizedText(("ab", "c"), ((0, 1), (2,)), (False,), (EOT,))
LENGTHS = range(1, 6)
CHI_SQUARE = {4: 18.5, 9: 27.9}  # degrees of freedom: exceeded by chance once in a thousand


def layouts(frame: TokenizedText = FRAME) -> list[BlankLayout]:
    return [frame.with_blanks([k]) for k in LENGTHS]


def exact(model: Chain, frame: TokenizedText = FRAME, letters: int | None = 3) -> torch.Tensor:
    return torch.tensor(
        [model.log_mass(laid.tokens, laid.context, letters) for laid in layouts(frame)],
        dtype=torch.float64,
    )


def first_is_a(layout: int, position: int) -> tuple[int, ...] | None:
    return (0,) if position == 2 else None


def test_where_both_modes_agree_every_draw_gives_the_mass() -> None:
    model = Chain()
    found = masses(Runner(model), layouts(), draws=3, seed=1, rules=Sampler())
    torch.testing.assert_close(found.log_masses, exact(model, letters=None), rtol=1e-10, atol=1e-10)
    assert found.standard_errors.max() < 1e-10


@pytest.mark.parametrize("distortion", [0.0, 0.7])
@pytest.mark.parametrize(
    "frame", [FRAME, TokenizedText(FRAME.texts, FRAME.ids, FRAME.spaced)], ids=["whole", "fragment"]
)
def test_masses_under_constraints_are_unbiased_whatever_the_proposal(
    distortion: float, frame: TokenizedText
) -> None:
    model = Chain(distortion=distortion)
    found = masses(Runner(model), layouts(frame), draws=150, seed=3, rules=NO_END, batch=150)
    off = (found.log_masses - exact(model, frame)).abs()
    assert (off < 4 * found.standard_errors + 1e-9).all(), (off / found.standard_errors).tolist()
    assert 0 < found.standard_errors.max() < 0.15


def test_a_constrained_first_token_is_accounted_for() -> None:
    model = Chain(distortion=0.5)
    found = masses(
        Runner(model), layouts(), draws=150, seed=5, rules=NO_END, only=first_is_a, batch=150
    )
    held = [
        BlankLayout(
            [*laid.tokens[:2], 0, *laid.tokens[3:]],
            [*laid.context[:2], True, *laid.context[3:]],
            (2,),
            (k,),
        )
        for k, laid in zip(LENGTHS, layouts(), strict=True)
    ]
    truth = torch.tensor(
        [model.log_mass(laid.tokens, laid.context, 3) for laid in held], dtype=torch.float64
    )
    assert ((found.log_masses - truth).abs() < 4 * found.standard_errors + 1e-9).all()


def test_the_drawn_distribution_sums_to_one_over_the_allowed_fillings() -> None:
    """Many fillings are drawn; each kind is counted once, with the probability that
    it was drawn with.
    """
    model, laid, n = Chain(distortion=0.5), FRAME.with_blanks([3]), 800
    tokens, context = torch.tensor([laid.tokens] * n), torch.tensor([laid.context] * n)
    filled = fill(model, Batch(tokens, context), sampler=NO_END, seed=range(n), only=first_is_a)
    assert filled.drawn is not None
    odds = {
        tuple(row): math.exp(value)
        for row, value in zip(filled.tokens.tolist(), filled.drawn.sum(1).tolist(), strict=True)
    }
    assert len(odds) == 9  # one first token, three for each of the others
    assert sum(odds.values()) == pytest.approx(1.0, abs=1e-12)


def test_without_anything_behind_it_a_longer_blank_never_has_more_mass() -> None:
    model = Chain()
    ending = TokenizedText(("ab", ""), ((0, 1), ()), (False,))
    truth = exact(model, ending)
    assert (truth.diff() < 0).all()
    found = masses(Runner(model), layouts(ending), draws=100, seed=2, rules=NO_END, batch=100)
    assert ((found.log_masses - truth).abs() < 4 * found.standard_errors + 1e-9).all()


def test_standard_errors_are_those_of_the_mean() -> None:
    ratios = torch.tensor([[1.0, 3.0], [2.0, 2.0]], dtype=torch.float64)
    found = summarise(ratios.log() - 800.0)  # far below what exp can hold
    torch.testing.assert_close(
        found.log_masses, torch.tensor([2.0, 2.0], dtype=torch.float64).log() - 800.0
    )
    torch.testing.assert_close(found.standard_errors, torch.tensor([0.5, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("prior", [None, {1: 2.0, 2: 1.0, 3: 5.0, 4: 1.0, 5: 0.5}])
def test_chosen_lengths_follow_the_posterior(prior: dict[int, float] | None) -> None:
    model = Chain(distortion=0.3)
    lm = LanguageModel(model, char_tokenizer("abc"))
    n = 800
    results = lm.infill("ab[[1-5]]c", n, prior=prior, length_draws=100, batch=400, seed=11)
    weights = torch.tensor(
        [1.0 if prior is None else prior[k] for k in LENGTHS], dtype=torch.float64
    )
    posterior = (exact(model) + weights.log()).softmax(0)
    counts = torch.tensor([sum(len(r.spans[0].token_ids) == k for r in results) for k in LENGTHS])
    expected = n * posterior
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE[4]
    choice = results[0].length_choice
    assert choice is not None
    torch.testing.assert_close(
        torch.tensor(choice.probabilities, dtype=torch.float64), posterior, rtol=0.15, atol=0.01
    )


def test_ranked_lengths_come_in_the_order_of_their_weights() -> None:
    model = Chain()
    lm = LanguageModel(model, char_tokenizer("abc"))
    results = lm.infill("ab[[1-5]]c", 5, lengths="rank", length_draws=20, batch=200)
    ranked = [k + 1 for k in exact(model).argsort(descending=True).tolist()]
    assert [len(r.spans[0].token_ids) for r in results] == ranked
    assert all(
        r.length_choice is not None and r.length_choice.chosen == (len(r.spans[0].token_ids),)
        for r in results
    )


def test_several_blanks_are_weighed_together() -> None:
    model = Chain()
    lm = LanguageModel(model, char_tokenizer("abc"))
    choice = lm.infill("a[[1-3]]b[[1-2]]c", length_draws=50, batch=300)[0].length_choice
    assert choice is not None
    assert choice.lengths == tuple(product((1, 2, 3), (1, 2)))
    frame = TokenizedText(("a", "b", "c"), ((0,), (1,), (2,)), (False, False), (EOT,))
    laid = [frame.with_blanks(vector) for vector in choice.lengths]
    truth = torch.tensor(
        [model.log_mass(each.tokens, each.context, 3) for each in laid], dtype=torch.float64
    ).softmax(0)
    torch.testing.assert_close(
        torch.tensor(choice.probabilities, dtype=torch.float64), truth, rtol=0.15, atol=0.01
    )


def test_all_vectors_that_fit_are_candidates_where_they_are_few() -> None:
    found = candidates([(1, 4), (2, 5)], room=6, prior={1: 1.0, 2: 1.0, 4: 2.0})
    assert found is not None
    assert found.vectors == [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2)]
    assert float(found.log_prior[1] - found.log_prior[0]) == pytest.approx(
        torch.tensor(2.0).log().item()
    )


def test_lengths_without_weight_are_not_even_counted() -> None:
    # 40^12 vectors, and one that may be
    found = candidates([(1, 40)] * 12, room=400, prior={3: 1.0, 7: 0.0})
    assert found is not None
    assert found.vectors == [(3,) * 12]
    with pytest.raises(ValueError, match="gives no weight"):
        candidates([(1, 4), (1, 4)], room=8, prior={5: 1.0})


def test_a_prior_does_not_speak_about_fixed_blanks() -> None:
    found = candidates([(7, 7), (1, 2)], room=20, prior={2: 1.0})
    assert found is not None
    assert (found.vectors, found.log_prior.tolist()) == ([(7, 2)], [0.0])


def test_several_long_blanks_are_explored_blank_by_blank() -> None:
    ranges, room, peak = [(1, 32), (5, 5), (1, 32), (1, 32)], 60, (3, 5, 17, 9)
    assert candidates(ranges, room) is None  # too many to weigh them all
    asked: list[tuple[int, ...]] = []

    def log_weights(found: LengthVectors) -> list[float]:
        asked.extend(found.vectors)
        return [-sum(abs(a - b) for a, b in zip(each, peak, strict=True)) for each in found.vectors]

    best = explore(ranges, room, None, log_weights, keep=5)
    assert len(asked) == len(set(asked)) < 60  # of 32768
    assert all(sum(vector) <= room and vector[1] == 5 for vector in asked)
    assert len(best.vectors) == 5
    assert sum(abs(a - b) for a, b in zip(best.vectors[0], peak, strict=True)) <= 3


def test_exploring_keeps_to_the_room_and_the_prior() -> None:
    asked: list[tuple[int, ...]] = []

    def log_weights(found: LengthVectors) -> list[float]:
        asked.extend(found.vectors)
        return [float(sum(each)) for each in found.vectors]  # the longer the better

    explore([(1, 9), (1, 9)], 6, {2: 1.0, 4: 1.0, 5: 1.0}, log_weights, keep=3)
    assert set(asked) <= {(2, 2), (2, 4), (4, 2)}


def test_choices_depend_on_their_own_seed_alone() -> None:
    found = LengthVectors([(1,), (2,), (3,)], torch.zeros(3, dtype=torch.float64))
    weighed = Masses(torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    together = choose(found, weighed, "sample", [5, 6, 7, 8])
    assert [choose(found, weighed, "sample", [seed])[0] for seed in (5, 6, 7, 8)] == together
    assert len({choice.chosen for choice in choose(found, weighed, "sample", range(40))}) == 3


def test_the_middle_is_shortened_until_it_fits() -> None:
    assert middle([(1, 9), (3, 3)], 30) == (5, 3)
    assert middle([(1, 9), (1, 5)], 5) == (2, 3)


@pytest.mark.parametrize(
    ("prior", "said"),
    [
        ({9: 1.0}, "no weight to any length"),
        ({2: -1.0}, "length 2 the weight -1.0"),
        (lambda k: float("nan"), "finite"),
    ],
)
def test_unusable_priors_are_refused(prior: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        candidates([(1, 4)], 10, prior)  # type: ignore[arg-type]


def test_one_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        masses(Runner(Chain()), layouts(), draws=1, seed=0, rules=NO_END)
