"""Differences between models on the same sequences and contexts, which are far better known than
the figures themselves.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracformer.evaluation import bootstrap
from tracformer.evaluation.questions import noise_groups
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.model.base import BOUND

SAME = ("data", "contexts")  # hashes that must agree


def comparable(first: Result, other: Result) -> bool:
    """Were the two asked the same?"""
    hashes, others = first.manifest.get("hashes", {}), other.manifest.get("hashes", {})
    same = all(key in hashes and hashes[key] == others.get(key) for key in SAME)
    same &= first.schemas["task"] == other.schemas["task"]
    return same and first.question() == other.question()


def same_tokens(first: Result, other: Result) -> bool:
    """Is a token of one a token of the other, so that figures per token can be compared?"""
    return bool(
        first.manifest["hashes"].get("tokenizer") == other.manifest["hashes"].get("tokenizer")
    )


def differences(first: Result, other: Result, per_byte: bool = False) -> list[ResultRow]:
    """`other` less `first`, setting by setting, with paired intervals: in perplexity, or in bits
    per byte (always if tokenisers differ).
    """
    if not comparable(first, other):
        raise ValueError(
            f"{first.model} and {other.model} were not asked the same by task {first.task!r}; "
            "evaluate them in one command"
        )
    per_byte |= not same_tokens(first, other)
    metric = "bits_per_byte" if per_byte else "perplexity"
    if any("contexts" not in row.setting for row in first.rows if row.metric == metric):
        raise ValueError(
            f"results of task {first.task!r} keep no sums of sequences under contexts, from which "
            "differences are taken"
        )
    kinds = {
        row.setting["contexts"]: (row.kind, row.setting)
        for row in first.rows
        if row.metric == metric
    }
    answered = {row.setting["contexts"]: row.kind for row in other.rows if row.metric == metric}
    rows = []
    for contexts, (kind, setting) in kinds.items():
        if contexts not in answered:
            continue
        a, b = (_pair(result.details[contexts], per_byte) for result in (other, first))
        ratios = bootstrap.ratio(*a), bootstrap.ratio(*b)
        value = (
            ratios[0] - ratios[1]
            if per_byte
            else bootstrap.perplexity_of(ratios[0]) - bootstrap.perplexity_of(ratios[1])
        )
        count = len(a[0])
        if BOUND in (kind, answered[contexts]):
            a, b = ((noise_groups(above), noise_groups(below)) for above, below in (a, b))
        low, high = bootstrap.difference_interval(a, b, exponent=not per_byte) or (None, None)
        note = (
            ""
            if answered[contexts] == kind
            else f"{answered[contexts]} less {kind}: not the same kind of number"
        )
        rows.append(
            ResultRow(f"{metric}_difference", setting, value, low, high, sequences=count, note=note)
        )
    return rows


def _pair(
    sums: Mapping[str, Any], per_byte: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    nll = np.array(sums["nll"], np.float64)
    return (
        (nll / math.log(2), np.array(sums["bytes"], np.float64))
        if per_byte
        else (nll, np.array(sums["targets"], np.float64))
    )
