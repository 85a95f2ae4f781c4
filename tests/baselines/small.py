"""Small float64 models with large random weights, so that no term vanishes."""

from typing import Any

import torch
import yaml
from torch import Tensor

from tracformer.baselines import find_family
from tracformer.baselines.diffusion import DiffusionModel
from tracformer.baselines.plaid import Plaid, PlaidConfig
from tracformer.model import ConditionalModel

SMALL = {"vocab_size": 7, "max_length": 12, "n_layer": 2, "n_head": 2, "d_model": 8}

MODES = [
    ("bart", "car"),
    ("bart norm=pre", "car"),
    ("bert", "ac"),
    ("bert norm=pre", "ac"),
    ("bert-bidir", "ac"),
    ("bert-bidir separate=True", "ac"),
    ("gpt2", "ar"),
    ("gpt2-fim", "car"),
    ("gpt2-fim", "ar"),
    ("bart-modern", "car"),
    ("bart-modern neighbours=1", "car"),
    ("bert-modern", "ac"),
    ("bert-modern neighbours=1", "ac"),
    ("bert-bidir-modern", "ac"),
    ("ac-gpt", "car"),
    ("ac-gpt neighbours=1", "car"),
    ("ac-gpt", "ar"),
    ("as-arm", "car"),
    ("as-arm neighbours=1", "car"),
    ("as-arm", "ac"),
    ("as-arm neighbours=1", "ac"),
    ("sigma-gpt", "car"),
    ("sigma-gpt", "ac"),
    ("compact", "car"),
    ("compact", "ac"),
    ("compact", "ar"),
    ("compact neighbours=0", "car"),
    ("compact n_layer=3 neighbours=2 window=3", "car"),
    ("compact n_layer=3 neighbours=2 window=3", "ac"),
    ("aligned n_encoder=2", "car"),
    ("aligned n_encoder=2", "ac"),
    ("aligned n_encoder=2", "ar"),
]

FAMILIES = ["bart", "bert", "bert-bidir", "gpt2", "gpt2-fim"]  # built on `transformers`

# this package's blocks
OWN = [
    "bart-modern",
    "bert-modern",
    "bert-bidir-modern",
    "ac-gpt",
    "as-arm",
    "sigma-gpt",
    "compact",
    "aligned",
]

UNTIED = [("bart", "car"), ("bert", "ac"), ("bert-bidir", "ac")]


def small_baseline(family: str, seed: int = 0, **changes: Any) -> ConditionalModel:
    """Return a small model with large random weights.

    Args:
        family: Name of a system, with settings if any: "bart norm=pre".
        seed: Seed of the weights.
        **changes: Further settings.
    """
    name, *settings = family.split()
    kind = find_family(name).model_class
    values = {
        key: yaml.safe_load(value) for key, value in (setting.split("=") for setting in settings)
    }
    model = kind(kind.config_class(**{**SMALL, **values, **changes})).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
            parameter.copy_(1.0 + noise if bool((parameter == 1).all()) else noise)
    return model


def random_question(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, a context with about half the tokens given, and lengths.

    Every row has a target; the first has the full length.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SMALL["vocab_size"], (batch, length), generator=generator)
    context = torch.rand(batch, length, generator=generator) < 0.5
    lengths = torch.randint(2, length + 1, (batch,), generator=generator)
    lengths[0] = length
    context[torch.arange(batch), lengths // 2] = False
    return tokens, context, lengths


SYSTEMS = ("mdlm", "sedd", "d3pm")

DIFFUSION_SHAPE = {
    "vocab_size": 7,
    "max_length": 12,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 8,
    "d_condition": 6,
}

TRACFORMER = {"backbone": "tracformer", "n_layer": 4, "n_max": 3}


def small_diffusion(system: str, seed: int = 0, **changes: Any) -> DiffusionModel:
    """Return a float64 diffusion model with large random weights."""
    kind = find_family(system).model_class
    model = kind(kind.config_class(**{**DIFFUSION_SHAPE, **changes})).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
            parameter.copy_(1.0 + noise if bool((parameter == 1).all()) else noise)
    assert isinstance(model, DiffusionModel)
    return model


def question(
    batch: int, length: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(DIFFUSION_SHAPE["vocab_size"], (batch, length), generator=generator)
    context = torch.rand(batch, length, generator=generator) < 0.5
    lengths = torch.randint(2, length + 1, (batch,), generator=generator)
    lengths[0] = length
    context[:, 1] = False
    return tokens, context, lengths


PLAID_SHAPE = {
    "vocab_size": 7,
    "max_length": 12,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 8,
    "d_condition": 6,
    "d_embedding": 3,
}


def small_plaid(seed: int = 0, **changes: Any) -> Plaid:
    """Return a float64 PLAID with large random weights.

    The schedule's ends stay in order.
    """
    model = Plaid(PlaidConfig(**{**PLAID_SHAPE, **changes})).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
            if name != "schedule.bounds":
                parameter.copy_(1.0 + noise if bool((parameter == 1).all()) else noise)
    return model
