"""Draw the curves of one or more runs.

tracformer plot runs/stories                 writes runs/stories/curves.png
tracformer plot runs/a runs/b --out both.png
"""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    parser.add_argument("--out", help="the picture (default: curves.png in the first run's folder)")
    parser.add_argument(
        "--json", action="store_true", help="print the picture's name and the runs as JSON"
    )


def run(arguments: argparse.Namespace) -> int:
    from tracformer.training.log import plot_runs

    out = Path(arguments.out) if arguments.out else Path(arguments.runs[0]) / "curves.png"
    plot_runs([Path(folder) for folder in arguments.runs], out)
    print(json.dumps({"picture": str(out), "runs": arguments.runs}) if arguments.json else out)
    return 0
