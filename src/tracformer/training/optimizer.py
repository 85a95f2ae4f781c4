"""AdamW, its schedule, and its state as named tensors."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tracformer.training.config import OptimizerConfig
from tracformer.training.distributed import local

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig, fused: bool) -> torch.optim.AdamW:
    """Weight decay on matrices only: vectors are biases and norms."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Linear warm-up, then a cosine from lr to final_lr at the last step."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, steps - 1 - config.warmup)
    return config.final_lr + 0.5 * (config.lr - config.final_lr) * (1.0 + math.cos(math.pi * min(1.0, progress)))


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """`exp_avg.NAME` and `exp_avg_sq.NAME` of every parameter that has taken a step; this rank's rows."""
    return {f"{moment}.{names[parameter]}": local(state[moment]) for parameter, state in optimizer.state.items() for moment in MOMENTS}


def restore_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor], step: int) -> None:
    """The inverse; `step` is the number of steps taken, the same for every parameter."""
    for parameter, name in names.items():
        state: dict[str, Tensor] = {"step": torch.tensor(float(step), dtype=torch.float32)}
        for moment in MOMENTS:
            state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            local(state[moment]).copy_(tensors[f"{moment}.{name}"])
        optimizer.state[parameter] = state
