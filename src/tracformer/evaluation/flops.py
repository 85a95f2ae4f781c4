"""How many multiply-adds with weights a training step executes, and peers of equal size by that
count or by parameters.

Only products of activations with weight matrices count: not attention, norms or the optimiser. In
units of d^2, forward:

    Tracformer   encoder layer    12 a token and reading: q, k, v, out 4; feed-forward 8. Two
                 readings, prefix and suffix: 24 a token decoder layer    2 a token and reading:
                 keys and values; 10 a target: q, out 2; feed-forward 8 GPT-2, BERT  layer
                 12 a token BART         encoder layer    12 a token decoder layer    16 a token:
                 self-attention 4, cross-attention 4, feed-forward 8 BERT         before the head  1
                 a target all          head             vocabulary / d a target

A backward pass does twice the forward's work, and a multiply-add is two operations: a training step
is 6 times the count.

`flops_per_token` counts any system by running it: all matrix products of a forward and backward
pass, those of attention included, per token of the text. The conventions:

- A multiply-add is two operations. Norms, softmax, rotations, embedding lookups, the optimiser, and
  the two or three keys of each query in a neighbours layer of the baselines are left out.
- Attention of a Tracformer counts the pairs of query and key that its geometry names, as its
  kernels compute no others. Dense attention of other systems counts the whole matrix of scores,
  masked entries too, as PyTorch executes it.
- Rows that a system adds to the text (AC-GPT repeats the given tokens) are counted, and divided
  among the tokens of the text.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tracformer.attention import Layout
from tracformer.baselines import find_family
from tracformer.model import Tracformer
from tracformer.model.config import ModelConfig, TracformerConfig
from tracformer.training.batches import group_by_mode
from tracformer.training.objectives import Questioner, parse_objective

FORWARD_AND_BACKWARD = 3
OPERATIONS = 2  # a multiply-add
ROWS = 16  # sequences that are counted


def weight_multiplies(config: ModelConfig, tokens: int, targets: int, mode: str = "car") -> float:
    """Multiply-adds of one forward pass over so many tokens, of which some are targets."""
    shape: Any = config
    d, layers = shape.d_model, shape.n_layer
    head = config.vocab_size * d * targets
    if isinstance(config, TracformerConfig):
        readings = 1 if mode == "ar" else 2
        return float(layers * d**2 * (readings * (12 + 2) * tokens + 10 * targets) + head)
    if config.model_type == "gpt2":
        return float(12 * layers * d**2 * tokens + head)
    if config.model_type == "bert":
        return float(12 * layers * d**2 * tokens + d**2 * targets + head)
    if config.model_type == "bart":
        return float((12 + 16) * layers * d**2 * tokens + head)
    raise ValueError(
        f"weight products of the system {config.model_type!r} are not counted; counted: "
        "tracformer, gpt2, bert, bart"
    )


def training_operations(config: ModelConfig, tokens: int, targets: int, mode: str = "car") -> float:
    """Floating-point operations of the weight products in one forward and backward pass."""
    return OPERATIONS * FORWARD_AND_BACKWARD * weight_multiplies(config, tokens, targets, mode)


class CountedAttention:
    """Attention of a Tracformer that counts its products and computes none;
    gradients still flow.
    """

    def __init__(self) -> None:
        self.multiplies = 0  # multiply-adds of scores and of weighted values, forward

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        T = layout.length
        pairs = sum(
            T - offset for offset in (range(T) if offsets is None else offsets) if offset < T
        )
        self.multiplies += 2 * q.shape[0] * pairs * q.shape[2] * q.shape[3]
        return q + k + v

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        before = layout.rows % layout.length  # keys on the left of each target
        sides = [before, layout.length - 1 - before][: layout.readings]
        pairs = sum(
            int((side + stride - 1).div(stride, rounding_mode="floor").sum()) for side in sides
        )
        self.multiplies += 2 * pairs * q.shape[1] * q.shape[2]
        return q + k.mean() + v.mean()


def flops_per_token(
    config: ModelConfig, objective: str, contexts: str = "", length: int = 0
) -> float:
    """Return the floating-point operations of training per token of the text, counted on a small
    batch.

    Args:
        config: Shape of the model.
        objective: Training objective, such as `car`.
        contexts: Context strategy; empty: the objective's own.
        length: Tokens of a sequence; 0: the model's max_length.
    """
    length = length or config.max_length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = find_family(config.model_type).model_class(config).train()
        attention = CountedAttention()
        for module in model.modules():
            if isinstance(module, Tracformer):
                module.attention = attention
        tokens = np.random.default_rng(0).integers(config.vocab_size, size=(ROWS, length))
        questions = Questioner(parse_objective(objective, contexts), seed=0).ask_all(
            range(ROWS), [length] * ROWS
        )
        groups = group_by_mode(tokens, np.full(ROWS, length), questions, [])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            for group in groups:
                model.nll(group.batch, group.mode, weights=group.weights)[0].backward()
    products = counter.get_total_flops() + OPERATIONS * FORWARD_AND_BACKWARD * attention.multiplies
    return products / tokens.size


def parameters_of(config: ModelConfig) -> int:
    """Without embeddings; nothing is allocated."""
    with torch.device("meta"):
        return find_family(config.model_type).model_class(config).num_parameters(embeddings=False)


def deepened(
    config: ModelConfig, size: Callable[[ModelConfig], float], wanted: float
) -> ModelConfig:
    """The configuration with the number of layers whose size, a linear function of that number, is
    nearest to the wanted one.
    """
    with_layers = [dataclasses.replace(config, n_layer=layers) for layers in (1, 2)]  # type: ignore[call-arg]
    first, second = (size(each) for each in with_layers)
    layers = max(1, round(1 + (wanted - first) / (second - first)))
    return dataclasses.replace(config, n_layer=layers)  # type: ignore[call-arg]


def at_equal_parameters(family: str, like: TracformerConfig) -> ModelConfig:
    """The system at the width of its preset of that size, with the layers that bring its parameters
    without embeddings nearest to ours.
    """
    kind = find_family(family).config_class
    preset = "paper" if like.d_model >= 384 else "laptop" if like.d_model >= 150 else "tiny"
    shape = kind.preset(
        preset,
        vocab_size=like.vocab_size,
        max_length=like.max_length,
        dropout=like.dropout,
        **_tied(family),
    )
    return deepened(shape, parameters_of, parameters_of(like))


def asked(family: str) -> tuple[str, bool]:
    """The mode in which a system is trained here, and whether every token is a target: left to
    right there is no other way.
    """
    return {
        "gpt2": ("ar", True),
        "bert": ("ac", False),
        "bart": ("car", False),
        "tracformer": ("car", False),
    }[family]


def _tied(family: str) -> dict[str, bool]:
    """One table for input and output, as ours."""
    return {} if family == "gpt2" else {"tied": True}
