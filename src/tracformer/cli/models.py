"""List the systems: their modes, the kind of each answer, what each cannot do, and their size at the paper's scale.

    tracformer models
    tracformer models --json

A system is trained with `tracformer train model.family=NAME ...`.
"""

import argparse
import json
from typing import Any

PAPER_PRESETS = ("paper-small", "paper")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a system")


def run(arguments: argparse.Namespace) -> int:
    from tracformer.families import family_names

    systems = [describe(name) for name in family_names()]
    if arguments.json:
        for system in systems:
            print(json.dumps(system))
        return 0
    print(f"{'system':<12} {'modes (answer)':<40} {'at paper size':>13}  what it is")
    for system in systems:
        modes = ", ".join(f"{mode} ({kind})" for mode, kind in system["modes"].items())
        size = "-" if system["parameters"] is None else f"{system['parameters'] / 1e6:.1f}M"
        print(f"{system['name']:<12} {modes:<40} {size:>13}  {system['summary']}")
        for mode, limit in system["limits"].items():
            print(f"{'':<12} {mode}: {limit}")
    return 0


def describe(name: str) -> dict[str, Any]:
    import torch

    from tracformer.families import find_family

    family = find_family(name)
    kind = family.model_class
    preset = next((preset for preset in PAPER_PRESETS if preset in kind.config_class.presets), None)
    parameters: int | None = None
    if preset is not None:
        try:
            with torch.device("meta"):  # counted, not allocated
                parameters = kind(kind.config_class.preset(preset)).num_parameters()
        except ImportError:  # its network is an optional package's
            parameters = None
    return {
        "name": name,
        "summary": family.summary,
        "modes": dict(kind.answers),
        "limits": dict(kind.limits),
        "objective": family.objective,
        "presets": list(kind.config_class.presets),
        "parameters": parameters,
    }
