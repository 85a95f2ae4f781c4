"""Fill the same blanks in any order: left to right, random, by confidence, several at once.

    python examples/any_order.py                # a few minutes on a CPU
    python examples/any_order.py --steps 50 --stories 10

In mode `ac` every token that is filled becomes context for the rest, so the order is free. With one
token per step, the log-probability of a fill is exact given its order. Several tokens per step are
drawn independently of each other, which needs fewer passes but loses agreement between them.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from toy_stories import follows_the_rules, write_story

import tracformer
from tracformer import Ancestral, ByConfidence, LeftToRight, RandomOrder
from tracformer.generation.orders import Order
from tracformer.generation.template import write
from tracformer.training.start import start
from tracformer.training.train_config import load_config

ORDERS: dict[str, Order] = {
    "left to right": LeftToRight(),
    "random": RandomOrder(),
    "confident first (probability)": ByConfidence("probability"),
    "confident first (entropy)": ByConfidence("entropy"),
    "confident first (margin)": ByConfidence("margin"),
    "left to right, 4 at once": LeftToRight(4),
    "all above 0.9 at once": ByConfidence("probability", threshold=0.9),
    "diffusion, 8 steps": Ancestral(8),
}


def train(folder: Path, steps: int) -> tracformer.LanguageModel:
    """Train a small model; most words are one token."""
    rng = random.Random(0)
    text = folder / "stories.txt"
    text.write_text("<|endoftext|>".join(" ".join(write_story(rng)) for _ in range(10_000)))
    words = [
        f"data={text}",
        "data.tokenizer=bpe:400",
        "data.rows=records",
        "objective=ac",
        "contexts=uniform",
        f"run={folder / 'run'}",
        f"steps={steps}",
        "optimizer.name=muon",
        "model.d_model=64",
        "model.n_head=2",
        "model.n_layer=6",
        "model.max_length=64",
        "length=64",
    ]
    start(load_config(words, "tiny"))
    return tracformer.load(folder / "run")


def make_blanks(rng: random.Random, lm: tracformer.LanguageModel) -> str:
    """Return a story with three blanks of three words each."""
    words = write_story(rng)
    starts = sorted(rng.sample(range(1, len(words) - 4, 6), 3))
    pieces, contents, at = [], [], 0
    for first in starts:
        pieces.append(("" if at == 0 else " ") + " ".join(words[at:first]) + " ")
        contents.append(str(len(lm.tokenizer.encode(" " + " ".join(words[first : first + 3])))))
        at = first + 3
    return write([*pieces, " " + " ".join(words[at:])], contents)


def compare(lm: tracformer.LanguageModel, stories: int) -> dict[str, tuple[float, float]]:
    """Return two figures for each order, and print them.

    They are the mean log-probability per token given the order, and the share of stories that keep
    every agreement.
    """
    rng = random.Random(1)
    blanks = [make_blanks(rng, lm) for _ in range(stories)]
    print(f"\n{'order':<30} log p per token  stories that agree")
    outcome = {}
    for name, order in ORDERS.items():
        filled = [results[0] for results in lm.infill(blanks, mode="ac", order=order, seed=7)]
        tokens = sum(len(span.token_ids) for each in filled for span in each.spans)
        mean = sum(each.log_prob for each in filled) / tokens
        agree = sum(follows_the_rules(each.text.split()) for each in filled) / stories
        print(f"{name:<30} {mean:>15.3f}  {agree:>18.0%}")
        outcome[name] = (mean, agree)
    return outcome


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model and compare the orders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=600,
        help="training steps of 32 stories each (default: %(default)s)",
    )
    parser.add_argument(
        "--stories",
        type=int,
        default=40,
        help="number of stories to fill in each order (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        compare(train(Path(folder), options.steps), options.stories)


if __name__ == "__main__":
    main()
