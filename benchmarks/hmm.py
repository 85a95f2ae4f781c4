"""Train every system on a hidden Markov chain and compare it with the exact conditionals.

    python benchmarks/hmm.py                                  # Tracformer in CAR and AC mode, a few minutes
    python benchmarks/hmm.py --systems all --json hmm.json    # every system, about half an hour; resumes where it was cut

The source's conditionals are known for every hole, so the excess cross-entropy is the model's error, not the data's noise. Each kind of
answer is held against its own truth: exact joints and bounds against log p(x_R | x_C), marginals against p(x_t | x_C), plain AR against
p(x_t | x_<t).
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import trange

from tracformer.contexts import draw_contexts
from tracformer.contexts import parse as parse_strategy
from tracformer.families import find_family
from tracformer.files import write_atomically
from tracformer.model import ConditionalModel
from tracformer.objectives import Questioner, parse_objective
from tracformer.runtime import keep_freed_memory
from tracformer.synthetic.hmm import HiddenMarkov
from tracformer.training.batches import group_by_mode
from tracformer.training.config import OptimizerConfig
from tracformer.training.optimizer import build_optimizer, learning_rate

CONTEXTS = "span:p=0.5,mean=6"
OTHERS = ("span:p=0.2,mean=6", "span:p=0.8,mean=6", "span:p=0.5,mean=2", "[0.25,0.75]")  # unlike those in training
LENGTH = 48
STEPS = 1200
DRAWS = 32  # of a bound, for each sequence


@dataclass(frozen=True)
class System:
    family: str
    shape: Mapping[str, Any]  # about 0.6M parameters each
    objective: str
    modes: tuple[str, ...]  # asked after training


TRACFORMER = {"n_layer": 6, "n_head": 2, "d_model": 64, "n_max": 8, "init_std": 0.08}
WIDE = {"n_layer": 5, "n_head": 3, "d_model": 96, "init_std": 0.06}
DIT = {"n_layer": 5, "n_head": 3, "d_model": 96, "d_condition": 32}

SYSTEMS = {
    "tracformer-car": System("tracformer", TRACFORMER, "car", ("car",)),
    "tracformer-ac": System("tracformer", TRACFORMER, "ac", ("ac",)),
    "tracformer-ar": System("tracformer", TRACFORMER, "ar", ("ar",)),
    "full-encoder-car": System("tracformer", {**TRACFORMER, "encoder": "full"}, "car", ("car",)),
    "full-encoder-ac": System("tracformer", {**TRACFORMER, "encoder": "full"}, "ac", ("ac",)),
    "bart": System("bart", {"n_layer": 5, "n_head": 2, "d_model": 64, "init_std": 0.08}, "car", ("car",)),
    "bert": System("bert", WIDE, "ac", ("ac",)),
    "bert-bidir": System("bert-bidir", WIDE, "ac", ("ac",)),
    "gpt2": System("gpt2", WIDE, "ar", ("ar",)),
    "gpt2-fim": System("gpt2-fim", WIDE, "fim", ("car", "ar")),
    "mdlm": System("mdlm", DIT, "denoise", ("diffusion", "ac")),
    "mdlm-on-tracformer": System("mdlm", {**TRACFORMER, "backbone": "tracformer"}, "denoise", ("diffusion", "ac")),
    "sedd": System("sedd", DIT, "denoise", ("diffusion", "ac")),
    "d3pm": System("d3pm", DIT, "denoise", ("diffusion", "ac")),
    "plaid": System("plaid", DIT, "denoise", ("diffusion",)),
}


def small_chain() -> HiddenMarkov:
    """Far from its own letter frequencies: 2.32 nats a symbol without a context, 1.79 with one like those in training."""
    return HiddenMarkov.random(states=8, symbols=16, seed=2, sharpness=0.1)


def small_model(chain: HiddenMarkov, name: str) -> ConditionalModel:
    system = SYSTEMS[name]
    family = find_family(system.family)
    modes = tuple(mode for mode in system.modes if mode in family.config_class.possible_modes)
    torch.manual_seed(0)
    return family.model_class(family.config_class(**{"vocab_size": chain.symbols, "max_length": 64, "modes": modes, **system.shape}))


def train(model: ConditionalModel, chain: HiddenMarkov, objective: str, steps: int = STEPS, batch: int = 32) -> None:
    """AdamW on fresh sequences. Systems that are asked with a context learn on contexts of one kind; diffusion draws its own noise."""
    config = OptimizerConfig(lr=3e-3, warmup=50, weight_decay=0.01)
    questioner = Questioner(parse_objective(objective, CONTEXTS if objective in ("car", "ac", "fim") else ""), seed=0)
    optimizer = build_optimizer(model.parameters(), config, fused=True)
    rng = np.random.default_rng(1)
    model.train()
    for step in trange(steps, desc=f"training {objective}", mininterval=1.0):
        tokens = chain.sample(batch, LENGTH, rng)
        questions = questioner.ask_all(range(step * batch, (step + 1) * batch), [LENGTH] * batch)
        optimizer.set_rate(learning_rate(step, steps, config))
        optimizer.zero_grad()
        for asked in group_by_mode(tokens, np.full(batch, LENGTH), questions, []):
            total, _ = model.nll(asked.tokens, asked.context, asked.mode)
            (total / sum(question.count for question in questions)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
    model.eval()


@torch.no_grad()
def excess(
    model: ConditionalModel, chain: HiddenMarkov, mode: str, strategy: str, sequences: int = 2000, draws: int = DRAWS
) -> tuple[float, float]:
    """Nats per target: the model's cross-entropy (or bound on it) and the true one, on the same sequences and contexts."""
    tokens = chain.sample(sequences, LENGTH, np.random.default_rng(2))
    context = draw_contexts(parse_strategy(strategy), [LENGTH] * sequences, 3, range(sequences))
    targets = int((~context).sum())
    ours = -sum(
        float(model.log_prob(torch.from_numpy(tokens[rows]), torch.from_numpy(context[rows]), mode, draws=draws).sum())
        for rows in (slice(start, start + 250) for start in range(0, sequences, 250))
    )
    return ours / targets, -true_log_prob(chain, tokens, context, mode) / targets


