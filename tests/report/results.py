"""Results as an evaluation writes them, for the tests of reports."""

import dataclasses
from pathlib import Path
from typing import Any

from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.report import write_report

RATIOS = (0.1, 0.5, 0.9)


def result(
    model: str,
    task: str,
    rows: list[ResultRow],
    family: str = "tracformer",
    mode: str = "car",
    **more: Any,
) -> Result:
    """Return a result; `vocab_size`, `config`, `options` and `details` may be given."""
    config = {"vocab_size": more.get("vocab_size", 4096), **more.get("config", {})}
    options = {"data": "wikitext103", "length": 128, "count_eos": False, **more.get("options", {})}
    described = {"parameters": 1000, "parameters_without_embeddings": 900, "config": config}
    manifest = {
        "hashes": {"data": "d", "contexts": "c", "tokenizer": "t", "weights": model},
        "model": described,
        **({"training": more["training"]} if "training" in more else {}),
    }
    return Result(
        model, family, mode, task, options, tuple(rows), more.get("details", {}), manifest
    )


def ratios(model: str, kind: str, level: float, **more: Any) -> Result:
    names = {ratio: f"span:p={ratio},mean=10" for ratio in RATIOS}
    rows = [
        ResultRow(
            "perplexity",
            {"contexts": names[r], "ratio": r, "spans": "Geometric(10)"},
            level + r,
            level,
            level + 2 * r,
            kind,
            3,
            30,
        )
        for r in RATIOS
    ]
    details = {
        name: {"nll": [level, level + 1, level + 2], "targets": [3, 4, 3], "bytes": [9, 9, 9]}
        for name in names.values()
    }
    return result(model, "ratios", rows, details=details, **more)


def ranges(model: str, value: float, **more: Any) -> Result:
    return result(
        model,
        "ranges",
        [
            ResultRow(
                "perplexity",
                {"contexts": "[0.25,0.75]", "ranges": "[0.25,0.75]"},
                value,
                kind="exact",
            )
        ],
        **more,
    )


def write(folder: Path, *results: Result, **options: Any) -> str:
    for each in results:
        each.save(folder / "results")
    return write_report([folder / "results"], folder / "report", **options).read_text()


def with_hashes(made: Result, **hashes: str) -> Result:
    return dataclasses.replace(
        made, manifest={**made.manifest, "hashes": {**made.manifest["hashes"], **hashes}}
    )
