"""Train on DNA and fill gaps in it, in a few minutes on a CPU.

    python examples/own_data.py

The data are generated: a random unit of nine bases, repeated five times, with a few misread bases.
What is missing in one copy can be read in the others, on either side, so fills can be checked.

For your own file, from the command line:

    tracformer train my.fasta --minutes 10
    tracformer infill -m runs/my 'ACGTTGCAAACGT[[5]]AACGTTGCAA'
"""

import random
import tempfile
from pathlib import Path

import tracformer
from tracformer.training.train_config import load_config

UNIT, COPIES, MISREAD, GAP = 9, 5, 0.01, 5
RNG = random.Random(0)


def draw() -> str:
    """Return a random sequence of repeats."""
    unit = "".join(RNG.choices("ACGT", k=UNIT))
    return "".join(RNG.choice("ACGT") if RNG.random() < MISREAD else base for base in unit * COPIES)


def train(folder: Path, steps: int) -> tracformer.LanguageModel:
    """Write sequences as FASTA, and train a small model on them."""
    fasta = folder / "repeats.fasta"
    fasta.write_text("".join(f">repeat {number}\n{draw()}\n" for number in range(2000)))
    words = [f"data={fasta}", f"run={folder / 'run'}", f"steps={steps}", "length=64"]
    size = ["model.d_model=64", "model.n_head=2", "model.n_layer=6", "model.max_length=64"]
    tracformer.train(load_config([*words, *size, "data.rows=records"], "tiny"))
    return tracformer.load(folder / "run")


def check(lm: tracformer.LanguageModel, sequences: int) -> float:
    """Return the share of removed bases that the model restores."""
    right = 0
    for number in range(sequences):
        dna, at = draw(), RNG.randrange(1, UNIT * COPIES - GAP - 1)
        [result] = lm.infill(f"{dna[:at]}[[{GAP}]]{dna[at + GAP :]}", seed=number)
        right += sum(a == b for a, b in zip(result.text, dna, strict=True)) - (len(dna) - GAP)
    return right / (GAP * sequences)


def main(steps: int = 150, sequences: int = 100) -> None:
    """Train a model and fill gaps."""
    with tempfile.TemporaryDirectory() as folder:
        lm = train(Path(folder), steps)
        print(f"{check(lm, sequences):.0%} of the removed bases came back (25% by chance).")


if __name__ == "__main__":
    main()
