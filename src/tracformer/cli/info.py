"""Show a model's system, size, modes, tokenizer and files, and how it was trained.

The training is shown if the folder, or that of its run, describes it: steps and tokens done of
those planned, time, machine and data.

    tracformer info runs/stories
    tracformer info --model runs/stories/best --json
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracformer.cli import Command, output
from tracformer.cli import arguments as shared

if TYPE_CHECKING:
    from tracformer.generation.language_model import LanguageModel

MODELS_DESCRIPTION = """List the systems that can be trained and evaluated: their modes, the
kind of each answer, limitations, and the size at the paper's scale.

    tracformer models
    tracformer models --json
    tracformer models --flops

Train a system with `tracformer train model.family=NAME ...`. The column "from" shows the package
of a system, or the file that --include names.
"""
ANSWERS = {
    "exact": "exact joint probability of all targets",
    "marginal": "marginal of each target; any order",
    "bound": "lower bound on the joint probability",
}
PAPER_PRESETS = ("paper-small", "paper")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SETTINGS_SHOWN = (
    "objective",
    "contexts",
    "steps",
    "minutes",
    "batch",
    "length",
    "seed",
    "ema",
    "init",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer info`."""
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="model or run folder")
    shared.add_model(parser)
    shared.add_no_verify(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer info`."""
    if arguments.folder and arguments.model:
        raise ValueError(
            f"two models given, {arguments.folder} and --model {arguments.model}; give one of them"
        )
    from tracformer.loading import find_folder

    where = arguments.folder or arguments.model or shared.default_model()
    lm = shared.open_model(where, verify=arguments.verify)
    facts = describe(lm, find_folder(lm.name))
    if arguments.json:
        output.put_json(facts)
    else:
        output.put("\n".join(_lines(facts)))
    return 0


def describe(lm: "LanguageModel", folder: Path) -> dict[str, Any]:
    """Return the facts about a model, as `--json` prints them."""
    model, config, tokenizer = lm.model, lm.model.config, lm.tokenizer
    files = sorted(
        entry for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith(".")
    )
    return {
        "folder": str(folder),
        "system": config.model_type,
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters(embeddings=False),
        "dtype": _dtypes(folder),
        "modes": {
            mode: {"answer": model.answers[mode], "limit": model.limits.get(mode, "")}
            for mode in config.modes
        },
        "untrained_modes": [mode for mode in config.possible_modes if mode not in config.modes],
        "max_length": config.max_length,
        "vocab_size": config.vocab_size,
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
        },
        "files": {entry.name: entry.stat().st_size for entry in files},
        "config": config.to_dict(),
        "generation": lm.generation.to_dict(),
        "training": training_summary(folder),
    }


def training_summary(folder: Path) -> dict[str, Any] | None:
    """Return how the weights in a model's folder were trained, if it or its run's folder says so.

    In the run's folder there are also its settings and the last records of its log.
    """
    from tracformer.training.log import perplexities, read_log, read_training

    weights = read_training(folder)
    runs = [place for place in (folder, folder.parent) if (place / "train.json").is_file()]
    if not runs:
        return None if weights is None else {"run": None, **weights, "weights": weights}
    run = runs[0]
    try:
        settings = json.loads((run / "train.json").read_text())
    except ValueError as error:
        raise ValueError(f"{run / 'train.json'} is not valid JSON: {error}") from error
    log = read_log(run / "log.jsonl") if (run / "log.jsonl").is_file() else []
    last = {record["kind"]: record for record in log}
    train, validation = last.get("train", {}), last.get("eval")
    return {
        "run": str(run),
        "data": settings.get("data", {}).get("source", ""),
        **{key: settings[key] for key in SETTINGS_SHOWN if key in settings},
        "last_step": train.get("step"),
        "last_loss": train.get("loss"),
        "seconds": train.get("seconds"),
        "weights": weights,
        "held_out": None
        if validation is None
        else {"step": validation["step"], **perplexities(validation)},
    }


def _dtypes(folder: Path) -> str:
    """Return the precision in which the weights are stored."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= {str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    return ", ".join(sorted(DTYPES.get(name, name) for name in names)) or "unknown (no safetensors)"


def _lines(facts: dict[str, Any]) -> list[str]:
    tokenizer, training = facts["tokenizer"], facts["training"]
    size, bare = facts["parameters"], facts["parameters_without_embeddings"]
    rows = [
        ("parameters", f"{size:,} ({bare:,} without embeddings), stored as {facts['dtype']}"),
        ("length", f"at most {facts['max_length']:,} tokens"),
        ("vocabulary", f"{facts['vocab_size']:,} tokens"),
        ("tokenizer", f"{tokenizer['kind']}, fingerprint {tokenizer['fingerprint'][:12]}"),
    ]
    for mode, known in facts["modes"].items():
        limit = f"; {known['limit']}" if known["limit"] else ""
        rows.append((f"mode {mode}", f"{ANSWERS.get(known['answer'], known['answer'])}{limit}"))
    if facts["untrained_modes"]:
        rows.append(("not trained", ", ".join(facts["untrained_modes"])))
    generation = facts["generation"]
    settings = ", ".join(f"{name} {value}" for name, value in generation.items())
    rows.append(("generation", settings))
    rows += [("file", f"{name}, {size:,} bytes") for name, size in facts["files"].items()]
    rows += _training_rows(training or {})
    return [
        f"{facts['folder']}: {facts['system']}",
        *(f"  {name:<14} {what}" for name, what in rows),
    ]


def _training_rows(training: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines about a training, see `training_summary`."""
    rows = []
    if training.get("run"):
        rows_of, length = training.get("batch", 0), training.get("length", 0)
        done, planned = training["last_step"] or 0, training.get("steps", 0)
        of = f"{done:,} of {planned:,} steps" if planned else f"{done:,} steps"
        amount = f"{of} of {rows_of} x {length} tokens ({done * rows_of * length:,} with padding)"
        if training["seconds"] is not None:
            amount += f" in {training['seconds'] / 60:.1f} minutes"
        if training.get("minutes"):
            amount += f" of {training['minutes']:g}"
        objective = training.get("objective", "")
        rows.append(("training", f"{training['run']}: {objective}, {amount} of {training['data']}"))
    if (weights := training.get("weights")) is not None:
        text = (
            f"after step {weights['step']:,}: {weights['tokens']:,} tokens of {weights['data']} "
            f"without padding, {weights['seconds'] / 60:.1f} minutes on {weights['machine']}"
        )
        rows.append(("these weights", text))
    if training.get("last_step") is not None:
        loss = f"loss {training['last_loss']:.4f} nats per target"
        rows.append(("last step", f"{training['last_step']:,}, {loss}"))
    if training.get("held_out") is not None:
        values = dict(training["held_out"])
        step = values.pop("step")
        shown = ", ".join(f"{key} {value:.2f}" for key, value in values.items())
        rows.append(("validation", f"after step {step:,}, perplexity: {shown}"))
    return rows


def add_models_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer models`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per system")
    parser.add_argument(
        "--flops",
        action="store_true",
        help="also count parameters and operations per trained token at preset mini (seconds)",
    )


def run_models(arguments: argparse.Namespace) -> int:
    """Run `tracformer models`."""
    from tracformer.baselines import family_names

    names = family_names()
    systems = [
        {**describe_family(name), **(training_cost(name) if arguments.flops else {})}
        for name in names
    ]
    if arguments.json:
        for system in systems:
            output.put_json(system)
        return 0
    from tracformer.report.tables import Line, Table, print_tables

    lines = []
    for system in systems:
        modes = ", ".join(f"{mode} ({kind})" for mode, kind in system["modes"].items())
        size = "-" if system["parameters"] is None else f"{system['parameters'] / 1e6:.1f}M"
        cells = [modes, size, system["origin"]]
        if arguments.flops:
            bare, flops = (system.get(key) for key in COSTS)
            cells += ["-" if bare is None else f"{bare / 1e6:.2f}M"]
            cells += ["-" if flops is None else f"{flops / 1e6:.1f}"]
        lines.append(Line(system["name"], "", (*cells, system["summary"])))
    columns = ["modes (answer)", "parameters", "from"]
    columns += ["mini: parameters", "MFLOP per token"] if arguments.flops else []
    align = "lrl" + ("rr" if arguments.flops else "") + "l"
    caption = "parameters at the paper's size"
    if arguments.flops:
        caption += "; at preset mini without embeddings, and operations per trained token"
    table = Table(
        "systems",
        "systems",
        (*columns, "description"),
        tuple(lines),
        caption=caption,
        align=align,
    )
    print_tables([table])
    for system in systems:
        for mode, limit in system["limits"].items():
            output.put(f"  {system['name']}, mode {mode}: {limit}")
    return 0


def describe_family(name: str) -> dict[str, Any]:
    """Return the facts about a system, as `--json` prints them."""
    import torch

    from tracformer.baselines import find_family, origin_of

    family = find_family(name)
    kind = family.model_class
    preset = next((preset for preset in PAPER_PRESETS if preset in kind.config_class.presets), None)
    parameters: int | None = None
    if preset is not None:
        try:
            with torch.device("meta"):  # counts the parameters without allocating them
                parameters = kind(kind.config_class.preset(preset)).num_parameters()
        except ImportError:  # the network needs an optional package
            parameters = None
    return {
        "name": name,
        "origin": origin_of(name),
        "summary": family.summary,
        "modes": dict(kind.answers),
        "limits": dict(kind.limits),
        "objective": family.objective,
        "presets": list(kind.config_class.presets),
        "parameters": parameters,
    }


COSTS = ("mini_parameters_without_embeddings", "mini_flops_per_token")


def training_cost(name: str) -> dict[str, Any]:
    """Return size and operations per trained token of a system at preset mini.

    All systems have about the same size there.
    """
    from tracformer.baselines import find_family
    from tracformer.evaluation.flops import flops_per_token, parameters_of

    family = find_family(name)
    try:
        if "mini" not in family.config_class.presets:
            return {}
        config = family.config_class.preset("mini")
        costs = parameters_of(config), flops_per_token(config, family.objective)
    except ImportError:  # the network needs an optional package
        return {}
    return dict(zip(COSTS, costs, strict=True))


models = Command(MODELS_DESCRIPTION, add_models_arguments, run_models)
