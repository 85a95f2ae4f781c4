"""Fill blanks in short stories with the bundled model: no training, no download, a few seconds.

python examples/fill_stories.py
python examples/fill_stories.py --seed 7 "Tom lost his [[1-3]]. He cried until [[4-10]]."
"""

import argparse
import time
from collections.abc import Sequence

import tracformer

TEXTS = (
    "Anna and her grandma baked [[3]]. It smelled so good that everyone wanted a piece.",
    "Tom saw a big red ball in the park. [[8-14]] Then they played together all day and became "
    "best friends.",
    "The dog was hungry. It looked for [[]] and then it fell asleep.",
    "Mia was sad because [[]]. Her mom gave her a hug.",
    "Ben and his dad went [[]]. They caught a big fish and took it home.",
)
ENDS = ("was afraid of the dark.", "could fly very high in the sky.", "loved to swim in the pond.")


def main(argv: Sequence[str] | None = None) -> None:
    """Fill the given texts, or show what the model can do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="text with blanks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    lm = tracformer.load("stories")
    texts, start = arguments.texts or TEXTS, time.perf_counter()
    for text in texts:
        [result] = lm.infill(text, seed=arguments.seed)
        print(f"{text}\n  {result.text}    log p = {result.log_prob:.1f}\n")
    print(f"{len(texts)} texts filled in {time.perf_counter() - start:.1f} s\n")
    if arguments.texts:
        return
    print("The text after a blank matters: the same beginning with three endings.")
    for end in ENDS:
        [result] = lm.infill(f"Once upon a time, there was a [[3]] who {end}", seed=arguments.seed)
        print(f"  {result.text}")
    print("\nHow probable is a word, given the text on both sides?")
    for word in ("played", "slept"):
        scored = lm.score(f"Sam and Mia went to the park with a ball. They [[{word}]] together.")
        print(f"  {word:8} log p = {scored.log_prob:.2f}")
    print("\nMore: tracformer infill --help, tracformer score --help, tracformer serve --help")


if __name__ == "__main__":
    main()
