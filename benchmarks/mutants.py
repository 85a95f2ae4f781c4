"""Score multiple mutants where the truth is known: the joint beside the sum of single mutants.

    python -m benchmarks.mutants --steps 1000

A Tracformer of 0.6M parameters learns the exact source `hmm-16` (minutes on one core). In sequences
of the source, 1, 2 or 3 neighbouring symbols are replaced at random. The true log ratio of each
mutant is known. The table compares with it the model's joint, the model's sum of singles, and the
sum of the true singles, which is the best that any sum of singles can be.
"""

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks.take_off import SOURCE, STEPS, small_model, train
from tracformer.evaluation.exact_sources import ExactSource, find_source, log_joint
from tracformer.model import ConditionalModel
from tracformer.proteins.mutants import log_probs

MUTANTS = 400  # of each number of sites
Places = tuple[int, ...]


def draw(
    source: ExactSource, sites: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, list[Places]]:
    """Return wild types, mutants, and the places where they differ."""
    wild = source.sample(MUTANTS, rng)
    mutants, places = wild.copy(), []
    for number, start in enumerate(rng.integers(source.length - sites + 1, size=MUTANTS)):
        at = tuple(range(start, start + sites))
        shift = rng.integers(1, source.symbols, size=sites)
        mutants[number, list(at)] = (wild[number, list(at)] + shift) % source.symbols
        places.append(at)
    return wild, mutants, places


def true_log_probs(source: ExactSource, rows: np.ndarray, hidden: Sequence[Places]) -> np.ndarray:
    """Return log p(symbols at the hidden places | the others), (N,)."""
    context = np.ones(rows.shape, dtype=bool)
    for number, places in enumerate(hidden):
        context[number, list(places)] = False
    return log_joint(source, rows, context)


def ratios(
    score: "Score", wild: np.ndarray, mutants: np.ndarray, places: list[Places], singles: bool
) -> np.ndarray:
    """Return the log ratio of each mutant, or the sum of the log ratios of its single mutants."""
    if not singles:
        return score(mutants, places) - score(wild, places)
    total = np.zeros(len(wild))
    for i in range(len(places[0])):
        one = [(at[i],) for at in places]
        changed = wild.copy()
        for number, (place,) in enumerate(one):
            changed[number, place] = mutants[number, place]
        total += score(changed, one) - score(wild, one)
    return total


class Score:
    """Log-probabilities of hidden places under the source, or under a model."""

    def __init__(self, source: ExactSource, model: ConditionalModel | None = None) -> None:
        self.source, self.model = source, model

    def __call__(self, rows: np.ndarray, hidden: Sequence[Places]) -> np.ndarray:
        if self.model is None:
            return true_log_probs(self.source, rows, hidden)
        return np.array(log_probs(self.model, rows.tolist(), hidden, "car", 64))


def main() -> None:
    """Train, score and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps")
    steps = parser.parse_args().steps
    source = find_source(SOURCE)
    model = small_model("tracformer-car", source)
    train(model, source, "car", steps)
    model.eval()
    rng = np.random.default_rng(2)
    print(f"{'sites':<6}{'method':<24}{'Spearman':>9}{'RMSE (nats)':>13}")
    for sites in (1, 2, 3):
        drawn = draw(source, sites, rng)
        truth = ratios(Score(source), *drawn, singles=False)
        for name, asked, singles in (
            ("model, joint", model, False),
            ("model, sum of singles", model, True),
            ("truth, sum of singles", None, True),
        ):
            found = ratios(Score(source, asked), *drawn, singles=singles)
            rho = float(spearmanr(found, truth).statistic)
            error = float(np.sqrt(np.mean((found - truth) ** 2)))
            print(f"{sites:<6}{name:<24}{rho:>9.3f}{error:>13.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
