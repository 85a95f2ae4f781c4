"""The count of weight products against PyTorch's own counter, and the sizes of the peers."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tracformer import Tracformer, TracformerConfig
from tracformer.attention import Layout
from tracformer.baselines import find_family
from tracformer.baselines.mdlm import MDLMConfig
from tracformer.bench.training_speed import build
from tracformer.evaluation.flops import (
    at_equal_parameters,
    flops_per_token,
    parameters_of,
    training_mode,
    training_operations,
    weight_multiplies,
)
from tracformer.geometry import encoder_offsets
from tracformer.model.batch import Batch

ATEN = torch.ops.aten
SMALL = {"vocab_size": 11, "max_length": 32, "n_layer": 2, "n_head": 2, "d_model": 8}


class NoProducts:
    """Passes gradients to queries, keys and values without a matrix product: what is left to count
    are the weights.
    """

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        return q + k + v

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        return q + k.sum() + v.sum()


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("tracformer", "car"),
        ("tracformer", "ac"),
        ("tracformer", "ar"),
        ("gpt2", "ar"),
        ("bert", "ac"),
        ("bart", "car"),
    ],
)
def test_as_many_as_torch_counts(family: str, mode: str) -> None:
    config = {**SMALL, "n_layer": 5} if family == "tracformer" else SMALL
    model = build(family, config, "reference").train()
    if isinstance(model, Tracformer):
        model.attention = NoProducts()
    tokens = torch.randint(11, (2, 32))
    context = torch.rand(2, 32) < 0.5
    context[0, 0] = False
    if training_mode(family)[1]:
        context = torch.zeros_like(context)
    with FlopCounterMode(display=False) as counter:
        model.loss(Batch(tokens, context), mode).backward()
    by_operation = counter.get_flop_counts()["Global"]
    # attention's products are batched: bmm and others
    counted = sum(by_operation.get(operation, 0) for operation in (ATEN.mm, ATEN.addmm))
    assert counted == training_operations(model.config, 64, int((~context).sum()), mode)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("tracformer", "car"),
        ("tracformer", "ar"),
        ("gpt2", "ar"),
        ("bert", "ac"),
        ("ac-gpt", "car"),
    ],
)
def test_any_system_is_counted_by_running_it(family: str, mode: str) -> None:
    """Weight products, and beside them those of attention: for a Tracformer the pairs of its
    geometry, else all pairs.
    """
    T = 32
    config = find_family(family).config_class.from_dict(
        {**SMALL, "n_layer": 5 if family == "tracformer" else 2}
    )
    counted = flops_per_token(config, mode, "span:p=0.5,mean=4" if mode != "ar" else "", T)
    if family == "ac-gpt":  # more rows than tokens
        plain = flops_per_token(find_family("gpt2").config_class.from_dict(SMALL), "ar", "", T)
        assert counted > 1.2 * plain
        return
    targets = 1.0 if mode == "ar" else 0.5
    weights = training_operations(config, T, round(targets * T), mode) / T
    if isinstance(config, TracformerConfig):
        offsets = [encoder_offsets(layer, config.n_max) for layer in range(1, 6)]
        pairs = sum(T - offset for each in offsets for offset in each if offset < T) / T
        readings = 1 if mode == "ar" else 2
        encoder = 6 * 2 * readings * pairs * config.d_model
        assert weights + encoder < counted < weights + encoder + 6 * 2 * 5 * T * config.d_model
    else:
        assert counted == pytest.approx(weights + 6 * 2 * 2 * T * 8)


def test_what_a_system_costs_does_not_disturb_random_numbers() -> None:
    config = MDLMConfig(vocab_size=11, max_length=32, n_layer=1, n_head=2, d_model=8, d_condition=8)
    torch.manual_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    assert flops_per_token(config, "denoise") == flops_per_token(config, "denoise") > 0
    assert torch.rand(1) == first


def test_in_units_of_the_width() -> None:
    """An encoder pair does 24 d^2 multiply-adds a token and layer; keys and values are made
    everywhere, the rest at targets.
    """
    config = TracformerConfig(vocab_size=10, max_length=1024, n_layer=10, d_model=576)
    d2 = 576**2
    assert weight_multiplies(config, 1000, 0) == 10 * 1000 * (24 + 4) * d2
    assert (
        weight_multiplies(config, 1000, 1000) - weight_multiplies(config, 1000, 0)
        == 10 * 1000 * 10 * d2 + 1000 * 10 * 576
    )


@pytest.mark.parametrize("family", ["gpt2", "bert", "bart"])
@pytest.mark.parametrize("preset", ["laptop", "paper-small"])
def test_peers_of_equal_parameters(family: str, preset: str) -> None:
    ours = TracformerConfig.preset(preset)
    assert parameters_of(at_equal_parameters(family, ours)) == pytest.approx(
        parameters_of(ours), rel=0.06
    )


def test_an_uncounted_system() -> None:
    with pytest.raises(ValueError, match="'mdlm' are not known"):
        weight_multiplies(MDLMConfig(vocab_size=5), 1, 1)
