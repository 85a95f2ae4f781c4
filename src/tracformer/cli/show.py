"""What a command prints: texts with their fills shaded by probability on a terminal, plain text elsewhere.

Each shade sets both foreground and background, so it reads the same on dark and on light terminals; light blue is sure, orange is a guess.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tracformer.generation.results import Span

SHADES = ((0.75, 153), (0.5, 189), (0.25, 230), (0.05, 223), (0.0, 215))  # least probability, colour of the 256-colour palette
RESET = "\033[0m"
DIM = "\033[2m"


def add_output(parser: argparse.ArgumentParser, fills: bool = True) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with every number")
    parser.add_argument("--no-color", action="store_true", help="no colour, even on a terminal (so does the variable NO_COLOR)")
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
    return "".join(f"{opening}{part}{closing}" if span is not None else part for part, span in _parts(text, spans))


def shaded(text: str, spans: Sequence["Span"]) -> str:
    """The text for a terminal: every token of a fill on the shade of its probability."""
    return "".join(visible(part) if span is None else _shade_span(span) for part, span in _parts(text, spans))


def shade(text: str, log_prob: float) -> str:
    """Line by line, for a background that is open at a line's end floods the rest of the row."""
    probability = math.exp(min(0.0, log_prob))
    colour = next(colour for least, colour in SHADES if probability >= least)
    start = f"\033[38;5;16;48;5;{colour}m"
    return "\n".join(f"{start}{line}{RESET}" if line else "" for line in visible(text).split("\n"))


def visible(text: str) -> str:
    """Control characters as U+2400 pictures: what a model writes must not steer the terminal."""
    return "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else "\u2421" if "\x7f" <= c <= "\x9f" else c for c in text)


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

    with tqdm(total=total, unit=f" {what}", leave=False, disable=total < 2 or not is_terminal(sys.stderr), file=sys.stderr) as bar:
        yield bar


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns: the first flush left, the others flush right."""
    cells = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip() for row in cells]


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
        return "".join(shade(token, log_prob) for token, log_prob in zip(span.tokens, span.log_probs, strict=True))
    # a character was cut into several tokens: the span as one, by its mean
    return shade(span.text, span.log_prob / max(1, len(span.tokens)))