def true_log_prob(chain: HiddenMarkov, tokens: Any, context: Any, mode: str) -> float:
    """Summed over all targets: of each alone (ac), from the left alone (ar), or of all together."""
    if mode == "ac":
        picked = np.take_along_axis(chain.marginals(tokens, context), tokens[..., None], axis=2)[..., 0]
        return float(np.log(picked)[~context].sum())
    if mode == "ar":
        return float(chain.log_next(tokens, np.ones_like(context))[~context].sum())
    return float(chain.log_conditional(tokens, context).sum())


def measure(
    name: str, chain: HiddenMarkov, steps: int, sequences: int, strategies: Sequence[str] = (CONTEXTS, *OTHERS), draws: int = DRAWS
) -> dict[str, Any]:
    model = small_model(chain, name)
    train(model, chain, SYSTEMS[name].objective, steps)
    figures = {}
    for mode in SYSTEMS[name].modes:
        asked = {}
        for strategy in strategies:
            ours, true = excess(model, chain, mode, strategy, sequences, draws)
            asked[strategy] = {"model": ours, "truth": true}
        figures[mode] = {"kind": model.answers[mode], "contexts": asked}
    return {"parameters": model.num_parameters(), "steps": steps, "sequences": sequences, "modes": figures}


def table(results: Mapping[str, Any]) -> str:
    """Markdown: excess over the truth in percent, one row for each system and mode."""
    strategies = (CONTEXTS, *OTHERS)
    lines = [
        "| system | mode | answer | parameters | " + " | ".join(f"`{s}`" for s in strategies) + " |",
        "|---" * (4 + len(strategies)) + "|",
    ]
    for name, result in results.items():
        for mode, asked in result["modes"].items():
            cells = [f"{100 * (c['model'] / c['truth'] - 1):+.1f}%" for c in (asked["contexts"][s] for s in strategies)]
            lines.append(f"| {name} | {mode} | {asked['kind']} | {result['parameters'] / 1e6:.2f}M | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="tracformer-car,tracformer-ac", help=f"all, or some of: {', '.join(SYSTEMS)}")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sequences", type=int, default=2000)
    parser.add_argument("--json", help="keep each system's figures in this file; those already in it are not measured again")
    arguments = parser.parse_args()
    keep_freed_memory()
    chain, kept = small_chain(), Path(arguments.json) if arguments.json else None
    results: dict[str, Any] = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    for name in SYSTEMS if arguments.systems == "all" else arguments.systems.split(","):
        if results.get(name, {}).get("steps") != arguments.steps:
            results[name] = measure(name, chain, arguments.steps, arguments.sequences)
            if kept is not None:
                write_atomically(kept, json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
