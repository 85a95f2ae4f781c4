"""Fill blanks with SmolLM2-135M: what the layout is worth, against rivals on the same holes.

    python benchmarks/any_lm.py data wikipedia.txt stories.txt --out runs/any-lm/data

`data` writes train.jsonl, validation.jsonl and test.jsonl, one article or story per line. Of each
20 articles in a row one is held out, in turn for validation and for test.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tracformer.files import write_atomically

HELD_OUT = 20  # one of so many documents
TITLE = re.compile(r"^= [^=].*[^=] =$")


def documents(path: Path) -> Iterator[str]:
    """Yield the articles of a file with lines `= Title =`, or its parts between <|endoftext|>."""
    text = path.read_text()
    if "<|endoftext|>" in text:
        yield from (part.strip() for part in text.split("<|endoftext|>") if part.strip())
        return
    lines: list[str] = []
    for line in text.splitlines():
        if TITLE.match(line) and lines:
            yield "\n".join(lines)
            lines = []
        elif line.strip() and not TITLE.match(line):
            lines.append(line)
    if lines:
        yield "\n".join(lines)


def write_data(files: list[Path], out: Path) -> None:
    """Divide the documents of all files into training, validation and test data."""
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for path in files:
        for number, text in enumerate(documents(path)):
            held = ("validation", "test")[number // HELD_OUT % 2]
            parts["train" if number % HELD_OUT else held].append(text)
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        write_atomically(out / f"{name}.jsonl", lines)
        print(f"{name}: {len(texts):,} documents, {sum(map(len, texts)):,} characters")


def main() -> None:
    """Run one part of the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    data = parts.add_parser("data", help="divide documents into training, validation and test data")
    data.add_argument("files", nargs="+", type=Path)
    data.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.part == "data":
        write_data(arguments.files, arguments.out)


if __name__ == "__main__":
    main()
