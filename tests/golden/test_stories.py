"""Fills, scores and samples of the bundled model `stories` are those recorded in stories.json.

Each case of the record names a method of `LanguageModel`, its text and its options, and holds what
it returned: texts, which must be equal, and log-probabilities, which may differ by TOLERANCE. The
cases were chosen so that compiled and plain code give the same texts.

After an intended change, record again and review the difference:

    python -m tests.golden.test_stories
"""

import json
from pathlib import Path
from typing import Any

import pytest

import tracformer
from tracformer import LanguageModel
from tracformer.generation.orders import parse_order
from tracformer.generation.samplers import Sampler

RECORD = Path(__file__).parent / "stories.json"
CASES: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
TOLERANCE = 1e-4  # nats


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tracformer.load("stories")


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_stories_gives_what_was_recorded(lm: LanguageModel, case: dict[str, Any]) -> None:
    assert differences(compute(lm, case), case["results"]) == []


def compute(lm: LanguageModel, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of a case as JSON has them."""
    call, text, options = case["call"], case.get("text"), dict(case.get("options", {}))
    if "sampler" in options:
        options["sampler"] = Sampler(**options["sampler"])
    if "order" in options:
        options["order"] = parse_order(**options["order"])
    if "prior" in options:
        options["prior"] = {int(length): weight for length, weight in options["prior"].items()}
    if call == "infill":
        return [filled(result) for result in lm.infill(text, quality="raw", **options)]
    if call == "score":
        return [scored(lm.score(text, **options))]
    if call == "marginals":
        return [marginal(result) for result in lm.marginals(text, **options)]
    assert call == "sample"
    return [sampled(result) for result in lm.sample(**options)]


def filled(result: Any) -> dict[str, Any]:
    choice = result.length_choice
    return {
        "text": result.text,
        "seed": result.seed,
        "fills": [span.text for span in result.spans],
        "tokens": [list(span.token_ids) for span in result.spans],
        "log_prob": result.log_prob,
        "log_probs": [list(span.log_probs) for span in result.spans],
        "lengths": None if choice is None else [list(each) for each in choice.lengths],
        "length_log_probs": None if choice is None else list(choice.log_probabilities),
    }


def scored(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "tokens": [list(span.tokens) for span in result.spans],
        "log_prob": result.log_prob,
        "log_probs": [list(span.log_probs) for span in result.spans],
        "candidates": [[candidates(each) for each in span.candidates] for span in result.spans],
    }


def marginal(result: Any) -> dict[str, Any]:
    return {
        "position": [result.position_in_text, result.blank, result.index],
        "candidates": candidates(result.candidates),
    }


def sampled(result: Any) -> dict[str, Any]:
    return {
        "text": result.text,
        "seed": result.seed,
        "tokens": list(result.token_ids),
        "log_prob": result.log_prob,
        "log_probs": list(result.log_probs),
        "ended": result.ended,
        "stopped": result.stopped,
    }


def candidates(likely: Any) -> list[list[Any]]:
    return [[each.text, each.log_prob] for each in likely]


def differences(now: Any, before: Any, where: str = "results") -> list[str]:
    """Return a line for each value that is not the recorded one."""
    if isinstance(now, float) and isinstance(before, float):
        return [] if abs(now - before) <= TOLERANCE else [f"{where} was {before} and is {now}"]
    if isinstance(now, dict) and isinstance(before, dict) and now.keys() == before.keys():
        lines = (differences(now[key], before[key], f"{where}.{key}") for key in now)
        return [line for each in lines for line in each]
    if isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        pairs = enumerate(zip(now, before, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    return [] if now == before else [f"{where} was {before!r} and is {now!r}"]


def record() -> None:
    """Compute the results of every case and write them to the record."""
    lm = tracformer.load("stories")
    cases = [{**case, "results": compute(lm, case)} for case in CASES]
    lines = [json.dumps(_rounded(case), ensure_ascii=False) for case in cases]
    RECORD.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 6) if isinstance(value, float) else value


if __name__ == "__main__":
    record()
