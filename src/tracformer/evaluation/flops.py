"""Count the operations of training, and make systems of equal size or cost.

**Weight products.** `weight_multiplies` counts products of activations with weight matrices in
closed form; attention, norms and the optimizer are left out. In units of d^2, forward:

    Tracformer   encoder layer    12 for each token and direction: q, k, v, out 4; feed-forward 8.
                                  With two directions, prefix and suffix: 24 for each token
                 decoder layer    2 for each token and direction: keys and values;
                                  10 for each target: q, out 2; feed-forward 8
    GPT-2, BERT  layer            12 for each token
    BART         encoder layer    12 for each token
                 decoder layer    16 for each token: self-attention 4, cross-attention 4,
                                  feed-forward 8
    BERT         before the head  1 for each target
    all          head             vocabulary / d for each target

A backward pass does twice the work of the forward pass, and a multiply-add is two operations: a
training step is 6 times the count. `at_equal_parameters` chooses the number of layers of another
system to match a Tracformer.

**All products.** `flops_per_token` counts any system by running it: all matrix products of a
forward and backward pass, attention included, for each token of the text. Its conventions:

- A multiply-add is two operations. Norms, softmax, rotations, embedding lookups, the optimizer, and
  the two or three keys of each query in a neighbours layer of the baselines are left out.
- Attention of a Tracformer counts the pairs of query and key of its geometry, because its kernels
  compute no others. Dense attention of other systems counts the whole matrix of scores, masked
  entries included, as PyTorch executes it.
- Rows that a system adds to the text (AC-GPT repeats the given tokens) are counted, and divided
  among the tokens of the text.
"""

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tracformer.attention import Layout
from tracformer.baselines import CAUSAL_LM, find_family
from tracformer.model import Tracformer
from tracformer.model.config import ModelConfig, TracformerConfig
from tracformer.training.objectives import MaskSampler, group_by_mode, parse_objective

FORWARD_AND_BACKWARD = 3
OPERATIONS = 2  # of a multiply-add
ROWS = 16  # sequences on which operations are counted
COUNTED = 1e11  # operations that counting those of a whole training may cost, about


def weight_multiplies(config: ModelConfig, tokens: int, targets: int, mode: str = "car") -> float:
    """Return the multiply-adds with weights of one forward pass.

    Args:
        config: Shape of a Tracformer, GPT-2, BERT or BART.
        tokens: Number of tokens.
        targets: Number of tokens that are predicted.
        mode: A Tracformer reads in one direction in mode `ar`, else in two.
    """
    shape: Any = config
    d, layers = shape.d_model, shape.n_layer
    head = config.vocab_size * d * targets
    if isinstance(config, TracformerConfig):
        directions = 1 if mode == "ar" else 2
        return float(layers * d**2 * (directions * (12 + 2) * tokens + 10 * targets) + head)
    if config.model_type == "gpt2":
        return float(12 * layers * d**2 * tokens + head)
    if config.model_type == "bert":
        return float(12 * layers * d**2 * tokens + d**2 * targets + head)
    if config.model_type == "bart":
        return float((12 + 16) * layers * d**2 * tokens + head)
    raise ValueError(
        f"the weight products of the system {config.model_type!r} are not known; it must be one "
        "of tracformer, gpt2, bert, bart"
    )


def training_operations(config: ModelConfig, tokens: int, targets: int, mode: str = "car") -> float:
    """Return the floating-point operations with weights of a forward and backward pass."""
    return OPERATIONS * FORWARD_AND_BACKWARD * weight_multiplies(config, tokens, targets, mode)


