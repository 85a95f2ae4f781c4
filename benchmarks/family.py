"""Likelihood of a family's held-out sequences: Tracformer, a profile, a profile HMM and arDCA.

    tracformer prepare PF00595.fasta --identity 0.6 --distinct --tokenizer protein-aligned \\
        --out data/pdz
    tracformer train protein-family data=data/pdz run=runs/pdz
    python -m benchmarks.family data/pdz --model runs/pdz --split test

All systems learn from the distinct training rows that use the 20 amino acids alone, weighted by
1/neighbours at 80% identity (HMMER has its own weights), and are evaluated on the distinct held-out
rows. Three figures, lower is better:

- nats per column, and its exponential, the perplexity: the joint of a whole row, gaps included.
- nats per residue: the same total over the number of residues.
- one hidden: perplexity of one residue given all other columns, which is what scores mutants.
"""

import argparse
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tracformer import LanguageModel, load
from tracformer.data.alignment import GAP, as_rows, sequence_weights
from tracformer.evaluation.domains import as_indices, core_profile
from tracformer.proteins.mutants import log_probs
from tracformer.proteins.rivals import LETTERS, FamilyRows, fit_ardca, letter_shares, numbered
from tracformer.proteins.wild_type import build_hmm, family_columns

Places = tuple[int, ...]
Floats = NDArray[np.float64]
Joint = Callable[[Sequence[str]], Floats]  # log-probabilities of whole rows
ASKED = 4  # residues of each row that are hidden one by one


def distinct_rows(folder: str, split: str) -> list[str]:
    """Return the distinct rows of a split that use the 20 amino acids and gaps alone."""
    rows = dict.fromkeys(family_columns(folder, split))
    return [row for row in rows if not set(row) - set(LETTERS)]


def hidden_places(rows: Sequence[str]) -> list[Places]:
    """Return for each row the columns of some of its residues, drawn by its number."""
    found = []
    for number, row in enumerate(rows):
        rng = np.random.default_rng([0, number])
        residues = [i for i, letter in enumerate(row) if letter != GAP]
        found.append(tuple(rng.choice(residues, size=ASKED, replace=False).tolist()))
    return found


def one_hidden_by_joint(joint: Joint, rows: Sequence[str], places: Sequence[Places]) -> Floats:
    """Return log p(residue | all other columns) of each place, from joints of all 21 letters."""
    asked = [(row, place) for row, at in zip(rows, places, strict=True) for place in at]
    changed = [row[:i] + letter + row[i + 1 :] for row, i in asked for letter in LETTERS]
    totals = joint(changed).reshape(len(asked), len(LETTERS))
    own = totals[np.arange(len(asked)), [LETTERS.index(row[i]) for row, i in asked]]
    return own - np.logaddexp.reduce(totals, axis=1)


def by_model(lm: LanguageModel, rows: Sequence[str], hidden: Sequence[Places]) -> Floats:
    """Return log p(letters at the hidden places | the others) of each row under a Tracformer."""
    tokens = [lm.tokenizer.encode(row) for row in rows]
    return np.array(log_probs(lm.model, tokens, hidden, "car", 64))


def rivals(training: Sequence[str]) -> dict[str, Joint]:
    """Return the joints of a profile and of arDCA, fitted to training rows."""
    family = FamilyRows(list(training), sequence_weights(as_rows(list(training))))
    shares = np.log(letter_shares(family.letters, family.weights, len(LETTERS)))
    ardca = fit_ardca(family.letters, family.weights, len(LETTERS))

    def profile(rows: Sequence[str]) -> Floats:
        return np.asarray(shares[np.arange(len(shares)), numbered(rows)].sum(1))

    return {"profile": profile, "arDCA": lambda rows: ardca.log_prob(numbered(rows))}


def hmm_per_residue(training: Sequence[str], rows: Sequence[str]) -> float:
    """Return nats per residue of a profile HMM, which reads the residues without gaps."""
    hmm = core_profile(build_hmm(training, effective_number="none"))
    sequences = [row.replace(GAP, "") for row in rows]
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    total = 0.0
    for start in range(0, len(rows), 64):
        some, size = sequences[start : start + 64], lengths[start : start + 64]
        total -= float(hmm.log_prob(as_indices(some, int(size.max())), size).sum())
    return total / int(lengths.sum())


def main() -> None:
    """Fit, score and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="folder of `tracformer prepare`")
    parser.add_argument("--model", action="append", default=[], help="trained model; repeatable")
    parser.add_argument("--split", default="validation", help="validation or test")
    arguments = parser.parse_args()
    rows, training = (distinct_rows(arguments.data, s) for s in (arguments.split, "train"))
    places = hidden_places(rows)
    columns = len(rows[0])
    residues = sum(len(row.replace(GAP, "")) for row in rows)
    found: dict[str, tuple[Floats, Floats]] = {}
    for name in arguments.model:
        lm = load(name)
        whole = by_model(lm, rows, [tuple(range(columns))] * len(rows))
        repeated = [row for row in rows for _ in range(ASKED)]
        found[name] = whole, by_model(lm, repeated, [(i,) for at in places for i in at])
    if len(found) > 1:  # the mean of their probabilities
        joint, single = (np.stack(each) for each in zip(*found.values(), strict=True))
        found[f"mean of {len(found)}"] = tuple(
            np.logaddexp.reduce(each, axis=0) - math.log(len(each)) for each in (joint, single)
        )
    for name, score in rivals(training).items():
        found[name] = score(rows), one_hidden_by_joint(score, rows, places)
    print(f"{len(training)} training rows, {len(rows)} {arguments.split} rows, {columns} columns")
    print(
        f"{'system':<24}{'nats/column':>12}{'perplexity':>12}{'nats/residue':>14}{'one hidden':>12}"
    )
    for name, (joint, single) in found.items():
        nats = -joint.sum() / (len(rows) * columns)
        print(
            f"{name:<24}{nats:>14.4f}{math.exp(nats):>14.3f}{-joint.sum() / residues:>14.4f}"
            f"{math.exp(-single.mean()):>14.3f}"
        )
    print(f"{'HMM, residues alone':<24}{'':>28}{hmm_per_residue(training, rows):>14.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
