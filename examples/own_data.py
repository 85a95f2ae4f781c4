"""Train on your own data: from a FASTA file to filled gaps.

    python examples/own_data.py                 # a few minutes on a CPU
    python examples/own_data.py --fasta my.fasta --steps 2000

Without --fasta it writes a file of minisatellites: a random unit of nine bases, repeated five
times, with a few misread bases. What is missing in one copy can be read in the others, on either
side, so the fills can be checked.

The same from the command line:

    tracformer prepare my.fasta --tokenizer dna --out data/my
    tracformer train tiny data=data/my data.rows=records run=runs/my
    tracformer infill -m runs/my 'ACGTTGCAAACGT[[5]]AACGTTGCAA'
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tracformer
from tracformer import prepare
from tracformer.training.start import start
from tracformer.training.train_config import load_config

UNIT, COPIES, MISREAD = 9, 5, 0.01


def write_fasta(path: Path, records: int, rng: random.Random) -> None:
    """Write random minisatellites as FASTA records."""
    path.write_text("".join(f">minisatellite {number}\n{draw(rng)}\n" for number in range(records)))


def draw(rng: random.Random) -> str:
    """Return a random minisatellite."""
    unit = "".join(rng.choices("ACGT", k=UNIT))
    return "".join(rng.choice("ACGT") if rng.random() < MISREAD else base for base in unit * COPIES)


def train(fasta: Path, folder: Path, steps: int) -> tracformer.LanguageModel:
    """Prepare the file and train a small model."""
    prepare(folder / "data", fasta, "dna")
    words = [
        f"data={folder / 'data'}",
        "data.rows=records",
        f"run={folder / 'run'}",
        f"steps={steps}",
        "model.d_model=64",
        "model.n_head=2",
        "model.n_layer=6",
        "model.max_length=64",
        "length=64",
    ]
    start(load_config(words, "tiny"))
    return tracformer.load(folder / "run")


def check(lm: tracformer.LanguageModel, records: int) -> float:
    """Return the share of removed bases that the model restores."""
    rng = random.Random(1)
    whole = [draw(rng) for _ in range(records)]
    starts = [rng.randrange(1, UNIT * COPIES - 6) for _ in whole]
    blanks = [f"{dna[:at]}[[5]]{dna[at + 5 :]}" for dna, at in zip(whole, starts, strict=True)]
    filled = [results[0] for results in lm.infill(blanks, seed=1)]
    right = 0
    for number, (dna, at, result) in enumerate(zip(whole, starts, filled, strict=True)):
        bases = result.spans[0].text
        right += sum(a == b for a, b in zip(bases, dna[at : at + 5], strict=True))
        if number < 3:
            print(
                f"\n  {blanks[number]}\n  {result.text}\n  filled {bases}, was {dna[at : at + 5]}; "
                f"log-probability {result.log_prob:.2f}"
            )
    return right / (5 * records)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model and fill gaps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fasta", help="your own file (default: generated sequences)")
    parser.add_argument(
        "--steps",
        type=int,
        default=150,
        help="training steps of 32 records each (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        fasta = Path(options.fasta) if options.fasta else folder / "minisatellites.fasta"
        if not options.fasta:
            write_fasta(fasta, 2000, random.Random(0))
        lm = train(fasta, folder, options.steps)
        if options.fasta:
            [result] = lm.sample()
            print(f"\nA sequence like yours: {result.text}")
        else:
            print(f"\n{check(lm, 100):.0%} of the removed bases came back (25% by chance).")


if __name__ == "__main__":
    main()
