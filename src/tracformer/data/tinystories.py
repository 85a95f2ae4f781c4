"""TinyStories (Eldan and Li, 2023): short stories in simple words, and its held-out stories.

    tracformer prepare tinystories --from FOLDER --tokenizer bpe:2048 --out data/stories

FOLDER/tinystories has text files whose names contain `train` (stories that end in <|endoftext|>;
machine-written stories may be among them), and one or more whose names contain `valid`. The latter
give two splits, `validation` and `test`:

1. The text is cut into stories, at <|endoftext|> if it has any. A text without separators is cut
   before each paragraph that looks like the beginning of a story (`OPENING`); text before the first
   is left out. Of the 7,040 stories of the published training text 88% begin like this, and 8% of
   such paragraphs do not begin a story.
2. Paragraphs are joined by one newline, as in the training text.
3. A story that begins before the middle of the text is for `validation`, others for `test`.
4. Stories that share SHARED consecutive words with the training text, ignoring case and
   punctuation, are removed. Many share only an opening ("Once upon a time there was a little girl
   named Lily. She"); they are removed too.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tracformer.data.documents import TextPiece, as_pieces, by_separator
from tracformer.data.input_files import read_text
from tracformer.data.tokenizer import EOT

NAME = "tinystories"
SHARED = 12  # words
HALVES = {"validation": 0, "test": 1}
OPENING = re.compile(
    r"""Once\b
    | One\ (?:sunny\ |bright\ )?(?:day|morning|night),?\ (?:a|an|there|two|three)\b
    | [A-Z]\w+\ and\ [A-Z]?\w+\ (?:are|were|like|liked|love|loved)\b""",
    re.VERBOSE,
)
WORD = re.compile(r"[\w']+")


@dataclass(frozen=True)
class HeldOutStories:
    """One half of the held-out stories, without those that share text with the training stories.

    Attributes:
        held_out: Files of held-out stories.
        training: Files of training stories.
        split: "validation" or "test".
    """

    held_out: tuple[Path, ...]
    training: tuple[Path, ...]
    split: str

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that the content of the split depends on."""
        return (*self.held_out, *self.training)

    def pieces(self) -> Iterator[TextPiece]:
        """Yield the stories."""
        halves = unseen_stories(self.held_out, self.training)
        for number, story in enumerate(halves[HALVES[self.split]], 1):
            yield from as_pieces(story, f"{self.held_out[0]}, {self.split} story {number}")

    def describe(self) -> dict[str, Any]:
        """Return the files and the rules, for the manifest."""
        files = [{"name": path.name, "bytes": path.stat().st_size} for path in self.files]
        return {"files": files, "half": HALVES[self.split], "shared_words": SHARED, "rule": 1}

    def size(self) -> int | None:
        """Return None: the size is not known."""
        return None


@lru_cache(maxsize=1)
def unseen_stories(
    held_out: tuple[Path, ...], training: tuple[Path, ...]
) -> tuple[list[str], list[str]]:
    """Return the stories of both halves that share no SHARED consecutive words with training."""
    text = "\n".join("".join(read_text(path)) for path in held_out)
    halves: tuple[list[str], list[str]] = ([], [])
    for start, story in split_stories(text):
        halves[start >= len(text) / 2].append(story)
    known = {run for half in halves for story in half for run in _runs(words_of(story))}
    seen: set[tuple[str, ...]] = set()
    for path in training:
        for story in _documents(path):
            seen.update(run for run in _runs(words_of(story)) if run in known)
    first, second = (
        [story for story in half if seen.isdisjoint(_runs(words_of(story)))] for half in halves
    )
    if not first or not second:
        raise ValueError(
            f"{held_out[0]}: only {len(first)} and {len(second)} stories of its halves share no "
            f"{SHARED} consecutive words with the training text; use held-out stories that are not "
            "in the training text"
        )
    return first, second


def split_stories(text: str) -> list[tuple[int, str]]:
    r"""Return the stories of a text, each with the offset at which it begins.

    >>> text = "left it.\n\nOnce upon a time, a cat ran.\n\nIt sat.\n\nOne day, a dog ran."
    >>> [story for _, story in split_stories(text)]
    ['Once upon a time, a cat ran.\nIt sat.', 'One day, a dog ran.']
    """
    places = [0]
    if EOT in text:
        places += [found.end() for found in re.finditer(re.escape(EOT), text)]
    else:
        lines = re.finditer(r"^.*\S.*$", text, re.MULTILINE)
        places = [line.start() for line in lines if OPENING.match(line[0].strip())]
    stories = []
    for start, stop in pairwise([*places, len(text)]):
        paragraphs = (line.strip() for line in text[start:stop].replace(EOT, "").splitlines())
        if story := "\n".join(filter(None, paragraphs)):
            stories.append((start, story))
    return stories


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return WORD.findall(text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(SHARED)), strict=False)


def _documents(path: Path) -> Iterator[str]:
    parts: list[str] = []
    for piece in by_separator(read_text(path), str(path), EOT):
        parts.append(piece.text)
        if piece.end:
            yield "".join(parts)
            parts.clear()
