"""What is printed: shading, JSON lines, and a live canvas.

What a command prints: texts with their fills shaded by probability on a terminal, plain text
elsewhere.

Each shade sets both foreground and background, so it reads the same on dark and on light terminals;
light blue is sure, orange is a guess.

A filling while it happens: written from left to right, or redrawn in place where tokens come in any
order.
"""

import argparse
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from tracformer.generation.results import Token

if TYPE_CHECKING:
    from tracformer.generation.results import Span


# least probability, colour of the 256-colour palette
SHADES = ((0.75, 153), (0.5, 189), (0.25, 230), (0.05, 223), (0.0, 215))
RESET = "\033[0m"
DIM = "\033[2m"


def add_output(parser: argparse.ArgumentParser, fills: bool = True) -> None:
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line, with every number"
    )
    parser.add_argument(
        "--no-color",
        action="store_true",
        help="no colour, even on a terminal (so does the variable NO_COLOR)",
    )
    if fills:
        parser.add_argument("--marks", action="store_true", help="put [[ ]] around what was filled")


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def wants_colour(arguments: argparse.Namespace) -> bool:
    """On a terminal that can, unless the user or https://no-color.org says otherwise."""
    refused = arguments.no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return is_terminal(sys.stdout) and not refused


def put(text: str) -> None:
    """A result, at once: a reader down the pipe, or at the terminal, need not wait for the rest."""
    print(text, flush=True)


def put_json(value: Any) -> None:
    put(json.dumps(value, ensure_ascii=False))


def marked(text: str, spans: Sequence["Span"], opening: str = "[[", closing: str = "]]") -> str:
    return "".join(
        f"{opening}{part}{closing}" if span is not None else part
        for part, span in _parts(text, spans)
    )


def shaded(text: str, spans: Sequence["Span"]) -> str:
    """The text for a terminal: every token of a fill on the shade of its probability."""
    return "".join(
        visible(part) if span is None else _shade_span(span) for part, span in _parts(text, spans)
    )


def shade(text: str, log_prob: float) -> str:
    """Line by line, for a background that is open at a line's end floods the rest of the row."""
    probability = math.exp(min(0.0, log_prob))
    colour = next(colour for least, colour in SHADES if probability >= least)
    start = f"\033[38;5;16;48;5;{colour}m"
    return "\n".join(f"{start}{line}{RESET}" if line else "" for line in visible(text).split("\n"))


def visible(text: str) -> str:
    """Control characters as U+2400 pictures: what a model writes must not steer the terminal."""
    return "".join(
        chr(0x2400 + ord(c))
        if c < " " and c not in "\n\t"
        else "\u2421"
        if "\x7f" <= c <= "\x9f"
        else c
        for c in text
    )


def for_stdout(text: str) -> str:
    """Without colours: control characters go through to a file, never to a terminal."""
    return visible(text) if is_terminal(sys.stdout) else text


def quiet(text: str, colour: bool) -> str:
    return f"{DIM}{text}{RESET}" if colour else text


def per_token(log_prob: float, tokens: int) -> float:
    """The geometric mean of the tokens' probabilities."""
    return math.exp(log_prob / tokens) if tokens else 1.0


@contextmanager
def progress(total: int, what: str) -> Iterator[Any]:
    """A bar on standard error while many texts are worked on; nothing where no one watches."""
    from tqdm import tqdm

    with tqdm(
        total=total,
        unit=f" {what}",
        leave=False,
        disable=total < 2 or not is_terminal(sys.stderr),
        file=sys.stderr,
    ) as bar:
        yield bar


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns: the first flush left, the others flush right."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
            ]
        ).rstrip()
        for row in cells
    ]


def _parts(text: str, spans: Sequence["Span"]) -> Iterator[tuple[str, "Span | None"]]:
    """The text cut at its spans; given parts come with None."""
    at = 0
    for span in spans:
        yield text[at : span.start], None
        yield text[span.start : span.stop], span
        at = span.stop
    yield text[at:], None


def _shade_span(span: "Span") -> str:
    if "".join(span.tokens) == span.text:
        return "".join(
            shade(token, log_prob)
            for token, log_prob in zip(span.tokens, span.log_probs, strict=True)
        )
    # a character was cut into several tokens: the span as one, by its mean
    return shade(span.text, span.log_prob / max(1, len(span.tokens)))


