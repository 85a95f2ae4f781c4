"""List the systems: their modes, the kind of each answer, what each cannot do, and their size at
the paper's scale.

    tracformer models
    tracformer models --json
    tracformer models --flops

A system is trained with `tracformer train model.family=NAME ...`.
"""

import argparse
import json
from typing import Any

PAPER_PRESETS = ("paper-small", "paper")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object a system")
    parser.add_argument(
        "--flops",
        action="store_true",
        help=(
            "also count the size and the operations per trained token at preset mini (some seconds)"
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    from tracformer.baselines import family_names

    systems = [
        {**describe(name), **(training_cost(name) if arguments.flops else {})}
        for name in family_names()
    ]
    if arguments.json:
        for system in systems:
            print(json.dumps(system))
        return 0
    print(f"{'system':<18} {'modes (answer)':<40} {'at paper size':>13}  what it is")
    for system in systems:
        modes = ", ".join(f"{mode} ({kind})" for mode, kind in system["modes"].items())
        size = "-" if system["parameters"] is None else f"{system['parameters'] / 1e6:.1f}M"
        print(f"{system['name']:<18} {modes:<40} {size:>13}  {system['summary']}")
        if system.get("mini_flops_per_token") is not None:
            size, cost = (
                system["mini_parameters_without_embeddings"] / 1e6,
                system["mini_flops_per_token"] / 1e6,
            )
            print(
                f"{'':<18} preset mini: {size:.2f}M parameters without embeddings, {cost:.1f} "
                "MFLOP per trained token"
            )
        for mode, limit in system["limits"].items():
            print(f"{'':<18} {mode}: {limit}")
    return 0


def describe(name: str) -> dict[str, Any]:
    import torch

    from tracformer.baselines import find_family

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


def training_cost(name: str) -> dict[str, Any]:
    """Return the size of a system at preset mini, where all systems are of one size, and the
    operations of a trained token there.
    """
    from tracformer.baselines import find_family
    from tracformer.evaluation.flops import flops_per_token, parameters_of

    family = find_family(name)
    try:
        if "mini" not in family.config_class.presets:
            return {}
        config = family.config_class.preset("mini")
        size, cost = parameters_of(config), flops_per_token(config, family.objective)
    except ImportError:  # its network is an optional package's
        return {}
    return {"mini_parameters_without_embeddings": size, "mini_flops_per_token": cost}
