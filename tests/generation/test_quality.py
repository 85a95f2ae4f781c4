"""Quality of fills: the model's settings, and the lengths of blanks."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.fluency import table

import tracformer
from tests.toys import Chain, make
from tracformer import InfillOptions, LanguageModel
from tracformer.data import char_tokenizer
from tracformer.generation.decode import Runner, fill
from tracformer.generation.generation_config import (
    FOR_SYMBOLS,
    FOR_TEXT,
    RAW,
    GenerationConfig,
    read_generation_config,
    settings_for,
    write_generation_config,
)
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
from tracformer.generation.ranking import left_to_right, length_reward
from tracformer.generation.samplers import Sampler
from tracformer.generation.template import BlankLayout, TokenizedText
from tracformer.model.batch import Batch

LETTERS = "abc "


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return make(char_tokenizer(LETTERS))


@pytest.fixture(scope="module")
def best(lm: LanguageModel) -> LanguageModel:
    """Return the same model with the settings of a model for text."""
    return LanguageModel(lm.model, lm.tokenizer, generation=FOR_TEXT)


def test_raw_samples_follow_the_law_of_the_model(best: LanguageModel) -> None:
    """Under `raw` every fill occurs as often as its exact probability, found by enumeration."""
    n, end = 3000, best.tokenizer.eot_id
    before, after = best.tokenizer.encode("ab"), [*best.tokenizer.encode("c"), end]
    letters = best.tokenizer.encode(LETTERS)

    def share(token: int, known: list[int], rest: int) -> float:
        """Return the probability of the next token given those known; no end of text in a blank."""
        ids = [*before, *known, token, *[letters[0]] * rest, *after]
        given = [i < 2 + len(known) or i >= 4 for i in range(len(ids))]
        ended = [*ids[: 2 + len(known)], end, *ids[3 + len(known) :]]
        own, never = (
            math.exp(best.score_tokens(each, given)[2 + len(known)]) for each in (ids, ended)
        )
        return own / (1 - never)

    law = {(i, j): share(i, [], 1) * share(j, [i], 0) for i, j in product(letters, letters)}
    assert sum(law.values()) == pytest.approx(1.0)
    counts = dict.fromkeys(law, 0)
    results = best.infill("ab[[2]]c", n, quality="raw", batch=500)
    for result in results:
        counts[result.spans[0].token_ids] += 1  # type: ignore[index]
    chi_square = sum((counts[each] - n * p) ** 2 / (n * p) for each, p in law.items())
    assert chi_square < 37.7  # 15 degrees of freedom, p = 0.001
    assert results[:5] == best.infill("ab[[2]]c", 5, quality="raw")


def test_a_model_without_settings_gives_raw_samples(lm: LanguageModel) -> None:
    assert lm.generation == RAW
    assert lm.infill("ab[[3]]c", 4) == lm.infill("ab[[3]]c", 4, quality="raw")


@pytest.mark.parametrize("text", ["ab[[3]]c", "ab[[]]c", "a[[1-4]]b[[]]c"])
def test_best_returns_distinct_fills_in_the_order_of_their_scores(
    best: LanguageModel, text: str
) -> None:
    results = best.infill(text, 5, max_blank=6)
    scores = [result.score for result in results]
    assert None not in scores
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert len({result.text for result in results}) == 5
    assert results[:2] == best.infill(text, 2, max_blank=6)
    for result in results:
        spans = zip(text.split("[[")[1:], result.spans, strict=True)
        marked = text.split("[[")[0] + "".join(
            f"[[{span.text}]]" + piece.split("]]")[1] for piece, span in spans
        )
        # the reported log-probability is the model's own
        assert result.log_prob == pytest.approx(best.score(marked).log_prob, abs=1e-4)


def test_best_beats_the_samples_it_ranks(best: LanguageModel) -> None:
    def score(result: Any) -> float:
        again = best.score_tokens(result.token_ids, [False] * len(result.token_ids), "ar")
        return float(result.log_prob + sum(again) + length_reward([3], twice=True))

    [found] = best.infill("ab[[3]]c")
    assert found.score == pytest.approx(score(found), abs=1e-4)
    assert all(
        score(each) <= score(found) + 1e-4 for each in best.infill("ab[[3]]c", 30, temperature=0.5)
    )


def test_shared_prefixes_are_read_once_with_the_same_result(lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode("abca cab")
    sequences = [[*ids[:3], *ids[k:]] for k in range(4)] + [ids[:2]]
    for some in (sequences, sequences[:1], sequences[1:4], []):
        alone = [sum(lm.score_tokens(each, [False] * len(each), "ar")) for each in some]
        assert left_to_right(lm.runner, some, 2) == pytest.approx(alone, abs=1e-4)


def test_precedence() -> None:
    config = GenerationConfig("best", temperature=0.7, top_p=0.8, best_of=5, beam=3)

    def used(stream: bool = False, **changes: Any) -> InfillOptions:
        return config.apply(InfillOptions.make(**changes), stream=stream)

    plain = used()
    assert (plain.quality, plain.search, plain.best_of, plain.reread) == ("best", "beam:3", 5, True)
    assert (plain.sampler.temperature, plain.sampler.top_p) == (0.7, 0.8)
    assert used(n=9).search == "beam:9"
    # an option that says how to draw replaces best; the others keep the model's values
    fast = used(temperature=1.0)
    assert (fast.quality, fast.sampler.temperature, fast.sampler.top_p) == ("fast", 1.0, 0.8)
    assert used(stream=True).quality == "fast"
    assert used(search="beam:4").sampler.temperature == 1.0
    # options of a caller that asks for best change its settings
    assert used(quality="best", top_p=0.5, best_of=7).sampler.top_p == 0.5
    raw = used(quality="raw", seed=3)
    assert raw == replace(InfillOptions.make(seed=3), quality="raw")
    assert config.apply(InfillOptions.make(), searchable=False).quality == "fast"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "entropy"}, "order is 'entropy', which has no meaning"),
        ({"required": (1,)}, r"required is \(1,\), which has no meaning"),
        ({"temperature": 0}, "temperature is 0"),
        ({"search": "best-first:10"}, "beam:WIDTH only"),
    ],
)
def test_contradictions_of_best_are_refused(
    best: LanguageModel, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        best.infill("ab[[2]]c", quality="best", **changes)


def test_best_is_not_streamed(best: LanguageModel) -> None:
    with pytest.raises(ValueError, match="cannot be streamed"):
        best.infill("ab[[2]]c", quality="best", callback=print)
    seen: list[Any] = []
    fast = best.infill("ab[[2]]c", callback=seen.extend)
    assert fast == best.infill("ab[[2]]c", quality="fast")
    assert [each.draft for each in seen] == [False, False]


def test_an_unknown_quality_is_refused() -> None:
    with pytest.raises(ValueError, match="quality is 'good'; it must be one of best, fast, raw"):
        InfillOptions.make(quality="good")


def test_settings_are_read_back(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == RAW
    config = GenerationConfig("fast", temperature=0.5, beam=4)
    write_generation_config(tmp_path, config)
    assert read_generation_config(tmp_path) == config
    # what transformers writes for itself counts as none; its keys beside ours are ignored
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"transformers_version": "5", "eos_token_id": 1}))
    assert read_generation_config(tmp_path) == RAW
    path.write_text(json.dumps({**config.to_dict(), "transformers_version": "5"}))
    assert read_generation_config(tmp_path) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"quality": "best", "topp": 0.9}', "unknown option 'topp'; did you mean 'top_p'"),
        ('{"quality": "good"}', "quality is 'good'; it must be one of best, fast, raw"),
        ('{"quality": "best", "top_p": 1.5}', r"top_p is 1.5; it must be in \(0, 1\]"),
        ('{"quality": "best", "beam": "wide"}', "beam is 'wide'; it must be an integer"),
        ("[1]", "holds a list"),
        ("{", "not valid JSON"),
    ],
)
def test_wrong_settings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_generation_config(tmp_path)
    assert str(tmp_path / "generation_config.json") in str(caught.value)


def test_text_gets_best_and_symbols_raw() -> None:
    assert settings_for(char_tokenizer(LETTERS)) == FOR_TEXT
    proteins = tracformer.load("proteins")
    assert settings_for(proteins.tokenizer) == FOR_SYMBOLS
    assert proteins.generation.quality == "raw"
    assert tracformer.load("stories").generation == FOR_TEXT


def test_the_card_of_stories_has_the_table_of_its_fills() -> None:
    root = Path(__file__).parents[2]
    record = json.loads((root / "results/fluency/stories.json").read_text())
    card = (root / "src/tracformer/bundled/stories/README.md").read_text()
    assert table(record) in card


# ---- lengths of blanks are chosen by the probability that the model gives them

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


def test_without_a_suffix_a_longer_blank_never_has_more_mass() -> None:
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


def test_a_prior_does_not_apply_to_fixed_blanks() -> None:
    found = candidates([(7, 7), (1, 2)], room=20, prior={2: 1.0})
    assert found is not None
    assert (found.vectors, found.log_prior.tolist()) == ([(7, 2)], [0.0])


def test_several_long_blanks_are_explored_blank_by_blank() -> None:
    ranges, room, peak = [(1, 32), (5, 5), (1, 32), (1, 32)], 60, (3, 5, 17, 9)
    assert candidates(ranges, room) is None  # too many to weigh them all
    requested: list[tuple[int, ...]] = []

    def log_weights(found: LengthVectors) -> list[float]:
        requested.extend(found.vectors)
        return [-sum(abs(a - b) for a, b in zip(each, peak, strict=True)) for each in found.vectors]

    best = explore(ranges, room, None, log_weights, keep=5)
    assert len(requested) == len(set(requested)) < 60  # of 32768
    assert all(sum(vector) <= room and vector[1] == 5 for vector in requested)
    assert len(best.vectors) == 5
    assert sum(abs(a - b) for a, b in zip(best.vectors[0], peak, strict=True)) <= 3


def test_exploring_keeps_to_the_room_and_the_prior() -> None:
    requested: list[tuple[int, ...]] = []

    def log_weights(found: LengthVectors) -> list[float]:
        requested.extend(found.vectors)
        return [float(sum(each)) for each in found.vectors]  # the longer the better

    explore([(1, 9), (1, 9)], 6, {2: 1.0, 4: 1.0, 5: 1.0}, log_weights, keep=3)
    assert set(requested) <= {(2, 2), (2, 4), (4, 2)}


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
    ("prior", "message"),
    [
        ({9: 1.0}, "no weight to any length"),
        ({2: -1.0}, "length 2 the weight -1.0"),
        (lambda k: float("nan"), "finite"),
    ],
)
def test_unusable_priors_are_refused(prior: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        candidates([(1, 4)], 10, prior)  # type: ignore[arg-type]


def test_one_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        masses(Runner(Chain()), layouts(), draws=1, seed=0, rules=NO_END)
