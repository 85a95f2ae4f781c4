"""Train on generated stories; then fill blanks, score words, list candidates, choose lengths.

    python examples/infill_text.py                       # a few minutes on a CPU
    python examples/infill_text.py --steps 50 --run runs/stories

The same from the command line:

    tracformer train tiny data=stories.txt data.rows=records data.tokenizer=bpe:400 run=runs/stories
    tracformer infill -m runs/stories 'Mia carried the [[2]] to the market .'
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from toy_stories import write_story

import tracformer
from tracformer.training.start import start
from tracformer.training.train_config import load_config

STORY = (
    "Mia carried the {thing} to the market , where the old men from the island sing all day . "
    "in the evening {who} sold the blue lamp to a king , and the men thanked her ."
)


def train(folder: Path, steps: int) -> tracformer.LanguageModel:
    """Train a small model for every mode on ten thousand stories."""
    rng = random.Random(0)
    text = folder / "stories.txt"
    text.write_text("<|endoftext|>".join(" ".join(write_story(rng)) for _ in range(10_000)))
    words = [
        f"data={text}",
        "data.tokenizer=bpe:400",
        "data.rows=records",
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


def show(lm: tracformer.LanguageModel) -> None:
    """Print what the model answers."""
    blank = STORY.format(thing="[[2]]", who="[[1]]")
    print(f"\n{blank}")
    for filled in lm.infill(blank, 3, seed=1):
        print(
            f"  {' ... '.join(span.text.strip() for span in filled.spans)}: log-probability "
            f"{filled.log_prob:.2f}, exactly"
        )

    print("\nThe true words, and wrong ones:")
    for thing, who in (("blue lamp", "she"), ("red boat", "he")):
        scored = lm.score(STORY.format(thing=f"[[{thing}]]", who=f"[[{who}]]"))
        print(
            f"  {thing}, {who}: log-probability {scored.log_prob:.2f} ({scored.kind}), "
            f"{scored.bits_per_byte:.2f} bits per byte"
        )

    print("\nCandidates for each position, given the rest of the text only:")
    for marginal in lm.marginals(blank, top=3):
        print(
            "  "
            + ", ".join(
                f"{candidate.text.strip()!r} {candidate.probability:.2f}"
                for candidate in marginal.candidates
            )
        )

    [filled] = lm.infill(STORY.format(thing="[[1-4]]", who="she"), lengths="rank")
    choice = filled.length_choice
    assert choice is not None
    print("\nHow long is the first blank?")
    for lengths, probability in zip(choice.lengths, choice.probabilities, strict=True):
        print(f"  {lengths[0]} tokens: {probability:.3f}")
    print(f"  chosen: {filled.spans[0].text.strip()!r}")

    [story] = lm.sample(prompt="Tom carried", seed=3)
    print(f"\nA whole story:\n  {story.text}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model and show what it answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=600,
        help="training steps of 32 stories each (default: %(default)s)",
    )
    parser.add_argument("--run", help="folder to train in and keep (default: a temporary one)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.run or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        show(train(folder, options.steps))


if __name__ == "__main__":
    main()
