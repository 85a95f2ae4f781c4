"""A second opinion: candidates are ranked by what fills the blanks and by how the whole text reads
from left to right.
"""

from typing import Any

import pytest

from tests.generation.chain import Chain
from tests.generation.texts import make
from tracformer import LanguageModel
from tracformer.data import byte_tokenizer, char_tokenizer
from tracformer.generation.infill import left_to_right
from tracformer.generation.results import Infilled

BLANK = "the cat [[2]] on the mat"


def reading(lm: LanguageModel, result: Infilled) -> float:
    return sum(lm.score_tokens(result.token_ids, [False] * len(result.token_ids), "ar"))


@pytest.mark.parametrize("options", [{"search": "beam:12"}, {"best_of": 20}])
@pytest.mark.parametrize("batch", [16, 5])
def test_the_best_by_both_opinions_come_first(
    lm: LanguageModel, options: dict[str, Any], batch: int
) -> None:
    found = lm.infill(BLANK, 12, **options)
    expected = sorted(found, key=lambda each: -each.log_prob - reading(lm, each))
    assert [each.text for each in expected] != [each.text for each in found]
    best = lm.infill(BLANK, 12, reread=True, batch=batch, **options)
    if "search" in options:
        assert [each.text for each in best] == [each.text for each in expected]
    both = [each.log_prob + reading(lm, each) for each in best]
    assert both == sorted(both, reverse=True)
    assert all(f"log p {reading(lm, each):.3f} from left to right" in each.note for each in best)
    [one] = lm.infill(BLANK, reread=True, batch=batch, **options)
    assert (one.text, one.log_prob) == (best[0].text, pytest.approx(best[0].log_prob))


def test_two_opinions_of_one_law_differ_by_what_all_fillings_share() -> None:
    lm = LanguageModel(Chain(), char_tokenizer("abc"))
    found = lm.infill("a[[2]]ca", 9, search="beam:9", whole=False)
    apart = [reading(lm, each) - each.log_prob for each in found]
    assert len(found) == 9
    assert apart == pytest.approx([apart[0]] * 9)


def test_candidates_of_other_lengths_are_read_too() -> None:
    lm = LanguageModel(Chain(), char_tokenizer("abc"))
    best = lm.infill("a[[1-3]]b", 8, best_of=40, reread=True)
    assert len({len(each.token_ids) for each in best}) > 1

    def both(result: Infilled) -> float:
        assert result.length_choice is not None
        posterior = dict(
            zip(result.length_choice.lengths, result.length_choice.log_probabilities, strict=True)
        )
        return result.log_prob + posterior[result.length_choice.chosen] + reading(lm, result)

    assert [both(each) for each in best] == sorted(map(both, best), reverse=True)


def test_asked_from_left_to_right_there_is_one_opinion(lm: LanguageModel) -> None:
    found = left_to_right(
        lm.runner,
        [each.token_ids for each in lm.infill(BLANK, 12, best_of=12, mode="ar", reread=True)],
        16,
    )
    assert found == sorted(found, reverse=True)


def test_what_cannot_be_read_again_is_told(lm: LanguageModel) -> None:
    for options in ({}, {"search": "best-first:10"}):
        with pytest.raises(
            ValueError,
            match=r"ranks candidates: ask for several with best_of, or with search beam:WIDTH",
        ):
            lm.infill_requests([BLANK], reread=True, **options)
    with pytest.raises(ValueError, match="trained for: car"):
        make(byte_tokenizer(), modes=("car",)).infill_requests(["a[[2]]"], best_of=4, reread=True)
