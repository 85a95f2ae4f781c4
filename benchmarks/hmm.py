"""Train a small model on a hidden Markov chain and compare it with the exact conditionals.

    python benchmarks/hmm.py            # a few minutes on two cores

The source's entropy is known for every hole, so the excess cross-entropy is the model's error, not the data's noise.
"""

import argparse

import numpy as np
import torch
from tqdm import trange

from tracformer import Tracformer, TracformerConfig
from tracformer.contexts import draw_contexts
from tracformer.contexts import parse as parse_strategy
from tracformer.objectives import Questioner, parse_objective
from tracformer.runtime import keep_freed_memory
from tracformer.synthetic.hmm import HiddenMarkov
from tracformer.training.batches import group_by_mode
from tracformer.training.config import OptimizerConfig
from tracformer.training.optimizer import build_optimizer, learning_rate

CONTEXTS = "span:p=0.5,mean=6"
LENGTH = 48
STEPS = 1200


def small_chain() -> HiddenMarkov:
    """Far from its own letter frequencies: 2.32 nats a symbol without a context, 1.79 with one like those in training."""
    return HiddenMarkov.random(states=8, symbols=16, seed=2, sharpness=0.1)


def small_model(chain: HiddenMarkov, mode: str) -> Tracformer:
    return Tracformer(
        TracformerConfig(vocab_size=chain.symbols, max_length=64, n_layer=6, n_head=2, d_model=64, n_max=8, init_std=0.08, modes=(mode,))
    )


def train(model: Tracformer, chain: HiddenMarkov, objective: str, steps: int = STEPS, batch: int = 32) -> None:
    config = OptimizerConfig(lr=3e-3, warmup=50, weight_decay=0.01)
    questioner = Questioner(parse_objective(objective, CONTEXTS), seed=0)
    optimizer = build_optimizer(model.parameters(), config, fused=True)
    rng = np.random.default_rng(1)
    model.train()
    for step in trange(steps, desc=f"training {objective}", mininterval=1.0):
        tokens = chain.sample(batch, LENGTH, rng)
        questions = questioner.ask_all(range(step * batch, (step + 1) * batch), [LENGTH] * batch)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, config)
        optimizer.zero_grad()
        for asked in group_by_mode(tokens, np.full(batch, LENGTH), questions, []):
            total, _ = model.nll(asked.tokens, asked.context, asked.mode)
            (total / sum(question.count for question in questions)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
    model.eval()


@torch.no_grad()
def excess(model: Tracformer, chain: HiddenMarkov, mode: str, strategy: str, sequences: int = 2000) -> tuple[float, float]:
    """Nats per target: the model's conditional cross-entropy and the true one, on the same sequences and contexts."""
    tokens = chain.sample(sequences, LENGTH, np.random.default_rng(2))
    context = draw_contexts(parse_strategy(strategy), [LENGTH] * sequences, 3, range(sequences))
    targets = int((~context).sum())
    ours = -sum(
        float(model.log_prob(torch.from_numpy(tokens[rows]), torch.from_numpy(context[rows]), mode).sum())
        for rows in (slice(start, start + 250) for start in range(0, sequences, 250))
    )
    if mode == "ac":
        picked = np.take_along_axis(chain.marginals(tokens, context), tokens[..., None], axis=2)[..., 0]
        true = -float(np.log(picked)[~context].sum())
    else:
        true = -float(chain.log_conditional(tokens, context).sum())
    return ours / targets, true / targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--modes", default="car,ac")
    arguments = parser.parse_args()
    keep_freed_memory()
    chain = small_chain()
    for mode in arguments.modes.split(","):
        torch.manual_seed(0)
        model = small_model(chain, mode)
        train(model, chain, mode, arguments.steps)
        print(f"{mode}, {model.num_parameters() / 1e6:.1f}M parameters, {arguments.steps} steps of 32 x {LENGTH}:")
        for strategy in (CONTEXTS, "span:p=0.2,mean=6", "span:p=0.8,mean=6", "span:p=0.5,mean=2", "[0.25,0.75]"):
            ours, true = excess(model, chain, mode, strategy)
            print(f"  {strategy:<20} model {ours:.4f}  truth {true:.4f}  ({100 * (ours / true - 1):+.2f}%) nats per target", flush=True)


if __name__ == "__main__":
    main()
