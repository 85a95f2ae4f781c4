"""The page itself: one HTML file that needs nothing else, no network and no script."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Chapter:
    anchor: str
    title: str
    body: str  # HTML


def page(title: str, introduction: str, chapters: Sequence[Chapter]) -> str:
    """`introduction` and the chapters' bodies are HTML; titles are text."""
    style = (resources.files("tracformer.evaluation.report") / "page.css").read_text(encoding="utf-8")
    links = "".join(f"<li><a href='#{chapter.anchor}'>{html.escape(chapter.title)}</a></li>" for chapter in chapters)
    bodies = "".join(f"<section id='{c.anchor}'><h2>{html.escape(c.title)}</h2>{c.body}</section>" for c in chapters)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{style}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{introduction}<nav aria-label='contents'><ul>{links}</ul></nav>"
        f"<main>{bodies}</main></body></html>\n"
    )


def picture(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


def pictures(figures: Sequence[str]) -> str:
    return f"<div class='pictures'>{''.join(figures)}</div>" if figures else ""


def paragraph(text: str, faint: bool = False) -> str:
    return f"<p{' class=' + repr('faint') if faint else ''}>{html.escape(text)}</p>" if text else ""


def folded(title: str, body: str) -> str:
    """`body` is HTML."""
    return f"<details><summary>{html.escape(title)}</summary>{body}</details>"


def as_json(value: Any) -> str:
    return f"<pre>{html.escape(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True))}</pre>"


def text_with_fills(title: str, text: str, spans: Sequence[tuple[int, int]]) -> str:
    """A text in a box, the characters of `spans` highlighted."""
    parts, at = [], 0
    for start, stop in sorted(spans):
        parts += [html.escape(text[at:start]), f"<mark>{html.escape(text[start:stop])}</mark>"]
        at = stop
    parts.append(html.escape(text[at:]))
    return f"<div class='text'><b>{html.escape(title)}</b>{''.join(parts)}</div>"
