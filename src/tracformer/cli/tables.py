"""Results as plain tables: a row for each setting, a column for each model, what kind of number it is in the column's head."""

from collections.abc import Iterable, Sequence

from tracformer.evaluation.compare import comparable, differences
from tracformer.evaluation.results import Result, Row

LOGARITHM, PER_BYTE = "nll", "bits_per_byte"  # of another column; and only needed where tokenisers differ


def tables(results: Sequence[Result], per_byte: bool = False) -> str:
    """One table for each task and metric, and the differences from the first model where models were asked the same.

    per_byte: bits per byte are shown, and differences taken in them, even where the tokenisers agree.
    """
    parts = []
    for group in _by_question(results):
        alike = len({result.manifest.get("hashes", {}).get("tokenizer") for result in group}) == 1
        unshown = (LOGARITHM, PER_BYTE) if alike and not per_byte else (LOGARITHM,)
        metrics = dict.fromkeys(row.metric for result in group for row in result.rows if row.metric not in unshown)
        parts += [_metric_table(group, metric) for metric in metrics]
        parts += _difference_tables(group, per_byte)
    return "\n\n".join(parts)


def _by_question(results: Sequence[Result]) -> Iterable[list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.question(), []).append(result)
    return groups.values()


def _metric_table(asked: Sequence[Result], metric: str) -> str:
    """Models that have no such figure, as a bound has no KL, have no column."""
    group = [result for result in asked if any(row.metric == metric for row in result.rows)]
    chosen = [[row for row in result.rows if row.metric == metric] for result in group]
    kinds = [{row.kind for row in rows} for rows in chosen]
    heads = [
        f"{result.model} {result.mode}" + (f" ({_only(kind)})" if _only(kind) else "") for result, kind in zip(group, kinds, strict=True)
    ]
    columns = [{label(row): cell(row, kind=len(kind) > 1) for row in rows} for rows, kind in zip(chosen, kinds, strict=True)]
    notes = dict.fromkeys(f"{head}: {row.note}" for head, rows in zip(heads, chosen, strict=True) for row in rows if row.note)
    return "\n".join([_title(group[0], metric), _grid(heads, columns), *(f"  {note}" for note in notes)])


def _difference_tables(group: Sequence[Result], per_byte: bool) -> list[str]:
    first = group[0]
    others = [result for result in group[1:] if comparable(first, result) and _has_sums(first) and _has_sums(result)]
    if not others:
        return []
    found = [differences(first, other, per_byte) for other in others]
    columns = [{label(row): cell(row, sign="+") for row in rows} for rows in found]
    title = f"less {first.model} {first.mode}, paired by sequence"
    unit = ", ".join(dict.fromkeys(row.metric.removesuffix("_difference") for rows in found for row in rows))
    notes = dict.fromkeys(f"  {other.model}: {row.note}" for other, rows in zip(others, found, strict=True) for row in rows if row.note)
    return ["\n".join([f"{unit} {title}", _grid([f"{other.model} {other.mode}" for other in others], columns), *notes])]


def label(row: Row) -> str:
    """A setting in words; the contexts' name only where nothing else tells rows apart."""
    told = set(row.setting) - {"contexts", "over"}
    shown = {key: value for key, value in row.setting.items() if key != "contexts" or not told}
    return "  ".join(f"{key} {value}" for key, value in shown.items()) or "all"


def cell(row: Row, sign: str = "", kind: bool = False) -> str:
    text = _number(row.value, sign)
    if row.low is not None and row.high is not None:
        text += f" [{_number(row.low, sign)}, {_number(row.high, sign)}]"
    return f"{text} {row.kind}" if kind and row.kind else text


def _number(value: float, sign: str = "") -> str:
    return format(value, f"{sign}.4g" if abs(value) < 1000 else f"{sign},.0f")


def _title(result: Result, metric: str) -> str:
    options = result.options
    words = [f"{result.task}: {metric}"]
    if options.get("data"):
        rows = max((row.sequences for row in result.rows), default=0)
        words.append(f"{options['data']}, {rows} sequences" + (f" of {options['length']} tokens" if "length" in options else ""))
    if any(row.low is not None for row in result.rows if row.metric == metric):
        words.append("95% intervals over sequences")
    return "; ".join(words)


def _grid(heads: Sequence[str], columns: Sequence[dict[str, str]]) -> str:
    labels = list(dict.fromkeys(name for column in columns for name in column))
    lines = [["", *heads], *([name, *(column.get(name, "") for column in columns)] for name in labels)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _only(kinds: set[str]) -> str:
    return next(iter(kinds)) if len(kinds) == 1 else ""


def _has_sums(result: Result) -> bool:
    contexts = [row.setting.get("contexts", "") for row in result.rows if row.metric == "perplexity"]
    return bool(contexts) and all("nll" in result.details.get(name, {}) for name in contexts)