class CountedAttention:
    """Attention of a Tracformer that counts its products instead of computing them.

    It returns tensors of the right shape, so that gradients flow.
    """

    def __init__(self) -> None:
        self.multiplies = 0  # multiply-adds of scores and of weighted values, forward

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        """Count the encoder's products."""
        T = layout.length
        pairs = sum(
            T - offset for offset in (range(T) if offsets is None else offsets) if offset < T
        )
        self.multiplies += 2 * q.shape[0] * pairs * q.shape[2] * q.shape[3]
        return q + k + v

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        """Count the decoder's products."""
        before = layout.rows % layout.length  # keys on the left of each target
        sides = [before, layout.length - 1 - before][: layout.readings]
        pairs = sum(
            int((side + stride - 1).div(stride, rounding_mode="floor").sum()) for side in sides
        )
        self.multiplies += 2 * pairs * q.shape[1] * q.shape[2]
        return q + k.mean() + v.mean()


def flops_per_token(
    config: ModelConfig, objective: str, contexts: str = "", length: int = 0, rows: int = ROWS
) -> float:
    """Return the floating-point operations of training for each token, counted on a small batch.

    Args:
        config: Shape of the model.
        objective: Training objective, such as `car`.
        contexts: Context strategy; empty: the objective's own.
        length: Tokens of a sequence; 0: the model's max_length.
        rows: Number of sequences on which operations are counted.
    """
    length = length or config.max_length
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = find_family(config.model_type).model_class(config).train()
        attention = CountedAttention()
        for module in model.modules():
            if isinstance(module, Tracformer):
                module.attention = attention
        tokens = np.random.default_rng(0).integers(config.vocab_size, size=(rows, length))
        maskings = MaskSampler(parse_objective(objective, contexts), seed=0).draw_all(
            range(rows), [length] * rows
        )
        groups = group_by_mode(tokens, np.full(rows, length), maskings, [])
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            for group in groups:
                model.nll(group.batch, group.mode, weights=group.weights)[0].backward()
    products = counter.get_total_flops() + OPERATIONS * FORWARD_AND_BACKWARD * attention.multiplies
    return products / tokens.size


@lru_cache
def training_flops(
    config: ModelConfig, objective: str, contexts: str, length: int, tokens: int
) -> float | None:
    """Return the floating-point operations of a whole training, counted on a few rows.

    Args:
        config: Shape of the model.
        objective: Training objective, such as `car`.
        contexts: Context strategy; empty: the objective's own.
        length: Tokens of a sequence.
        tokens: Tokens that were trained on.

    Returns:
        The operations; None for an adapter, whose base model would have to be loaded.
    """
    if config.model_type == CAUSAL_LM:
        return None
    row = OPERATIONS * FORWARD_AND_BACKWARD * parameters_of(config) * length  # about
    rows = max(1, min(ROWS, int(COUNTED / row)))
    return tokens * flops_per_token(config, objective, contexts, length, rows)


def parameters_of(config: ModelConfig) -> int:
    """Return the number of parameters without embeddings; nothing is allocated."""
    with torch.device("meta"):
        return find_family(config.model_type).model_class(config).num_parameters(embeddings=False)


def deepened(
    config: ModelConfig, size: Callable[[ModelConfig], float], wanted: float
) -> ModelConfig:
    """Return a configuration with the number of layers that brings its size nearest to `wanted`.

    `size` must be a linear function of the number of layers.
    """

    def with_layers(layers: int) -> ModelConfig:
        return dataclasses.replace(config, n_layer=layers)  # type: ignore[call-arg]

    first, second = (size(with_layers(layers)) for layers in (1, 2))
    return with_layers(max(1, round(1 + (wanted - first) / (second - first))))


def at_equal_parameters(family: str, like: TracformerConfig) -> ModelConfig:
    """Return a system with about as many parameters, without embeddings, as a Tracformer.

    Its width is that of its preset of this size; the number of layers is chosen.
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


def training_mode(family: str) -> tuple[str, bool]:
    """Return the mode in which a system is trained, and whether every token is then a target."""
    return {
        "gpt2": ("ar", True),
        "bert": ("ac", False),
        "bart": ("car", False),
        "tracformer": ("car", False),
    }[family]


def _tied(family: str) -> dict[str, bool]:
    """Return the options that tie input and output embeddings, as in a Tracformer."""
    return {} if family == "gpt2" else {"tied": True}
