"""Objectives, batches, the optimizer, and training against exact conditionals."""

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.take_off import GATE, SYSTEMS, measure, table
from numpy.typing import NDArray
from torch import nn

from tests.toys import random_batch, small_model
from tracformer import Tracformer
from tracformer.baselines import find_family
from tracformer.devices import Ranks
from tracformer.model.batch import Batch
from tracformer.training.objectives import (
    OBJECTIVES,
    MaskSampler,
    MicroBatch,
    Stream,
    low_discrepancy,
    parse_objective,
)
from tracformer.training.optimizer import Optimizer, build_optimizer, hidden_matrices, learning_rate
from tracformer.training.train_config import OptimizerConfig


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_targets(name: str) -> None:
    masks = MaskSampler(parse_objective(name), seed=1)
    modes = {part.mode for part in parse_objective(name).parts}
    for number in range(50):
        question = masks.draw(number, length=20)
        assert question.mode in modes
        assert question.context.shape == (20,)
        assert not question.context.all()


def test_shares_of_a_mixture() -> None:
    masks = MaskSampler(parse_objective("all-modes"), seed=0)
    modes = Counter(masks.draw(number, 16).mode for number in range(4000))
    for part in OBJECTIVES["all-modes"]:
        assert abs(modes[part.mode] / 4000 - part.share) < 0.03


def test_a_masking_depends_on_seed_and_number_only() -> None:
    first, second = (MaskSampler(parse_objective("all-modes"), seed=5) for _ in range(2))
    forwards = [first.draw(number, 30) for number in range(40)]
    backwards = [second.draw(number, 30) for number in reversed(range(40))][::-1]
    for a, b in zip(forwards, backwards, strict=True):
        assert a.mode == b.mode
        assert np.array_equal(a.context, b.context)
    other = MaskSampler(parse_objective("all-modes"), seed=6)
    assert any(
        not np.array_equal(a.context, other.draw(number, 30).context)
        for number, a in enumerate(forwards)
    )


def test_contexts_replace_those_of_car_and_ac_rows() -> None:
    objective = parse_objective("all-modes", "random:0.25")
    assert [part.contexts for part in objective.parts] == ["random:0.25", "random:0.25", "empty"]
    with pytest.raises(ValueError, match="fixes its own contexts"):
        parse_objective("ar", "random:0.25")


def test_fim_rows_have_one_blank_mostly_and_several_sometimes() -> None:
    masks = MaskSampler(parse_objective("fim"), seed=0)
    maskings = [masks.draw(number, 400) for number in range(2000)]
    holes = Counter(
        int((np.diff((~q.context).astype(int), prepend=0) == 1).sum())
        for q in maskings
        if q.mode == "car"
    )
    assert abs(sum(holes.values()) / 2000 - 0.5) < 0.04
    assert 0.75 < holes[1] / sum(holes.values()) < 0.85
    assert all(not q.context.any() for q in maskings if q.mode == "ar")


def test_diffusion_is_the_nelbo_of_the_any_order_model() -> None:
    """E over k uniform and a uniform subset of n/k * sum over targets = the bound averaged over all
    subsets, by enumeration.
    """
    n = 4
    model = small_model()
    tokens = torch.tensor([[1, 3, 0, 2]])
    exact = 0.0
    for k in range(1, n + 1):
        subsets = [mask for mask in range(2**n) if bin(mask).count("1") == k]
        for mask in subsets:
            context = torch.tensor([[not mask >> t & 1 for t in range(n)]])
            exact -= (
                float(model.log_prob(Batch(tokens, context), "ac").sum().detach())
                * n
                / k
                / len(subsets)
                / n
            )
    masks = MaskSampler(parse_objective("diffusion"), seed=3)
    maskings = [masks.draw(number, n) for number in range(3000)]
    assert all(question.count == n for question in maskings)
    contexts = torch.from_numpy(np.stack([question.context for question in maskings]))
    terms = -model.log_prob(Batch(tokens.expand(len(maskings), -1), contexts), "ac").sum(1)
    estimate = terms * torch.tensor([question.weight for question in maskings], dtype=torch.float64)
    error = float(estimate.std().detach()) / len(maskings) ** 0.5
    assert abs(float(estimate.mean().detach()) - exact) < 4 * error


