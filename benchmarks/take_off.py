"""Train every system on a hidden Markov chain with known conditionals: does it use its context?

    python benchmarks/take_off.py --systems tracformer-car,ac-gpt      # two of them
    python benchmarks/take_off.py --json take-off.json                 # all; skips finished systems

Each system has about 0.6M parameters and trains for a few minutes on one core, on fresh sequences
of the exact source `hmm-16`. For three kinds of holes the table shows the gain over the frequencies
of single symbols, in nats per predicted symbol, next to the exact gain, and KL from the exact
conditional (for a bound, its excess over the exact joint).

**Take-off gate**: with one symbol predicted and all others given, a system must reach half of the
exact gain. A system that does not has not learned, and is not compared with others.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracformer.baselines import find_family
from tracformer.contexts import parse as parse_strategy
from tracformer.devices import keep_freed_memory
from tracformer.evaluation.exact import Pattern, compare, draw_pattern, one_missing
from tracformer.evaluation.exact_sources import ExactSource, find_source
from tracformer.evaluation.task import Subject
from tracformer.files import write_atomically
from tracformer.model import ConditionalModel
from tracformer.training.objectives import MaskSampler, group_by_mode, parse_objective
from tracformer.training.optimizer import build_optimizer, hidden_matrices, learning_rate
from tracformer.training.train_config import OptimizerConfig

SOURCE = "hmm-16"
CONTEXTS = "0.5*uniform+0.5*span:p=0.5,mean=12"
HOLES: dict[str, Pattern] = {
    "one": one_missing,
    "half": parse_strategy("random:0.5").draw,
    "spans": parse_strategy("span:p=0.5,mean=12").draw,
}
GATE = 0.5  # of the exact gain with one symbol hidden
STEPS = 1000
BATCH = 32  # sequences
DRAWS = 32  # of a bound, for each sequence
# Muon for the layers' matrices and AdamW for the rest, at one rate for all systems.
OPTIMIZER = OptimizerConfig(name="muon", lr=3e-3, matrix_lr=4e-3, warmup=100, weight_decay=0.01)


@dataclass(frozen=True)
class System:
    """A system of about 0.6M parameters.

    Attributes:
        family: Name in the registry.
        mode: Mode in which it is measured.
        shape: Fields of its configuration.
        objective: Training objective; empty for that of the mode.
    """

    family: str
    mode: str
    shape: Mapping[str, Any]
    objective: str = ""

    @property
    def trained_by(self) -> str:
        """The training objective."""
        return self.objective or self.mode


TRACFORMER = {"n_layer": 6, "n_head": 2, "d_model": 64, "n_max": 8, "init_std": 0.08}
PLAIN = {"n_layer": 5, "n_head": 3, "d_model": 96, "init_std": 0.06}
# as many encoder as decoder layers
PAIRED = {"n_layer": 5, "n_head": 2, "d_model": 64, "init_std": 0.08}
DIT = {"n_layer": 5, "n_head": 3, "d_model": 96, "d_condition": 32}
SPLIT = {"n_encoder": 2, "n_layer": 3, "n_head": 3, "d_model": 96, "init_std": 0.06}
NEAR = {"neighbours": 1}

SYSTEMS = {
    "tracformer-car": System("tracformer", "car", TRACFORMER),
    "tracformer-ac": System("tracformer", "ac", TRACFORMER),
    "full-encoder-car": System("tracformer", "car", {**TRACFORMER, "encoder": "full"}),
    "full-encoder-ac": System("tracformer", "ac", {**TRACFORMER, "encoder": "full"}),
    "dense-decoder-car": System("tracformer", "car", {**TRACFORMER, "decoder": "dense"}),
    "dense-decoder-ac": System("tracformer", "ac", {**TRACFORMER, "decoder": "dense"}),
    "dense-decoder+neighbours-car": System(
        "tracformer", "car", {**TRACFORMER, "decoder": "neighbours"}
    ),
    "dense-decoder+neighbours-ac": System(
        "tracformer", "ac", {**TRACFORMER, "decoder": "neighbours"}
    ),
    "bart": System("bart", "car", PAIRED),
    "bart-modern": System("bart-modern", "car", PAIRED),
    "bart-modern+neighbours": System("bart-modern", "car", {**PAIRED, **NEAR}),
    "bert": System("bert", "ac", PLAIN),
    "bert-modern": System("bert-modern", "ac", PLAIN),
    "bert-modern+neighbours": System("bert-modern", "ac", {**PLAIN, **NEAR}),
    "bert-bidir": System("bert-bidir", "ac", PLAIN),
    "bert-bidir-separate": System("bert-bidir", "ac", {**PLAIN, "n_layer": 3, "separate": True}),
    "bert-bidir-modern": System("bert-bidir-modern", "ac", PLAIN),
    "ac-gpt": System("ac-gpt", "car", PLAIN),
    "ac-gpt+neighbours": System("ac-gpt", "car", {**PLAIN, **NEAR}),
    "as-arm-car": System("as-arm", "car", PLAIN),
    "as-arm+neighbours-car": System("as-arm", "car", {**PLAIN, **NEAR}),
    "as-arm-ac": System("as-arm", "ac", PLAIN),
    "sigma-gpt-car": System("sigma-gpt", "car", PLAIN),
    "sigma-gpt-ac": System("sigma-gpt", "ac", PLAIN, "car"),
    "compact-car": System("compact", "car", PLAIN),
    "compact-ac": System("compact", "ac", PLAIN),
    "aligned-car": System("aligned", "car", SPLIT),
    "aligned-ac": System("aligned", "ac", SPLIT),
    "gpt2": System("gpt2", "ar", PLAIN),
    "gpt2-fim": System("gpt2-fim", "car", PLAIN, "fim"),
    "dit-ac": System("mdlm", "ac", DIT),
    "mdlm": System("mdlm", "diffusion", DIT, "denoise"),
    "mdlm-on-tracformer": System(
        "mdlm", "diffusion", {**TRACFORMER, "backbone": "tracformer"}, "denoise"
    ),
    "sedd": System("sedd", "diffusion", DIT, "denoise"),
    "d3pm": System("d3pm", "diffusion", DIT, "denoise"),
    "plaid": System("plaid", "diffusion", DIT, "denoise"),
}


def small_model(name: str, source: ExactSource) -> ConditionalModel:
    """Return a system with random weights."""
    system = SYSTEMS[name]
    kind = find_family(system.family).model_class
    torch.manual_seed(0)
    return kind(kind.config_class(vocab_size=source.symbols, max_length=64, **system.shape))


def train(model: ConditionalModel, source: ExactSource, objective: str, steps: int = STEPS) -> None:
    """Train on fresh sequences; all systems that read a context get the same kind of contexts."""
    config = OPTIMIZER
    contexts = "" if objective in ("denoise", "ar") else CONTEXTS
    masks = MaskSampler(parse_objective(objective, contexts), seed=0)
    optimizer = build_optimizer(
        model.parameters(), config, fused=True, matrices=hidden_matrices(model)
    )
    rng, lengths = np.random.default_rng(1), np.full(BATCH, source.length)
    model.train()
    for step in range(steps):
        tokens = source.sample(BATCH, rng)
        maskings = masks.draw_all(range(step * BATCH, (step + 1) * BATCH), lengths.tolist())
        optimizer.set_rate(learning_rate(step, steps, config))
        optimizer.zero_grad()
        for part in group_by_mode(tokens, lengths, maskings, []):
            total, _ = model.nll(part.batch, part.mode)
            (total / sum(question.count for question in maskings)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
    model.eval()


def frequencies(source: ExactSource) -> np.ndarray[Any, Any]:
    """Return (V,) log-frequencies of single symbols."""
    nothing = np.zeros((1, source.length), np.bool_)
    prior = source.log_marginal(np.zeros((1, source.length), np.int64), nothing)[0]  # (T, V)
    return np.log(np.exp(prior).mean(0))


def gains(
    model: ConditionalModel,
    mode: str,
    source: ExactSource,
    pattern: Pattern,
    sequences: int,
    draws: int = DRAWS,
) -> dict[str, float]:
    """Return nats per hidden symbol: gain over frequencies, the exact gain, KL from the truth."""
    subject = Subject(model=model, tokenizer=None, name="", mode=mode)
    tokens = source.sample(sequences, np.random.default_rng(2))
    context = draw_pattern(pattern, source.length, 3, range(sequences))
    parts = []
    for start in range(0, sequences, 64):
        rows = slice(start, min(start + 64, sequences))
        parts.append(
            compare(subject, source, tokens[rows], context[rows], range(start, rows.stop), draws, 0)
        )
    sums = {name: float(sum(part[name].sum() for part in parts)) for name in parts[0]}
    base, targets = -float(frequencies(source)[tokens[~context]].sum()), sums["targets"]
    away = sums["excess"] if "excess" in sums else sums["kl"]
    return {
        "gain": (base - sums["nll"]) / targets,
        "exact": (base - sums["truth"]) / targets,
        "kl": away / targets,
    }


def measure(
    name: str, steps: int = STEPS, sequences: int = 500, draws: int = DRAWS
) -> dict[str, Any]:
    """Train one system and measure it on every kind of holes."""
    source, system = find_source(SOURCE), SYSTEMS[name]
    model = small_model(name, source)
    began = time.process_time()
    train(model, source, system.trained_by, steps)
    seconds = time.process_time() - began
    holes = {
        hole: gains(model, system.mode, source, pattern, sequences, draws)
        for hole, pattern in HOLES.items()
    }
    return {
        "mode": system.mode,
        "kind": model.answers[system.mode],
        "parameters": model.num_parameters(),
        "steps": steps,
        "seconds": seconds,
        "holes": holes,
        "took_off": holes["one"]["gain"] >= GATE * holes["one"]["exact"],
    }


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table with one row for each system."""
    lines = [
        "| system | mode (answer) | parameters | minutes | "
        + " | ".join(f"{hole}: gain (exact), KL" for hole in HOLES)
        + " | take-off |",
        "|---" * (5 + len(HOLES)) + "|",
    ]
    for name, result in results.items():
        cells = [
            f"{each['gain']:.3f} ({each['exact']:.3f}), {each['kl']:.3f}"
            for each in result["holes"].values()
        ]
        verdict = "yes" if result["took_off"] else "did not learn"
        size, minutes = f"{result['parameters'] / 1e6:.2f}M", f"{result['seconds'] / 60:.1f}"
        lines.append(
            f"| {name} | {result['mode']} ({result['kind']}) | {size} | {minutes} | "
            f"{' | '.join(cells)} | {verdict} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the systems that are not in the file yet, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", default="all", help=f"all, or some of: {', '.join(SYSTEMS)}")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sequences", type=int, default=500)
    parser.add_argument(
        "--json",
        help="file for the figures; systems that are in it are not measured again",
    )
    arguments = parser.parse_args()
    keep_freed_memory()
    kept = Path(arguments.json) if arguments.json else None
    results: dict[str, Any] = (
        json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    )
    for name in SYSTEMS if arguments.systems == "all" else arguments.systems.split(","):
        if results.get(name, {}).get("steps") != arguments.steps:
            results[name] = measure(name, arguments.steps, arguments.sequences)
            print(table({name: results[name]}).splitlines()[-1], flush=True)
            if kept is not None:
                write_atomically(kept, json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
