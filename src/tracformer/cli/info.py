"""What a model is: its system, size, modes and what their numbers mean, tokeniser, files; and how
it was trained, where that is known.

tracformer info runs/stories
tracformer info --model runs/stories/best --json
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracformer.cli import arguments as texts
from tracformer.cli import output as show

if TYPE_CHECKING:
    from tracformer.generation.language_model import LanguageModel

ANSWERS = {
    "exact": "exact joint probability of all targets",
    "marginal": "marginal of each target; any order",
    "bound": "lower bound on the joint probability",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="a model's folder, or a run's")
    texts.add_model(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.folder and arguments.model:
        raise ValueError(
            f"two models are named, {arguments.folder} and --model {arguments.model}; leave one of "
            "them out"
        )
    from tracformer.loading import find_folder

    lm = texts.open_model(arguments.folder or arguments.model or texts.default_model())
    facts = describe(lm, find_folder(lm.name))
    if arguments.json:
        show.put_json(facts)
    else:
        show.put("\n".join(_lines(facts)))
    return 0


def describe(lm: "LanguageModel", folder: Path) -> dict[str, Any]:
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
        "training": training_summary(folder),
    }


def training_summary(folder: Path) -> dict[str, Any] | None:
    """From the run that the model's folder lies in: its settings, and the last things it logged."""
    run = next(
        (place for place in (folder, folder.parent) if (place / "train.json").is_file()), None
    )
    if run is None:
        return None
    from tracformer.training.log import perplexities, read_log

    try:
        settings = json.loads((run / "train.json").read_text())
    except ValueError as error:
        raise ValueError(f"{run / 'train.json'} is not valid JSON: {error}") from error
    log = read_log(run / "log.jsonl") if (run / "log.jsonl").is_file() else []
    last = {record["kind"]: record for record in log}
    kept = ("objective", "contexts", "steps", "batch", "length", "seed", "ema", "init")
    return {
        "run": str(run),
        "data": settings.get("data", {}).get("source", ""),
        **{key: settings[key] for key in kept if key in settings},
        "last_step": last["train"]["step"] if "train" in last else None,
        "last_loss": last["train"].get("loss") if "train" in last else None,
        "held_out": {"step": last["eval"]["step"], **perplexities(last["eval"])}
        if "eval" in last
        else None,
    }


def _dtypes(folder: Path) -> str:
    """As stored; a model is computed in float32 unless told otherwise."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= {str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    long = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return (
        ", ".join(sorted(long.get(name, name) for name in names))
        or "another format than safetensors"
    )


def _lines(facts: dict[str, Any]) -> list[str]:
    tokenizer, training = facts["tokenizer"], facts["training"]
    size, bare = facts["parameters"], facts["parameters_without_embeddings"]
    lines = [
        f"{facts['folder']}: {facts['system']}",
        f"  parameters   {size:,} ({bare:,} without embeddings), stored as {facts['dtype']}",
        f"  length       at most {facts['max_length']:,} tokens",
        f"  vocabulary   {facts['vocab_size']:,} tokens",
        f"  tokeniser    {tokenizer['kind']}, fingerprint {tokenizer['fingerprint'][:12]}",
    ]
    for mode, told in facts["modes"].items():
        limit = f"; {told['limit']}" if told["limit"] else ""
        lines.append(f"  mode {mode:<7} {ANSWERS.get(told['answer'], told['answer'])}{limit}")
    if facts["untrained_modes"]:
        lines.append(f"  not trained  {', '.join(facts['untrained_modes'])}")
    lines += [f"  file         {name}, {size:,} bytes" for name, size in facts["files"].items()]
    if training is not None:
        lines.append(
            f"  training     {training['run']}: {training.get('objective', '')}, "
            f"{training.get('steps', 0):,} steps of "
            f"{training.get('batch', 0)} x {training.get('length', 0)} tokens of {training['data']}"
        )
        if training["last_step"] is not None:
            lines.append(
                f"  last step    {training['last_step']:,}, loss {training['last_loss']:.4f} nats "
                "per target"
            )
        if training["held_out"] is not None:
            told = ", ".join(
                f"{key} {value:.2f}" for key, value in training["held_out"].items() if key != "step"
            )
            lines.append(
                f"  held out     after step {training['held_out']['step']:,}, perplexity: {told}"
            )
    return lines
