import math

import torch
from torch import nn

from tracformer.training.config import OptimizerConfig
from tracformer.training.optimizer import build_optimizer, learning_rate, optimizer_tensors, restore_optimizer


def test_schedule() -> None:
    config = OptimizerConfig(lr=1.0, final_lr=0.1, warmup=10)
    assert learning_rate(0, 101, config) == 0.1
    assert learning_rate(9, 101, config) == 1.0
    assert learning_rate(10, 101, config) == 1.0
    assert math.isclose(learning_rate(55, 101, config), 0.55)
    assert math.isclose(learning_rate(100, 101, config), 0.1)


def test_decay_on_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    decayed, free = build_optimizer(model.parameters(), OptimizerConfig(weight_decay=0.3), fused=False).param_groups
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert (decayed["weight_decay"], free["weight_decay"], len(free["params"])) == (0.3, 0.0, 3)


def test_state_as_named_tensors_restores_exactly() -> None:
    def run(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, start: int = 0) -> None:
        for step in range(start, steps):
            optimizer.zero_grad()
            model(torch.randn(5, 3, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()

    models = []
    for restart in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        optimizer = build_optimizer(model.parameters(), OptimizerConfig(), fused=True)
        run(3, model, optimizer)
        if restart:
            names = {p: n for n, p in model.named_parameters()}
            saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, names).items()}
            optimizer = build_optimizer(model.parameters(), OptimizerConfig(), fused=True)
            restore_optimizer(optimizer, names, saved, step=3)
        run(6, model, optimizer, start=3)
        models.append(model)
    assert torch.equal(models[0].weight, models[1].weight)
    assert torch.equal(models[0].bias, models[1].bias)
