"""One training step of any system, timed in a fresh process: forward, backward, clipped gradients, AdamW."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.bench.flops import asked, training_operations
from tracformer.bench.measure import timed, watch_growth
from tracformer.bench.results import Figures
from tracformer.contexts import draw_contexts, parse
from tracformer.families import find_family
from tracformer.model import ConditionalModel, Tracformer, TracformerConfig
from tracformer.runtime import keep_freed_memory

HALF_HIDDEN = "span:p=0.5,mean=50"
SHORT = 128  # tokens of the step that warms up


def step(
    family: str,
    config: Mapping[str, Any],
    batch: int,
    length: int,
    precision: str = "float32",
    attention: str = "native",
    rounds: int = 3,
    recompute: bool = False,
) -> Figures:
    """Seconds of a whole step (the least of `rounds`, after a short one that warms up) and of its forward and backward; peak of bytes."""
    from tracformer.training.config import OptimizerConfig
    from tracformer.training.optimizer import build_optimizer

    keep_freed_memory()
    torch.manual_seed(0)
    with torch.device("meta"):
        build(family, config, attention)  # everything is imported before memory is watched
    grown = watch_growth()
    model = build(family, config, attention).train()
    model.checkpoint_activations = recompute
    mode, tokens, context = question(family, model, batch, length)
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(), fused=True)
    take_gradients(model, optimizer, tokens[:, :SHORT], hidden_from(context[:, :SHORT]), mode, precision)
    update(model, optimizer)
    whole, gradients = [], []
    for _ in range(rounds):
        forward_backward = timed(lambda: take_gradients(model, optimizer, tokens, context, mode, precision))
        gradients.append(forward_backward)
        whole.append(forward_backward + timed(lambda: update(model, optimizer)))
    targets = int((~context).sum())
    return {
        "seconds": min(whole),
        "forward_backward_seconds": min(gradients),
        "all_seconds": whole,
        "tokens": batch * length,
        "targets": targets,
        "operations": training_operations(model.config, batch * length, targets, mode),
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters(embeddings=False),
        "layers": len(model.blocks()),
        "config_width": config["d_model"],
        "peak_bytes": grown(),
    }


def build(family: str, config: Mapping[str, Any], attention: str) -> ConditionalModel:
    found = find_family(family)
    shape = found.config_class.from_dict({**config, "modes": tuple(config.get("modes", ()))})
    return Tracformer(shape, attention) if isinstance(shape, TracformerConfig) else found.model_class(shape)


def question(family: str, model: ConditionalModel, batch: int, length: int) -> tuple[str, Tensor, Tensor]:
    """A mode, random tokens, and half of them hidden in spans; a left-to-right model predicts every token."""
    mode, all_targets = asked(family)
    tokens = torch.randint(model.config.vocab_size, (batch, length))
    if all_targets:
        return mode, tokens, torch.zeros(batch, length, dtype=torch.bool)
    return mode, tokens, torch.from_numpy(draw_contexts(parse(HALF_HIDDEN), [length] * batch, 0, range(batch)))


def hidden_from(context: Tensor) -> Tensor:
    """The context with its first position asked, so that there is a target."""
    return context & (torch.arange(context.shape[1]) > 0)


def take_gradients(model: ConditionalModel, optimizer: Any, tokens: Tensor, context: Tensor, mode: str, precision: str) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else nullcontext():
        loss = model.loss(tokens, context, mode)
    loss.backward()


def update(model: ConditionalModel, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
