"""A piece in a process of its own: reads what to measure as JSON, answers with figures as JSON.

`python -m tracformer.bench.worker`
"""

import importlib
import json
import subprocess
import sys
from typing import Any

from tracformer.bench.pieces import FAILED, BenchPiece, Figures, Neighbours

OTHERS = "others"  # the figure that tells how many cores other processes kept busy meanwhile


def measured(piece: BenchPiece) -> Figures:
    """The piece's figures, or why there are none: one that fails does not end the run."""
    task = {
        "module": piece.measure.__module__,
        "function": piece.measure.__qualname__,
        "arguments": dict(piece.arguments),
    }
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(task), capture_output=True, text=True
    )
    if done.returncode == 0:
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
        return figures
    if done.returncode < 0:
        return {
            FAILED: f"its process was killed by signal {-done.returncode}, "
            "most likely for want of memory"
        }
    told = done.stderr.strip().splitlines()
    return {FAILED: told[-1] if told else f"its process ended with code {done.returncode}"}


def call(module: str, function: str, arguments: dict[str, Any]) -> Figures:
    measure = getattr(importlib.import_module(module), function)
    neighbours = Neighbours()
    return {**measure(**arguments), OTHERS: neighbours.cores()}


if __name__ == "__main__":
    print("\n" + json.dumps(call(**json.load(sys.stdin))))
