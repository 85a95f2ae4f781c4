"""Use a Tracformer as a PyTorch module: train on token ids with a loop of your own, fill, score.

    python examples/tensors.py      # a minute on a CPU

A row is twelve random digits, then the same digits backwards. Hidden digits of the first half can
be read in the second.
"""

import torch
from torch import Tensor

from tracformer import Batch, Tracformer, TracformerConfig, fill

DIGITS = 12


def draw(rows: int) -> tuple[Tensor, Tensor]:
    """Return tokens (B, T), and which are given: a run in the first half is hidden."""
    digits = torch.randint(10, (rows, DIGITS))
    tokens = torch.cat((digits, digits.flip(1)), dim=1)
    position = torch.arange(2 * DIGITS)
    first, length = torch.randint(DIGITS, (2, rows, 1))
    hidden = (position >= first) & (position <= first + length) & (position < DIGITS)
    return tokens, ~hidden


def train(steps: int) -> Tracformer:
    """Train on fresh rows."""
    model = Tracformer(
        TracformerConfig(
            vocab_size=10, max_length=2 * DIGITS, n_layer=5, n_head=2, d_model=64, init_std=0.08
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(1, steps + 1):
        loss = model.loss(Batch(*draw(64)), mode="car")  # nats per hidden token
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}  loss {loss.item():.3f}")
    return model.eval()


def main(steps: int = 500) -> None:
    """Train, fill hidden tokens, and compare with the true ones."""
    torch.manual_seed(0)
    model = train(steps)
    tokens, context = draw(100)
    filled = fill(model, Batch(tokens, context), "car", seed=list(range(100))).tokens
    log_probs = model.log_prob(Batch(tokens, context), "car")  # (B, T), zero where given
    print(f"{(filled == tokens)[~context].float().mean():.0%} of the hidden digits are right")
    print(f"log p of the true ones: {log_probs.sum() / (~context).sum():.3f} nats per token")


if __name__ == "__main__":
    main()
