import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.toys import random_batch, small_model
from tracformer import Tracformer
from tracformer.baselines import find_family
from tracformer.model.batch import Batch
from tracformer.training.optimizer import Optimizer, build_optimizer, hidden_matrices, learning_rate
from tracformer.training.train_config import OptimizerConfig


def test_schedule() -> None:
    config = OptimizerConfig(lr=1.0, final_lr=0.1, warmup=10)
    assert learning_rate(0, 101, config) == 0.1
    assert learning_rate(9, 101, config) == 1.0
    assert learning_rate(10, 101, config) == 1.0
    assert math.isclose(learning_rate(55, 101, config), 0.55)
    assert math.isclose(learning_rate(100, 101, config), 0.1)


def test_constant_then_linear_decay() -> None:
    config = OptimizerConfig(lr=1.0, warmup=10, schedule="wsd", decay=0.5)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:10] == [(step + 1) / 10 for step in range(10)]
    assert set(rates[10:51]) == {1.0}
    falls = [before - after for before, after in pairwise(rates[50:])]
    assert falls == pytest.approx([1 / 50] * 49)
    assert rates[-1] == pytest.approx(1 / 50)  # the step after it would be at final_lr, which is 0
    assert (
        learning_rate(99, 100, OptimizerConfig(lr=1.0, final_lr=0.5, warmup=0, schedule="wsd"))
        > 0.5
    )


def test_every_group_follows_the_schedule() -> None:
    model = small_model()
    options = {"name": "muon", "lr": 3e-3, "matrix_lr": 1e-2, "warmup": 100, "schedule": "wsd"}
    config = OptimizerConfig(**options)
    optimizer = build_optimizer(model.parameters(), config, True, hidden_matrices(model))
    optimizer.set_rate(learning_rate(750, 1000, config))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([1.5e-3, 1.5e-3, 5e-3])


def test_decay_on_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    decayed, free = build_optimizer(
        model.parameters(), OptimizerConfig(weight_decay=0.3), fused=False
    ).param_groups
    assert [p.shape for p in decayed["params"]] == [(4, 3)]
    assert (decayed["weight_decay"], free["weight_decay"], len(free["params"])) == (0.3, 0.0, 3)


def optimizer_of(model: Tracformer, **changes: float | str) -> Optimizer:
    return build_optimizer(
        model.parameters(), OptimizerConfig(**changes), fused=True, matrices=hidden_matrices(model)
    )


def take_steps(model: Tracformer, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        tokens, context, lengths = random_batch(model, 2, 8, seed=step)
        optimizer.zero_grad()
        model.loss(Batch(tokens, context & (torch.arange(8) > 0), lengths), "car").backward()
        optimizer.set_rate(1e-2 / (1 + step))
        optimizer.step()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_as_named_tensors_restores_exactly(name: str) -> None:
    models = []
    for restart in (False, True):
        model = small_model()
        optimizer = optimizer_of(model, name=name)
        take_steps(model, optimizer, range(3))
        if restart:
            names = {p: n for n, p in model.named_parameters()}
            saved = {key: tensor.clone() for key, tensor in optimizer.tensors(names).items()}
            optimizer = optimizer_of(model, name=name)
            assert optimizer.tensors(names) == {}
            assert sorted(saved) == sorted(optimizer.tensor_names(names))
            optimizer.restore(names, saved, step=3)
        take_steps(model, optimizer, range(3, 6))
        models.append(model.state_dict())
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


def test_muon_takes_the_matrices_of_the_layers_and_nothing_else() -> None:
    model = small_model()
    names = {p: n for n, p in model.named_parameters()}
    matrices = {names[p] for p in hidden_matrices(model)}
    assert matrices == {n for p, n in names.items() if p.dim() == 2} - {"embedding.weight"}
    kept = optimizer_of(model, name="muon").tensor_names(names)
    expected = {f"momentum_buffer.{n}" for n in matrices}
    expected |= {
        f"{moment}.{n}"
        for n in names.values()
        if n not in matrices
        for moment in ("exp_avg", "exp_avg_sq")
    }
    assert len(kept) == len(expected)
    assert set(kept) == expected


def test_muon_finds_the_matrices_of_gpt2() -> None:
    pytest.importorskip("transformers")
    family = find_family("gpt2")
    model = family.model_class(family.config_class.preset("tiny", vocab_size=11))
    names = {p: n for n, p in model.named_parameters()}
    found = [names[p] for p in hidden_matrices(model)]
    assert len(found) == 4 * len(model.blocks())  # qkv, out, up, down
    assert all(".h." in f".{name}" for name in found)


def test_tables_and_odd_matrices_inside_a_layer_are_left_out() -> None:
    model = small_model()
    before = len(hidden_matrices(model))
    model.encoder[0].positions = nn.Embedding(4, 8)
    model.encoder[0].head_bias = nn.Parameter(torch.zeros(2, 4))
    assert len(hidden_matrices(model)) == before


def test_a_matrix_shared_with_an_embedding_or_used_twice() -> None:
    class Tied(Tracformer):
        def embedding_tables(self) -> list[torch.Tensor]:
            return [self.embedding.weight, self.encoder[0].qkv.weight]

    model = small_model()
    model.__class__ = Tied
    model.encoder[1].out.weight = model.encoder[2].out.weight
    matrices = hidden_matrices(model)
    assert not any(p is model.encoder[0].qkv.weight for p in matrices)
    assert sum(p is model.encoder[2].out.weight for p in matrices) == 1


def test_muon_steps_follow_the_schedule_at_the_height_of_matrix_lr() -> None:
    model = small_model()
    optimizer = optimizer_of(model, name="muon", lr=1e-3, matrix_lr=4e-3)
    optimizer.set_rate(5e-4)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-4, 5e-4, 2e-3])
    assert OptimizerConfig(name="muon", lr=1e-3).rate_of_matrices == 1e-3


def test_a_muon_step_is_nearly_orthogonal_and_of_adamws_size() -> None:
    """Singular values of the step, over lr and 0.2 sqrt(max(rows, columns)), lie near one, as
    Newton-Schulz leaves them.
    """
    model = small_model(d_model=16)
    weight = model.decoder[0].feedforward.up.weight
    before = weight.detach().clone()
    take_steps(model, optimizer_of(model, name="muon", lr=1e-2, weight_decay=0.0), range(1))
    step = (before - weight.detach()) / (1e-2 * 0.2 * max(weight.shape) ** 0.5)
    values = torch.linalg.svdvals(step)
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_a_model_without_matrices_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"optimizer\.name is 'muon', but the model has no linear maps"
    ):
        build_optimizer(nn.LayerNorm(3).parameters(), OptimizerConfig(name="muon"), fused=False)
