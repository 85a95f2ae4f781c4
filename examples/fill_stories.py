"""Fill blanks in short stories with the bundled model: no training, no download, a few seconds.

python examples/fill_stories.py
python examples/fill_stories.py --seed 7 "Tom lost his [[1-3]]. He cried until [[4-10]]."
"""

import argparse
from collections.abc import Sequence

import tracformer
from tracformer import Infilled

TEXTS = (
    "Once upon a time, there was a little girl named Lily. She wanted to [[6]], but the rain would "
    "not stop. So she stayed at home.",
    "Tom saw a big red ball in the park. [[8-14]] Then they played together all day and became "
    "best friends.",
    "The dog was hungry. It looked for [[]] and then it fell asleep.",
    "Mia was sad because [[]]. Her mom gave her a hug.",
)
ENDS = ("was afraid of the dark.", "could fly very high in the sky.", "loved to swim in the pond.")


def brackets(result: Infilled) -> str:
    """Return the text with each fill in brackets."""
    text, last = "", 0
    for span in result.spans:
        text += f"{result.text[last : span.start]}[{span.text}]"
        last = span.stop
    return text + result.text[last:]


def main(argv: Sequence[str] | None = None) -> None:
    """Fill the given texts, or show what the model can do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="text with blanks")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    lm = tracformer.load("stories")
    for text in arguments.texts or TEXTS:
        [result] = lm.infill(text, seed=arguments.seed)
        print(f"{text}\n  {brackets(result)}    log p = {result.log_prob:.1f}\n")
    if arguments.texts:
        return
    print("The text after a blank matters: the same beginning with three endings.")
    for end in ENDS:
        [result] = lm.infill(f"Once upon a time, there was a [[3]] who {end}", seed=arguments.seed)
        print(f"  {brackets(result)}")
    print("\nHow probable is a word, given the text on both sides?")
    for word in ("played", "slept"):
        scored = lm.score(f"Sam and Mia went to the park with a ball. They [[{word}]] together.")
        print(f"  {word:8} log p = {scored.log_prob:.2f}")
    print("\nMore: tracformer infill --help, tracformer score --help, tracformer serve --help")


if __name__ == "__main__":
    main()
