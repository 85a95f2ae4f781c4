"""AdamW, or Muon for the layers' matrices with AdamW for the other parameters.

This file has the optimizer, its state as named tensors, and the learning-rate schedules.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.devices import local
from tracformer.model import ConditionalModel
from tracformer.training.clock import Decay, parse_decays, share_at
from tracformer.training.train_config import OptimizerConfig

MOMENTS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
}


class Optimizer:
    """One or two of torch's optimizers that step together, each for its own parameters.

    State tensors are named `exp_avg.NAME`, `exp_avg_sq.NAME` and `momentum_buffer.NAME`.

    Args:
        name: "adamw" or "muon".
        parts: The optimizers.
    """

    def __init__(self, name: str, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.name, self.parts = name, parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    def set_rate(self, rate: float) -> None:
        """Set the learning rate; each group scales it by its `lr_scale`."""
        for group in self.param_groups:
            group["lr"] = rate * group["lr_scale"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        """Update the parameters."""
        for part in self.parts:
            part.step()

    def tensor_names(self, names: Mapping[Tensor, str]) -> list[str]:
        """Return the names that `tensors` has once every parameter has taken a step."""
        return [
            f"{moment}.{names[parameter]}"
            for part, parameter in self._owned()
            for moment in MOMENTS[type(part)]
        ]

    def tensors(self, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
        """Return this rank's rows of the moments of every parameter that has taken a step."""
        return {
            f"{moment}.{names[parameter]}": local(part.state[parameter][moment])
            for part, parameter in self._owned()
            if parameter in part.state
            for moment in MOMENTS[type(part)]
        }

    def restore(
        self, names: Mapping[Tensor, str], tensors: Mapping[str, Tensor], step: int
    ) -> None:
        """Set the state to what `tensors` returned after `step` steps."""
        for part, parameter in self._owned():
            state: dict[str, Tensor] = {}
            if isinstance(part, torch.optim.AdamW):
                # torch keeps the step count on this device
                where = parameter.device if part.defaults["fused"] else "cpu"
                state["step"] = torch.tensor(float(step), dtype=torch.float32, device=where)
            for moment in MOMENTS[type(part)]:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                local(state[moment]).copy_(tensors[f"{moment}.{names[parameter]}"])
            part.state[parameter] = state

    def _owned(self) -> Iterator[tuple[torch.optim.Optimizer, nn.Parameter]]:
        return (
            (part, parameter)
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        )


def build_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimizerConfig,
    fused: bool,
    matrices: Sequence[nn.Parameter] = (),
) -> Optimizer:
    """Return the optimizer of a configuration. Weight decay applies to matrices only.

    Args:
        parameters: All parameters.
        config: Optimizer options.
        fused: Use torch's fused AdamW.
        matrices: Those of the parameters that Muon updates, see `hidden_matrices`.
    """
    muon = config.name == "muon"
    if muon and not matrices:
        raise ValueError(
            "optimizer.name is 'muon', but the model has no linear maps in its layers for it; use "
            "optimizer.name=adamw"
        )
    taken = {id(matrix) for matrix in matrices} if muon else set()
    rest = [p for p in parameters if id(p) not in taken]
    groups = [
        {
            "params": [p for p in rest if p.dim() >= 2],
            "weight_decay": config.weight_decay,
            "lr_scale": 1.0,
        },
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    parts: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=fused)
    ]
    if muon:
        parts.append(
            torch.optim.Muon(
                [{"params": list(matrices), "lr_scale": config.rate_of_matrices / config.lr}],
                lr=config.rate_of_matrices,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                nesterov=config.nesterov,
                # scales steps by 0.2 sqrt(max(rows, columns)), to AdamW's size, so that the
                # learning rates of AdamW apply
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return Optimizer(config.name, parts)


def hidden_matrices(model: ConditionalModel) -> list[nn.Parameter]:
    """Return the weights of the linear maps inside the layers.

    Embedding and position tables, heads and biases are not among them. A linear map is recognised
    by its two-dimensional `weight`, since not every library uses `nn.Linear` (GPT-2 in
    `transformers` has `Conv1D`).
    """
    tables = {id(table) for table in model.embedding_tables()}
    maps = [
        module
        for block in model.blocks()
        for module in block.modules()
        if not isinstance(module, nn.Embedding)
    ]
    weights = dict.fromkeys(module._parameters.get("weight") for module in maps)  # shared ones once
    return [
        weight
        for weight in weights
        if weight is not None
        and weight.requires_grad
        and weight.dim() == 2
        and id(weight) not in tables
    ]


def learning_rate(
    step: int, steps: int, config: OptimizerConfig, decays: Sequence[Decay] = ()
) -> float:
    """Return the learning rate of a step, counted from 0: linear warm-up, then the schedule.

    `cosine` falls from lr to final_lr at the last step. `wsd` stays at lr and falls linearly over
    the last `decay` of all steps; it would reach final_lr one step after the last. A run that is
    ended by the clock gives its `decays` instead, and one that repeats it `optimizer.decays`.

    Args:
        step: Number of steps taken before this one.
        steps: Steps of the whole run.
        config: Optimizer options.
        decays: Decays that a clock has begun.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if decays or config.decays:
        share = share_at(decays or parse_decays(config.decays), step)
        return config.final_lr + (config.lr - config.final_lr) * share
    if config.schedule == "wsd":
        left = min(1.0, (steps - step) / max(1.0, config.decay * steps))
        return config.final_lr + (config.lr - config.final_lr) * max(0.0, left)
    progress = (step - config.warmup) / max(1, steps - 1 - config.warmup)
    cosine = math.cos(math.pi * min(1.0, progress))
    return config.final_lr + 0.5 * (config.lr - config.final_lr) * (1.0 + cosine)
