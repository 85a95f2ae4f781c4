"""The numbers that the paper prints, shown beside ours where the question is the same.

`paper_figures.yaml` holds what the paper's tables print; nothing was read off a plot.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tracformer.contexts import parse

# GPT-2's vocabulary: a perplexity per token of another tokenizer is another quantity
PAPER_TOKENS = 50257
FULL_ENCODER = "tracformer-full"  # Table 11's second model
# Modes of Tables 2 and 4: CAR for Tracformer (with an empty context in Table 4), a bound for
# diffusion models.
PAPER_MODES = {
    "tracformer": "car",
    "gpt2": "ar",
    "sedd": "diffusion",
    "mdlm": "diffusion",
    "d3pm": "diffusion",
    "plaid": "diffusion",
}

# What all of the paper's questions have in common: packed text, and plain sampling.
ALWAYS = {"rows": "packed", "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class PaperFigure:
    """A number that the paper prints.

    Args:
        table: Name of its table, such as "table2".
        model: Name of the system, or `FULL_ENCODER`.
        metric: What it measures.
        setting: What the paper fixes: data, length, mode, contexts, spans, ratio.
        value: The number.
    """

    table: str
    model: str
    metric: str
    setting: Mapping[str, Any]
    value: float

    @property
    def place(self) -> str:
        """Where the paper prints it, such as "Table 2"."""
        return place_name(self.table)


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    name: str
    caption: str
    figures: tuple[PaperFigure, ...]


def place_name(name: str) -> str:
    """Return the name of a table or figure in words.

    >>> place_name("table11"), place_name("fig5"), place_name("claims")
    ('Table 11', 'Figure 5', 'claims')
    """
    for prefix, word in (("table", "Table"), ("fig", "Figure")):
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit():
            return f"{word} {name.removeprefix(prefix)}"
    return name


@cache
def paper_tables() -> Mapping[str, PaperTable]:
    """Return every table by name."""
    text = (resources.files("tracformer.report") / "paper_figures.yaml").read_text(encoding="utf-8")
    document: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return {
        name: PaperTable(
            name,
            table["caption"],
            tuple(figure for block in table["blocks"] for figure in _read_block(name, block)),
        )
        for name, table in document.items()
    }


def find_paper_figure(model: str, metric: str, asked: Mapping[str, Any]) -> PaperFigure | None:
    """Return the paper's figure for a question, or None if it prints none.

    Args:
        model: Name of the system, or `FULL_ENCODER`.
        metric: What is measured.
        asked: Options of the question. What the paper fixes must be the same here.

    >>> asked = {"data": "1bw", "length": 128, "contexts": "[0.10,0.9]", "count_eos": False}
    >>> asked["mode"] = "diffusion"
    >>> find_paper_figure("mdlm", "perplexity", asked).value
    59.14
    >>> find_paper_figure("mdlm", "perplexity", {**asked, "length": 256})
    """
    canonical = _canonical(asked)
    if any(canonical.get(key, value) != value for key, value in ALWAYS.items()):
        return None
    for table in paper_tables().values():
        for figure in table.figures:
            same = figure.model == model and figure.metric == metric
            if same and all(canonical.get(key) == value for key, value in figure.setting.items()):
                return figure
    return None


def _read_block(table: str, block: Mapping[str, Any]) -> list[PaperFigure]:
    figures = []
    for row, values in block["cells"].items():
        for head, value in zip(block["head"], values, strict=True):
            if value is None:
                continue
            setting = {
                **block["setting"],
                block["rows"]: row,
                **dict(zip(block["columns"], head, strict=True)),
            }
            model, metric = setting.pop("model"), setting.pop("metric")
            if metric == "perplexity" and "mode" not in setting:
                setting["mode"] = PAPER_MODES[model]
            figures.append(PaperFigure(table, model, metric, _canonical(setting), float(value)))
    return figures


def _canonical(setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return a setting with canonical names of contexts: [0,0.5] and [0.0,0.50] are the same."""
    return {
        key: parse(value).name if key == "contexts" and isinstance(value, str) else value
        for key, value in setting.items()
    }