# the tokens of each blank so far: the text of the last one
Read = Callable[[Sequence[Sequence[int]]], str]
HALF = "\ufffd"  # at the end of a decoded text: a character whose other bytes are still to come


class Writer:
    """Left to right: what is printed stays.

    Given text is printed as soon as all blanks before it are filled.
    """

    def __init__(
        self, given: Sequence[str], read: Read, colour: bool = False, marks: bool = False
    ) -> None:
        """`given` stands around the blanks: one text more than there are blanks."""
        self.given, self.read, self.colour = given, read, colour
        self.edges = ("[[", "]]") if marks else ("", "")
        self.fills: list[list[int]] = []  # tokens of each blank; the last is being written
        self.shown = ""  # text of this blank that is printed
        self.printed = ""  # all of it, without colours
        self._next_blank()

    def __call__(self, arrivals: list[Token]) -> None:
        for arrival in arrivals:
            while len(self.fills) <= arrival.blank:
                self._next_blank()
            self.fills[-1].append(arrival.token_id)
            text = self.read(self.fills)
            if not text.endswith(HALF) and text.startswith(self.shown):
                self._put(text[len(self.shown) :], arrival.log_prob)
                self.shown = text

    def finish(self, text: str) -> None:
        """The rest of the completed text; and should a tokeniser have spelt a token otherwise in
        its place, all of it once more.
        """
        if text.startswith(self.printed):
            self._put(text[len(self.printed) :] + "\n")
        else:
            self._put("\n" + text + "\n")

    def _next_blank(self) -> None:
        if self.fills:
            self._put(self.edges[1])
        self._put(self.given[len(self.fills)] + self.edges[0])
        self.fills.append([])
        self.shown = ""

    def _put(self, text: str, log_prob: float | None = None) -> None:
        self.printed += text
        if self.colour and log_prob is not None:
            sys.stdout.write(shade(text, log_prob))
        else:
            sys.stdout.write(for_stdout(text))
        sys.stdout.flush()


class Canvas:
    """Any order, on a terminal: the whole text is drawn again with every step, open
    places as underscores.
    """

    def __init__(
        self, given: Sequence[str], counts: Sequence[int | None], colour: bool = False
    ) -> None:
        """`counts`: tokens of each blank, None where that is not known yet."""
        self.given, self.colour = given, colour
        self.fills: list[dict[int, Token]] = [{} for _ in counts]
        self.counts = [count or 0 for count in counts]
        self.rows = 0  # of the terminal that the last drawing took

    def __call__(self, arrivals: list[Token]) -> None:
        for arrival in arrivals:
            self.fills[arrival.blank][arrival.index] = arrival
            self.counts[arrival.blank] = max(self.counts[arrival.blank], arrival.index + 1)
        parts: list[str | tuple[str, float]] = [self.given[0]]
        for fill, count, after in zip(self.fills, self.counts, self.given[1:], strict=True):
            parts += [self._token(fill.get(index)) for index in range(count)]
            parts.append(after)
        plain = "".join(visible(part) if isinstance(part, str) else part[0] for part in parts)
        drawn = "".join(
            visible(part) if isinstance(part, str) else shade(*part) if self.colour else part[0]
            for part in parts
        )
        size = shutil.get_terminal_size()
        # what has scrolled out of sight cannot be drawn again
        if rows_of(plain, size.columns) < size.lines:
            self._draw(plain, drawn)

    def finish(self, drawn: str) -> None:
        """The completed text, as it shall stay."""
        self._draw("", drawn)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _token(self, arrival: Token | None) -> str | tuple[str, float]:
        return "_" if arrival is None else (visible(arrival.token), arrival.log_prob)

    def _draw(self, plain: str, drawn: str) -> None:
        up = f"\033[{self.rows - 1}A" if self.rows > 1 else ""
        sys.stdout.write(f"{up}\r\033[J{drawn}")
        sys.stdout.flush()
        self.rows = rows_of(plain, shutil.get_terminal_size().columns)


def rows_of(text: str, columns: int) -> int:
    """Rows that a terminal of this width takes for the text."""
    widths = [
        sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)
        for line in text.split("\n")
    ]
    return sum(max(1, -(-width // max(1, columns))) for width in widths)
