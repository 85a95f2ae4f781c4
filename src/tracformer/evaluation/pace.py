"""How long an experiment takes, from the tokens that a model trains on in a second of one core."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tracformer.training.log import read_log

HOUR = 3600.0


def measured_pace(run: Path) -> float | None:
    """Return the tokens that a run trained on per second of processor time; None before its first validation."""
    if not (run / "train.json").is_file() or not (run / "log.jsonl").is_file():
        return None
    evaluated = [record for record in read_log(run / "log.jsonl") if record.get("cpu_seconds")]
    if not evaluated:
        return None
    config, last = json.loads((run / "train.json").read_text()), evaluated[-1]
    return float(last["step"] * config["batch"] * config["length"] / last["cpu_seconds"])


def core_hours(work: Iterable[tuple[str, float]], paces: Mapping[str, float]) -> float | None:
    """Return the core-hours of training models on so many tokens; None if no pace is known.

    A model of unknown pace is counted at the mean of the known ones.

    Args:
        work: Pairs of a model and the tokens it is to be trained on.
        paces: Tokens per second and core, by model.

    >>> core_hours([("a", 3.6e6), ("b", 3.6e6)], {"a": 1000.0})
    2.0
    """
    if not paces:
        return None
    mean = len(paces) / sum(1 / pace for pace in paces.values())  # by time per token
    return sum(tokens / paces.get(model, mean) for model, tokens in work) / HOUR


def tokens(count: float) -> str:
    """
    >>> tokens(24.6e6), tokens(295e9), tokens(384)
    ('24.6M tokens', '295B tokens', '384 tokens')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter} tokens"
    return f"{count:.0f} tokens"


def duration(seconds: float) -> str:
    """
    >>> duration(40), duration(600), duration(9000)
    ('40 s', '10 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
