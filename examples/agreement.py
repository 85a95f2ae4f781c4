"""Train a small model on generated stories, then fill blanks that need the text on both sides.

    python examples/agreement.py                # about two minutes
    python examples/agreement.py --steps 100    # a first look

A story's hero, thing and crowd are repeated later in the text (see `toy_stories.py`), so every fill
can be checked by rule.
"""

import argparse
import random
import sys

import torch
from torch import Tensor
from toy_stories import follows_the_rules, vocabulary, write_story

from tracformer import Batch, Tracformer, TracformerConfig, fill
from tracformer.devices import keep_freed_memory
from tracformer.progress import ProgressBar
from tracformer.rng import derived_seed

WORDS = vocabulary()
IDS = {word: i for i, word in enumerate(WORDS)}
SHOWN = 6
CHECKED = 200


def draw_stories(rng: random.Random, count: int) -> Tensor:
    """Return stories as token ids (count, T); a token is a word."""
    return torch.tensor([[IDS[word] for word in write_story(rng)] for _ in range(count)])


def draw_context(rng: random.Random, tokens: Tensor) -> Tensor:
    """Return which words are given: each story has two to five blanks of one to eight words."""
    context = torch.ones_like(tokens, dtype=torch.bool)
    for row in context:
        for _ in range(rng.randint(2, 5)):
            start = rng.randrange(len(row))
            row[start : start + rng.randint(1, 8)] = False
    return context


def train(
    model: Tracformer, rng: random.Random, steps: int, batch: int = 32, peak: float = 2e-3
) -> None:
    """Train on fresh stories."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    with ProgressBar("training", steps) as bar:
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = (
                peak * min(1.0, (step + 1) / 50) * (1.0 - 0.95 * step / steps)
            )
            tokens = draw_stories(rng, batch)
            loss = model.loss(Batch(tokens, draw_context(rng, tokens)), mode="car")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.update(note=f"{loss.item():.3f} nats per predicted word")
    model.eval()


def format_story(tokens: Tensor, context: Tensor, filled: Tensor) -> str:
    """Return a story with blanks, and as it was filled."""
    bold, plain = ("\033[1;36m", "\033[0m") if sys.stdout.isatty() else ("[", "]")
    holes = " ".join(
        WORDS[i] if c else "____" for i, c in zip(tokens.tolist(), context.tolist(), strict=True)
    )
    fills = " ".join(
        WORDS[i] if c else f"{bold}{WORDS[i]}{plain}"
        for i, c in zip(filled.tolist(), context.tolist(), strict=True)
    )
    verdict = "agrees" if follows_the_rules([WORDS[i] for i in filled.tolist()]) else "DISAGREES"
    return f"  {holes}\n  {fills}\n  ({verdict})\n"


def main() -> None:
    """Train, fill and check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=500,
        help="training steps of 32 stories each (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}; it must be at least 1")

    keep_freed_memory()
    torch.set_num_threads(1)  # a second thread does not help such a small model
    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    model = Tracformer(
        TracformerConfig(
            vocab_size=len(WORDS),
            max_length=64,
            n_layer=6,
            n_head=2,
            d_model=64,
            n_max=8,
            init_std=0.08,
            modes=("car",),
        )
    )
    print(
        f"A Tracformer of {model.num_parameters() / 1e6:.1f}M parameters learns stories from a "
        f"generator with {len(WORDS)} words."
    )
    train(model, rng, arguments.steps)

    tokens = draw_stories(rng, CHECKED)
    context = draw_context(rng, tokens)
    seeds = [derived_seed(arguments.seed, i) for i in range(CHECKED)]
    filled = fill(
        model, Batch(tokens, context), "car", seed=seeds
    ).tokens  # sampled from left to right
    guesses = torch.where(context, tokens, torch.randint(len(WORDS), tokens.shape))
    print(
        f"\nNew stories with blanks, and how the model fills them (the first {SHOWN} of "
        f"{CHECKED}):\n"
    )
    for row in range(SHOWN):
        print(format_story(tokens[row], context[row], filled[row]))
    agree = sum(follows_the_rules([WORDS[i] for i in row]) for row in filled.tolist())
    chance = sum(follows_the_rules([WORDS[i] for i in row]) for row in guesses.tolist())
    bits = (
        -model.log_prob(Batch(tokens, context), "car").sum().item()
        / (~context).sum().item()
        / 0.6931
    )
    print(f"{agree} of {CHECKED} filled stories keep every agreement (random words: {chance}).")
    print(f"The true words of the blanks cost {bits:.2f} bits each, by exact log-probability.")


if __name__ == "__main__":
    main()
