"""What the verbs print: shaded texts, JSON lines, and texts while they are filled.

- `put`, `put_json`, `put_facts`, `table`: lines of output.
- `shaded`, `marked`, `visible`: a text with its fills.
- `StreamWriter`: a fill as it arrives from left to right; `Canvas`: redrawn in place, for fills in
  any order.

On a terminal, fills are shaded by probability, from light blue (likely) to orange (unlikely). Each
shade sets both foreground and background, so it can be read on dark and on light terminals.
"""

import argparse
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from tracformer.generation.results import Token

if TYPE_CHECKING:
    from tracformer.generation.results import Span


# smallest probability, and colour of the 256-colour palette
SHADES = ((0.75, 153), (0.5, 189), (0.25, 230), (0.05, 223), (0.0, 215))
RESET = "\033[0m"
DIM = "\033[2m"


def add_output(parser: argparse.ArgumentParser, fills: bool = False) -> None:
    """Add the flags that say how results are printed; `fills`: also --marks."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per line, with every number"
    )
    parser.add_argument(
        "--no-color",
        action="store_true",
        help="print no colours (as with the environment variable NO_COLOR)",
    )
    if fills:
        parser.add_argument("--marks", action="store_true", help="print [[ ]] around each fill")


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal."""
    return stream.isatty()


def wants_colour(arguments: argparse.Namespace) -> bool:
    """Return whether to print colours: on a terminal, unless refused (see no-color.org)."""
    refused = arguments.no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return is_terminal(sys.stdout) and not refused


def put(text: str) -> None:
    """Print a result at once, without waiting for more output."""
    print(text, flush=True)


def put_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    put(json.dumps(value, ensure_ascii=False))


def put_facts(facts: Sequence[str], note: str, colour: bool) -> None:
    """Print a dim line of facts about a result, on a terminal."""
    if is_terminal(sys.stdout):
        line = "  " + ", ".join(facts) + (f" ({note})" if note else "")
        put(f"{DIM}{line}{RESET}" if colour else line)


def marked(text: str, spans: Sequence["Span"], opening: str = "[[", closing: str = "]]") -> str:
    """Return a text with brackets around its spans."""
    return "".join(
        f"{opening}{part}{closing}" if span is not None else part
        for part, span in _parts(text, spans)
    )


def shaded(text: str, spans: Sequence["Span"]) -> str:
    """Return a text for a terminal, with each token of a fill shaded by its probability."""
    return "".join(
        visible(part) if span is None else _shade_span(span) for part, span in _parts(text, spans)
    )


def shade(text: str, log_prob: float) -> str:
    """Return a text with the shade of a log-probability.

    Each line is shaded by itself: a background still set at the end of a line would fill the rest
    of the terminal's row.
    """
    probability = math.exp(min(0.0, log_prob))
    colour = next(colour for least, colour in SHADES if probability >= least)
    start = f"\033[38;5;16;48;5;{colour}m"
    return "\n".join(f"{start}{line}{RESET}" if line else "" for line in visible(text).split("\n"))


def visible(text: str) -> str:
    """Return a text with control characters as U+2400 pictures, which cannot steer a terminal."""
    return "".join(
        chr(0x2400 + ord(c))
        if c < " " and c not in "\n\t"
        else "\u2421"
        if "\x7f" <= c <= "\x9f"
        else c
        for c in text
    )


def for_stdout(text: str) -> str:
    """Return a text without colours; on a terminal control characters are made visible."""
    return visible(text) if is_terminal(sys.stdout) else text


def per_token(log_prob: float, tokens: int) -> str:
    """Return "log p per token", the mean log-probability of a token, in words."""
    return f"log p per token {log_prob / tokens if tokens else 0.0:.3f}"


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return rows as aligned lines: the first column flush left, the others flush right."""
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
    """Yield the parts of a text cut at its spans; given parts come with None."""
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
    # a character consists of several tokens: shade the span by its mean
    return shade(span.text, span.log_prob / max(1, len(span.tokens)))


# from the tokens of each blank so far to the text of the last blank
Read = Callable[[Sequence[Sequence[int]]], str]
HALF = "\ufffd"  # ends a decoded text if bytes of its last character are missing


class StreamWriter:
    """Print a fill from left to right as its tokens arrive.

    Given text is printed as soon as all blanks before it are filled.

    Args:
        given: The texts around the blanks, one more than there are blanks.
        read: Returns the text of the last of several blanks, from their tokens.
        colour: Shade tokens by probability.
        marks: Print brackets around fills.
    """

    def __init__(
        self, given: Sequence[str], read: Read, colour: bool = False, marks: bool = False
    ) -> None:
        self.given, self.read, self.colour = given, read, colour
        self.edges = ("[[", "]]") if marks else ("", "")
        self.fills: list[list[int]] = []  # tokens of each blank; the last is being filled
        self.shown = ""  # text of the last blank that is printed
        self.printed = ""  # everything printed, without colours
        self._next_blank()

    def __call__(self, tokens: list[Token]) -> None:
        """Print tokens, as far as they make whole characters."""
        for token in tokens:
            while len(self.fills) <= token.blank:
                self._next_blank()
            self.fills[-1].append(token.token_id)
            text = self.read(self.fills)
            if not text.endswith(HALF) and text.startswith(self.shown):
                self._put(text[len(self.shown) :], token.log_prob)
                self.shown = text

    def finish(self, text: str) -> None:
        """Print the rest of the completed text.

        If the text does not begin with what was printed, because the tokenizer writes a token
        differently in its place, print all of it again.
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
    """Print a fill in any order, on a terminal: each step draws the whole text again.

    Args:
        given: The texts around the blanks, one more than there are blanks.
        counts: Number of tokens of each blank, drawn as underscores; None: not known yet.
        colour: Shade tokens by probability.
    """

    def __init__(
        self, given: Sequence[str], counts: Sequence[int | None], colour: bool = False
    ) -> None:
        self.given, self.colour = given, colour
        self.fills: list[dict[int, Token]] = [{} for _ in counts]
        self.counts = [count or 0 for count in counts]
        self.rows = 0  # rows of the terminal that the last drawing took

    def __call__(self, tokens: list[Token]) -> None:
        """Draw the text with these tokens filled in."""
        for token in tokens:
            self.fills[token.blank][token.index] = token
            self.counts[token.blank] = max(self.counts[token.blank], token.index + 1)
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
        # rows that scrolled out of sight cannot be drawn again
        if rows_of(plain, size.columns) < size.lines:
            self._draw(plain, drawn)

    def finish(self, drawn: str) -> None:
        """Draw the completed text."""
        self._draw("", drawn)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _token(self, token: Token | None) -> str | tuple[str, float]:
        return "_" if token is None else (visible(token.token), token.log_prob)

    def _draw(self, plain: str, drawn: str) -> None:
        up = f"\033[{self.rows - 1}A" if self.rows > 1 else ""
        sys.stdout.write(f"{up}\r\033[J{drawn}")
        sys.stdout.flush()
        self.rows = rows_of(plain, shutil.get_terminal_size().columns)


def rows_of(text: str, columns: int) -> int:
    """Return the number of rows that a terminal of this width needs for a text."""
    widths = [
        sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)
        for line in text.split("\n")
    ]
    return sum(max(1, -(-width // max(1, columns))) for width in widths)
