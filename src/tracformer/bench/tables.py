"""The table of a run, as text for a terminal and as markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from tracformer.bench.results import FAILED, Figures, Row

HEADS = ("what", "setting", "measured", "ratio", "of what", "target")
RIGHT = (2, 3)  # columns of numbers


def number(value: float) -> str:
    """
    >>> number(1234.5), number(12.34), number(0.6789), number(0.0)
    ('1234', '12.3', '0.68', '0.00')
    """
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def cells(row: Row) -> list[str]:
    value = "" if row.value is None else f"{number(row.value)} {row.unit}".strip()
    return [row.what, row.setting, value, "" if row.ratio is None else number(row.ratio), row.of, target(row)]


def target(row: Row) -> str:
    """
    >>> target(Row("p", "w", "s", ratio=0.7, target=0.65)), target(Row("p", "w", "s", ratio=1.2, target=1.05, at_most=True))
    ('at least 0.65: met', 'at most 1.05: not met')
    """
    if row.target is None:
        return ""
    wanted = f"{'at most' if row.at_most else 'at least'} {row.target:g}"
    return wanted if row.met is None else f"{wanted}: {'met' if row.met else 'not met'}"


def text(rows: Sequence[Row]) -> str:
    """One table, a heading for each part."""
    body = [cells(row) for row in rows]
    widths = [max(len(line[i]) for line in [list(HEADS), *body]) for i in range(len(HEADS))]

    def line(words: Sequence[str]) -> str:
        padded = (word.rjust(width) if i in RIGHT else word.ljust(width) for i, (word, width) in enumerate(zip(words, widths, strict=True)))
        return "  ".join(padded).rstrip()

    lines = [line(HEADS)]
    part = ""
    for row, words in zip(rows, body, strict=True):
        if row.part != part:
            part = row.part
            lines += ["", part]
        lines.append(line(words))
        if row.note:
            lines.append(f"    {row.note}")
    return "\n".join(lines)


def markdown(rows: Sequence[Row], run: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Tables to paste: first every figure that has a target, then a table a part."""
    told = [f"`{run['processor']}`, {run['threads']} threads, PyTorch {run['torch']}, scale `{run['scale']}`."]
    parts = [" ".join([*told, *notes])]
    if aimed := [row for row in rows if row.target is not None]:
        parts.append("### Targets\n\n" + _grid(aimed))
    for part in dict.fromkeys(row.part for row in rows):
        parts.append(f"### {part.capitalize()}\n\n" + _grid([row for row in rows if row.part == part], notes=True))
    return "\n\n".join(parts) + "\n"


def _grid(rows: Sequence[Row], notes: bool = False) -> str:
    heads = [*HEADS, *(["note"] if notes and any(row.note for row in rows) else [])]
    lines = [_bar(heads), _bar(["---:" if i in RIGHT else "---" for i in range(len(heads))])]
    for row in rows:
        lines.append(_bar([*cells(row), *([row.note] if len(heads) > len(HEADS) else [])]))
    return "\n".join(lines)


def _bar(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"


def warnings(pieces: Mapping[str, Figures], doubtful: Sequence[str]) -> list[str]:
    """Sentences about figures that are missing or mean little."""
    told = [f"{name} failed: {figures[FAILED]}." for name, figures in pieces.items() if FAILED in figures]
    if doubtful:
        shown = ", ".join(doubtful[:4]) + (f" and {len(doubtful) - 4} more" if len(doubtful) > 4 else "")
        told.append(f"Others kept the machine busy during {len(doubtful)} of {len(pieces)} pieces ({shown}): these figures mean little.")
    return told
