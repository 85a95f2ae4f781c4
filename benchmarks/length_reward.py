"""Tune the reward by which quality `best` ranks fills of unknown length.

    python -m benchmarks.length_reward stories --data held-out.txt

Stories of the first half of the held-out text get a hole of 3 to 16 tokens. Candidates of many
lengths are made once; for each reward the best of them all is chosen, and the table shows by how
many tokens it is longer than the hole. `benchmarks.fluency` measures the second half.
"""

import argparse
from pathlib import Path

import numpy as np

import tracformer
from benchmarks.fluency import cut, stories_of
from tracformer import LanguageModel
from tracformer.devices import keep_freed_memory
from tracformer.generation.ranking import length_reward
from tracformer.generation.template import Template
from tracformer.progress import track

LENGTHS = (1, 2, 3, 5, 7, 9, 12, 15, 18, 22)  # of candidates
HOLES = (3, 5, 8, 12, 16)
LONGEST = 170  # tokens of a story
POWERS = (0.5, 0.7, 0.85, 1.0)


def best_scores(lm: LanguageModel, before: str, after: str, seed: int) -> dict[int, float]:
    """Return the best score of each length, without its reward."""
    scores = {}
    for length in LENGTHS:
        template = Template((before, after), (str(length),))
        options = {"quality": "best", "best_of": 4, "search": "beam:12", "seed": seed}
        [result] = lm.infill(template, **options)
        assert result.score is not None
        scores[length] = result.score - length_reward([length], twice=True)
    return scores


def errors(
    scores: list[dict[int, float]], holes: list[int], factor: float, power: float
) -> np.ndarray:
    """Return by how many tokens the fill of each story is longer than its hole."""
    chosen = [max(each, key=lambda n: each[n] + factor * n**power) for each in scores]
    return np.array(chosen) - np.array(holes)


def main() -> None:
    """Print the errors without a reward, and for each power those of its best factor."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="held-out stories")
    parser.add_argument("--stories", type=int, default=60)
    arguments = parser.parse_args()
    keep_freed_memory()
    lm = tracformer.load(arguments.model)
    first, _ = stories_of(arguments.data)
    short = [story for story in first if len(lm.tokenizer.encode(story)) <= LONGEST]
    found = [
        (hole, size)
        for number, story in enumerate(short)
        for size in [HOLES[number % len(HOLES)]]
        for hole in cut(lm, [story], [False], 1, number, size)
    ][: arguments.stories]
    scores = [
        best_scores(lm, hole.before, hole.after, number)
        for number, (hole, _) in enumerate(track(found, "candidates"))
    ]
    sizes = [size for _, size in found]
    print(f"{len(found)} stories\n\n| reward of L tokens | mean error | mean absolute error |")
    print("|---|---|---|")
    for power in (0.0, *POWERS):
        factors = np.arange(0, 8, 0.1) if power else [0.0]
        factor = min(factors, key=lambda x: abs(errors(scores, sizes, x, power).mean()))
        error = errors(scores, sizes, factor, power)
        name = f"{factor:.1f} L^{power:g}" if power else "none"
        print(f"| {name} | {error.mean():+.1f} | {abs(error).mean():.1f} |")


if __name__ == "__main__":
    main()
