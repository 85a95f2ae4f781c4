"""Tune the reward by which quality `best` ranks fills of unknown length.

    python -m benchmarks.length_reward stories --data held-out.txt --train train.txt more.txt \\
        --json scores.json

Held-out stories that `benchmarks.fluency` leaves out, because they share 12 words in a row with the
training text, get a hole of 3 to 16 tokens. Candidates of many lengths are made once; for each
reward the best of them all is chosen, and the table shows by how many tokens it is longer than the
hole, with 95% intervals over stories. The scores are written to the file as they are found, and a
run that was stopped continues there.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import tracformer
from benchmarks.fluency import Hole, cut, divide, shown, texts_of
from tracformer import LanguageModel
from tracformer.devices import keep_freed_memory
from tracformer.files import write_atomically
from tracformer.generation.ranking import LENGTH_POWER, LENGTH_REWARD, length_reward
from tracformer.generation.template import Template
from tracformer.progress import track

LENGTHS = (1, 2, 3, 5, 7, 9, 12, 15, 18, 22)  # of candidates
HOLES = (3, 5, 8, 12, 16)
POWERS = (0.5, 0.7, 0.85, 1.0)


def best_scores(lm: LanguageModel, hole: Hole, seed: int) -> dict[int, float]:
    """Return the best score of each length, without its reward."""
    scores = {}
    for length in LENGTHS:
        template = Template((hole.before, hole.after), (str(length),))
        options = {"quality": "best", "best_of": 4, "search": "beam:12", "seed": seed}
        [result] = lm.infill(template, whole=hole.whole, **options)
        assert result.score is not None
        scores[length] = result.score - length_reward([length], twice=True)
    return scores


def errors(rows: list[dict[str, Any]], factor: float, power: float) -> np.ndarray:
    """Return by how many tokens the fill of each story is longer than its hole."""
    chosen = [
        max(LENGTHS, key=lambda n, scores=row["scores"]: scores[str(n)] + factor * n**power)
        for row in rows
    ]
    return np.array(chosen) - np.array([row["size"] for row in rows])


def table(rows: list[dict[str, Any]]) -> str:
    """Return the errors without a reward, with the present one, and for each power the factor
    with the smallest mean error.
    """
    lines = [
        f"{len(rows)} stories\n",
        "| reward of L tokens | mean error | mean absolute error | mean error in holes of "
        f"{', '.join(map(str, HOLES))} |",
        "|---|---|---|---|",
    ]
    rewards = [("none: ", 0.0, 1.0), ("present: ", LENGTH_REWARD, LENGTH_POWER)]
    for power in POWERS:
        factor = min(np.arange(0, 8, 0.1), key=lambda x: abs(errors(rows, x, power).mean()))
        rewards.append(("", float(factor), power))
    for name, factor, power in rewards:
        error = errors(rows, factor, power)
        each = [error[[row["size"] == size for row in rows]].mean() for size in HOLES]
        lines.append(
            f"| {name}{factor:.1f} L^{power:g} | {shown(error)} | {abs(error).mean():.1f} | "
            f"{', '.join(f'{value:+.1f}' for value in each)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="held-out stories")
    parser.add_argument("--train", type=Path, nargs="+", required=True, help="training texts")
    parser.add_argument("--stories", type=int, default=300)
    parser.add_argument("--json", type=Path, required=True, help="file of the scores")
    arguments = parser.parse_args()
    keep_freed_memory()
    lm = tracformer.load(arguments.model)
    texts = texts_of(lm, arguments.data)
    room = lm.model.config.max_length - max(LENGTHS)  # for the text with the longest candidate
    fit = [
        number
        for number in divide(texts, arguments.train).seen
        if len(lm.tokenizer.encode(texts[number].text)) < room
    ]
    holes = [
        (Hole.at(texts, place), size)
        for i, number in enumerate(fit)
        for size in [HOLES[i % len(HOLES)]]
        for place in cut(lm, texts, [number], number, size)
    ][: arguments.stories]
    path = arguments.json
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for number in track(range(len(rows), len(holes)), "candidates"):
        hole, size = holes[number]
        scores = best_scores(lm, hole, number)
        rows.append({"size": size, "scores": {str(n): value for n, value in scores.items()}})
        write_atomically(path, json.dumps(rows) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