def test_consecutive_low_discrepancy_points_cover_the_interval_evenly() -> None:
    for start in (0, 777):
        points = np.sort([low_discrepancy(9, number) for number in range(start, start + 64)])
        assert np.abs(points - (np.arange(64) + 0.5) / 64).max() < 3 / 64


class Uneven:
    """Rows of 5 to 40 tokens; a row's tokens are its number."""

    weights = None

    def __len__(self) -> int:
        return 64

    def get(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        lengths = 5 + (np.asarray(indices) * 29) % 36
        tokens = np.where(np.arange(40) < lengths[:, None], np.asarray(indices)[:, None], 0)
        return tokens, lengths


def stream(micro_batch: int) -> Stream:
    return Stream(
        Uneven(),
        MaskSampler(parse_objective("all-modes"), 0),
        32,
        micro_batch,
        0,
        Ranks(0, 1, torch.device("cpu")),
    )  # type: ignore[arg-type]


def maskings_of(groups: list[MicroBatch]) -> Counter[tuple[str, tuple[int, ...], tuple[bool, ...]]]:
    """Count the rows with their mode and context, in any order."""
    found: Counter[tuple[str, tuple[int, ...], tuple[bool, ...]]] = Counter()
    for group in groups:
        lengths = group.batch.lengths.tolist()
        for tokens, context, length in zip(
            group.batch.tokens.tolist(), group.batch.context.tolist(), lengths, strict=True
        ):
            found[group.mode, tuple(tokens[:length]), tuple(context[:length])] += 1
    return found


def padded(groups: list[MicroBatch]) -> int:
    return sum(group.batch.tokens.numel() for group in groups)


def test_maskings_do_not_depend_on_the_micro_batch_size() -> None:
    whole = stream(0).at(32)
    for size in (1, 5, 8):
        cut = stream(size).at(32)
        assert maskings_of(cut.micro_batches) == maskings_of(whole.micro_batches)
        assert (cut.count, cut.tokens) == (whole.count, whole.tokens)
        assert all(len(group.batch.tokens) <= size for group in cut.micro_batches)


def test_rows_of_similar_length_share_a_micro_batch() -> None:
    whole, cut = stream(0).at(0), stream(4).at(0)
    # against a batch in which each mode is as wide as its longest row
    assert (
        0
        <= padded(cut.micro_batches) - cut.tokens
        < 0.5 * (padded(whole.micro_batches) - whole.tokens)
    )
    modes = [group.mode for group in cut.micro_batches]
    assert modes == sorted(modes)  # each mode once


# ---- the optimizer


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


# ---- training on a source whose conditionals are known

ROOT = Path(__file__).parents[2]

ONE_EACH = {(system.family, system.mode): name for name, system in SYSTEMS.items()}.values()


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tracformer-car", "tracformer-ac"])
def test_tracformer_takes_off(name: str) -> None:
    holes = measure(name, steps=600, sequences=300)["holes"]
    assert holes["one"]["gain"] > 1.4 * GATE * holes["one"]["exact"]
    assert 0 < holes["half"]["kl"] < 0.2


@pytest.mark.parametrize("name", ONE_EACH)
def test_every_system_can_be_measured(name: str) -> None:
    """A short run of each:

    figures are finite, and no answer is nearer to the data than the truth by more than the sample's
    noise.
    """
    result = measure(name, steps=2, sequences=32, draws=8)
    for figures in result["holes"].values():
        assert -10.0 < figures["gain"] < figures["exact"] + 0.15
        assert figures["kl"] > -0.15
    assert not result["took_off"]


def test_the_document_shows_the_recorded_table() -> None:
    results = json.loads((ROOT / "results/take-off/hmm-16.json").read_text())
    assert set(results) == set(SYSTEMS)
    assert table(results) in (ROOT / "results/take-off/README.md").read_text()
