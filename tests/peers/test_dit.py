"""The network is the published one, and sees what it should."""

from typing import Any

import pytest
import torch

from tests.peers.diffusion_literal import dit_logits, sigma_of, subs_log_probs
from tracformer.baselines import find_family, load_model
from tracformer.baselines.diffusion import DiffusionModel
from tracformer.model.batch import Batch

SYSTEMS = ("mdlm", "sedd", "d3pm")
SMALL = {
    "vocab_size": 7,
    "max_length": 12,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 8,
    "d_condition": 6,
}
TRACFORMER = {"backbone": "tracformer", "n_layer": 4, "n_max": 3}


def small_diffusion(system: str, seed: int = 0, **changes: Any) -> DiffusionModel:
    """A float64 model with large random weights: nothing hides behind zeros."""
    kind = find_family(system).model_class
    model = kind(kind.config_class(**{**SMALL, **changes})).double().eval()
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
    tokens = torch.randint(SMALL["vocab_size"], (batch, length), generator=generator)
    context = torch.rand(batch, length, generator=generator) < 0.5
    lengths = torch.randint(2, length + 1, (batch,), generator=generator)
    lengths[0] = length
    context[:, 1] = False
    return tokens, context, lengths


def literal_logits(
    model: DiffusionModel, tokens: list[int], masked: list[bool], sigma: float
) -> torch.Tensor:
    weights = {name: tensor.detach() for name, tensor in model.backbone.state_dict().items()}
    read = [
        model.config.mask_id if hidden else token
        for token, hidden in zip(tokens, masked, strict=True)
    ]
    return dit_logits(weights, model.config.n_head, read, sigma)


@pytest.mark.parametrize("system", SYSTEMS)
def test_marginals_equal_the_literal_network_and_padding_is_invisible(system: str) -> None:
    model = small_diffusion(system)
    tokens, context, lengths = question(3, 9)
    values = model.log_prob(Batch(tokens, context, lengths), "ac")
    for b, n in enumerate(lengths.tolist()):
        masked = (~context[b, :n]).tolist()
        share = sum(masked) / n
        sigma = {"mdlm": 0.0, "sedd": sigma_of(min(1.0, share / 0.999)), "d3pm": sigma_of(share)}[
            system
        ]
        logits = literal_logits(model, tokens[b, :n].tolist(), masked, sigma)
        for t in range(n):
            expected = subs_log_probs(logits[t])[tokens[b, t]] if masked[t] else torch.tensor(0.0)
            assert abs(float(values[b, t].detach()) - float(expected)) < 1e-10
        assert not values[b, n:].any()


def test_a_time_conditioned_mdlm_is_told_the_noise() -> None:
    model = small_diffusion("mdlm", time_conditioning=True)
    tokens, masked, lengths = (
        torch.tensor([[1, 2, 3]]),
        torch.tensor([[True, False, True]]),
        torch.tensor([3]),
    )
    costs = model.costs(tokens, masked, lengths, torch.tensor([0.4], dtype=torch.float64))
    logits = literal_logits(model, [1, 2, 3], [True, False, True], sigma_of(0.4))
    assert abs(float(costs[0, 2].detach() + subs_log_probs(logits[2])[3])) < 1e-10


@pytest.mark.parametrize(("system", "changes"), [*((s, {}) for s in SYSTEMS), ("mdlm", TRACFORMER)])
def test_hidden_tokens_and_padding_are_never_seen(system: str, changes: dict[str, Any]) -> None:
    model = small_diffusion(system, **changes)
    tokens, context, lengths = question(3, 9)
    inside = torch.arange(9) < lengths[:, None]
    other = torch.where(context & inside, tokens, (tokens + 1) % 7)
    assert not torch.equal(tokens, other)
    given, changed = (
        model.logits_at(Batch(x, context, lengths), "ac", ~context & inside)
        for x in (tokens, other)
    )
    assert torch.equal(given, changed)


@pytest.mark.parametrize(("system", "changes"), [*((s, {}) for s in SYSTEMS), ("mdlm", TRACFORMER)])
def test_a_given_position_is_answered_as_if_it_alone_were_unknown(
    system: str, changes: dict[str, Any]
) -> None:
    model = small_diffusion(system, **changes)
    tokens, context, lengths = question(2, 6)
    logits = model(Batch(tokens, context, lengths), "ac")
    for b, n in enumerate(lengths.tolist()):
        for t in range(n):
            without, wanted = context[b : b + 1, :n].clone(), torch.zeros(1, n, dtype=torch.bool)
            without[0, t], wanted[0, t] = False, True
            alone = model.logits_at(Batch(tokens[b : b + 1, :n], without), "ac", wanted)[0]
            torch.testing.assert_close(logits[b, t], alone, atol=1e-10, rtol=0)
        assert not logits[b, n:].any()


def test_checkpointed_activations_change_nothing() -> None:
    tokens, context, lengths = question(2, 6)
    gradients = []
    for checkpointed in (False, True):
        model = small_diffusion("sedd").train()
        model.checkpoint_activations = checkpointed
        torch.manual_seed(0)
        model.nll(Batch(tokens, context, lengths), "diffusion")[0].backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("system", SYSTEMS)
def test_sizes(system: str) -> None:
    kind = find_family(system).model_class

    def count(preset: str) -> tuple[int, int]:
        with torch.device("meta"):
            model = kind(kind.config_class.preset(preset))
        return model.num_parameters(), model.num_parameters(embeddings=False)

    assert count("paper")[0] == 169_627_218
    assert abs(count("laptop")[0] / 8e6 - 1) < 0.05
    assert abs(count("mini")[1] / 2e6 - 1) < 0.1
    assert kind.config_class.preset("mini").max_length == 256


@pytest.mark.parametrize(("system", "changes"), [*((s, {}) for s in SYSTEMS), ("mdlm", TRACFORMER)])
def test_a_folder_gives_the_model_back(system: str, changes: dict[str, Any], tmp_path: Any) -> None:
    model = small_diffusion(system, **changes)
    model.save_pretrained(tmp_path)
    again = load_model(tmp_path, dtype=torch.float64)
    tokens, context, lengths = question(2, 6)
    assert again.config == model.config
    first, second = (
        m.estimate(Batch(tokens, context, lengths), "diffusion", draws=2) for m in (model, again)
    )
    assert torch.equal(first.values, second.values)


def test_the_tracformer_backbone_is_its_ac_network() -> None:
    model = small_diffusion("mdlm", **TRACFORMER)
    tokens, context, lengths = question(3, 9)
    torch.testing.assert_close(
        model.log_prob(Batch(tokens, context, lengths), "ac"),
        model.backbone.log_prob(Batch(tokens, context, lengths), "ac"),
        atol=1e-12,
        rtol=0,
    )
    with pytest.raises(ValueError, match="time_conditioning is True"):
        small_diffusion("mdlm", **TRACFORMER, time_conditioning=True)
    with pytest.raises(ValueError, match="backbone is 'lstm'"):
        small_diffusion("mdlm", backbone="lstm")
