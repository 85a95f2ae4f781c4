"""Fills side by side with the original text, the same holes for every model."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from tracformer.evaluation.report.collect import Section
from tracformer.evaluation.report.page import folded, text_with_fills
from tracformer.evaluation.report.tables import number

OPEN = 2  # sequences a context that stand open; the others are folded


def fills_of(section: Section) -> str:
    """HTML of all fills that the section's results kept, by context and sequence; of several seeds the first."""
    kept: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for entry in section.entries:
        for fill in entry.first.details.get("fills", ()):
            kept.setdefault((str(fill["contexts"]), int(fill["sequence"])), {})[entry.label] = fill
    parts = []
    for contexts in dict.fromkeys(name for name, _ in kept):
        shown = [_side_by_side(number_of, kept[contexts, number_of]) for name, number_of in sorted(kept) if name == contexts]
        rest = shown[OPEN:]
        parts.append(f"<h3>Fills of {html.escape(contexts)}, unselected</h3>{''.join(shown[:OPEN])}")
        parts += [folded(f"{len(rest)} more", "".join(rest))] if rest else []
    return "".join(parts)


def _side_by_side(sequence: int, fills: Mapping[str, Mapping[str, Any]]) -> str:
    first = next(iter(fills.values()))
    boxes = [text_with_fills(f"sequence {sequence}: the original", str(first["original"]), _pairs(first["original_spans"]))]
    for label, fill in fills.items():
        likely = f", log-probability {number(float(fill['log_prob']))}" if fill.get("log_prob") is not None else ""
        boxes.append(text_with_fills(f"{label}{likely}", str(fill["text"]), _pairs(fill["spans"])))
    return f"<div class='texts'>{''.join(boxes)}</div>"


def _pairs(spans: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(int(start), int(stop)) for start, stop in spans]
