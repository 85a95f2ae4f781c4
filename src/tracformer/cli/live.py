"""A filling while it happens: written from left to right, or redrawn in place where tokens come in any order."""

import shutil
import sys
import unicodedata
from collections.abc import Callable, Sequence

from tracformer.cli.show import for_stdout, shade, visible
from tracformer.generation.results import Arrival

Read = Callable[[Sequence[Sequence[int]]], str]  # the tokens of each blank so far: the text of the last one
HALF = "\ufffd"  # at the end of a decoded text: a character whose other bytes are still to come


class Writer:
    """Left to right: what is printed stays. Given text is printed as soon as all blanks before it are filled."""

    def __init__(self, given: Sequence[str], read: Read, colour: bool = False, marks: bool = False) -> None:
        """`given` stands around the blanks: one text more than there are blanks."""
        self.given, self.read, self.colour = given, read, colour
        self.edges = ("[[", "]]") if marks else ("", "")
        self.fills: list[list[int]] = []  # tokens of each blank; the last is being written
        self.shown = ""  # text of this blank that is printed
        self.printed = ""  # all of it, without colours
        self._next_blank()

    def __call__(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            while len(self.fills) <= arrival.blank:
                self._next_blank()
            self.fills[-1].append(arrival.token_id)
            text = self.read(self.fills)
            if not text.endswith(HALF) and text.startswith(self.shown):
                self._put(text[len(self.shown) :], arrival.log_prob)
                self.shown = text

    def finish(self, text: str) -> None:
        """The rest of the completed text; and should a tokeniser have spelt a token otherwise in its place, all of it once more."""
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
    """Any order, on a terminal: the whole text is drawn again with every step, open places as underscores."""

    def __init__(self, given: Sequence[str], counts: Sequence[int | None], colour: bool = False) -> None:
        """`counts`: tokens of each blank, None where that is not known yet."""
        self.given, self.colour = given, colour
        self.fills: list[dict[int, Arrival]] = [{} for _ in counts]
        self.counts = [count or 0 for count in counts]
        self.rows = 0  # of the terminal that the last drawing took

    def __call__(self, arrivals: list[Arrival]) -> None:
        for arrival in arrivals:
            self.fills[arrival.blank][arrival.index] = arrival
            self.counts[arrival.blank] = max(self.counts[arrival.blank], arrival.index + 1)
        parts: list[str | tuple[str, float]] = [self.given[0]]
        for fill, count, after in zip(self.fills, self.counts, self.given[1:], strict=True):
            parts += [self._token(fill.get(index)) for index in range(count)]
            parts.append(after)
        plain = "".join(visible(part) if isinstance(part, str) else part[0] for part in parts)
        drawn = "".join(visible(part) if isinstance(part, str) else shade(*part) if self.colour else part[0] for part in parts)
        size = shutil.get_terminal_size()
        if rows_of(plain, size.columns) < size.lines:  # what has scrolled out of sight cannot be drawn again
            self._draw(plain, drawn)

    def finish(self, drawn: str) -> None:
        """The completed text, as it shall stay."""
        self._draw("", drawn)
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _token(self, arrival: Arrival | None) -> str | tuple[str, float]:
        return "_" if arrival is None else (visible(arrival.token), arrival.log_prob)

    def _draw(self, plain: str, drawn: str) -> None:
        up = f"\033[{self.rows - 1}A" if self.rows > 1 else ""
        sys.stdout.write(f"{up}\r\033[J{drawn}")
        sys.stdout.flush()
        self.rows = rows_of(plain, shutil.get_terminal_size().columns)


def rows_of(text: str, columns: int) -> int:
    """Rows that a terminal of this width takes for the text."""
    widths = [sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line) for line in text.split("\n")]
    return sum(max(1, -(-width // max(1, columns))) for width in widths)
