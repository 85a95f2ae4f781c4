"""Training losses are the published ones: the same noise, literally summed, gives
the same numbers.
"""

import math
from typing import Any

import pytest
import torch

from tests.peers.diffusion_literal import d3pm_loss, mdlm_loss, sedd_loss, sigma_of
from tests.peers.test_dit import SYSTEMS, TRACFORMER, literal_logits, question, small_diffusion
from tracformer.baselines import find_family
from tracformer.model.batch import Batch

WEIGHTS = torch.linspace(0.5, 2.0, 3 * 9, dtype=torch.float64).view(3, 9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_training_losses_equal_the_literal_ones(system: str, weighted: bool) -> None:
    model = small_diffusion(system, **({"n_step": 5} if system == "d3pm" else {}))
    tokens, context, lengths = question(3, 9)
    weights = WEIGHTS if weighted else torch.ones(3, 9, dtype=torch.float64)
    torch.manual_seed(3)
    found, count = model.nll(
        Batch(tokens, context, lengths), "diffusion", weights=WEIGHTS if weighted else None
    )
    torch.manual_seed(3)
    u = torch.randint(1, 6, (3,)) / 5.0 if system == "d3pm" else torch.rand(3, dtype=torch.float64)
    noise = torch.rand(3, 9)
    expected, targets, hits = 0.0, 0, 0
    for b, n in enumerate(lengths.tolist()):
        t = {
            "mdlm": 1e-3 + 0.999 * (b + float(u[b])) / 3,
            "sedd": 1e-3 + 0.999 * float(u[b]),
            "d3pm": float(u[b].double()),
        }[system]
        probability = t if system == "d3pm" else 0.999 * t
        row = tokens[b, :n].tolist()
        masked = [not bool(context[b, p]) and float(noise[b, p]) < probability for p in range(n)]
        sigma = 0.0 if system == "mdlm" else sigma_of(t)
        logits, clean = (
            literal_logits(model, row, masked, sigma),
            literal_logits(model, row, [False] * n, 0.0),
        )
        for p in range(n):
            if context[b, p]:
                continue
            targets += 1
            term = torch.tensor(0.0, dtype=torch.float64)
            if masked[p]:
                hits += 1
                if system == "d3pm":
                    term = term + d3pm_loss(logits[p], row[p], round(5 * t), 5)
                else:
                    term = term + (mdlm_loss if system == "mdlm" else sedd_loss)(
                        logits[p], row[p], t
                    )
            if system == "d3pm":
                term = (
                    term - 0.01 * logits[p].log_softmax(0)[row[p]] - clean[p].log_softmax(0)[row[p]]
                )
            expected += float(weights[b, p] * term)
    assert hits > 2
    assert count == targets
    assert abs(float(found.detach()) / expected - 1) < 1e-5


def test_the_tracformer_backbone_trains_on_the_same_loss() -> None:
    model = small_diffusion("mdlm", **TRACFORMER)
    tokens, context, lengths = question(3, 9)
    torch.manual_seed(3)
    found, _ = model.nll(Batch(tokens, context, lengths), "diffusion")
    torch.manual_seed(3)
    t = 1e-3 + 0.999 * (torch.arange(3) + torch.rand(3, dtype=torch.float64)) / 3
    masked = ~context & (torch.rand(3, 9) < 0.999 * t[:, None])
    values = model.backbone.log_prob(Batch(tokens, ~masked, lengths), "ac")
    assert abs(float((found + (values / t[:, None]).sum()).detach())) < 1e-5 * float(found.detach())


@pytest.mark.parametrize("system", SYSTEMS)
def test_gradients_reach_every_parameter_that_can_matter(system: str) -> None:
    model = small_diffusion(system)
    tokens, context, lengths = question(3, 9)
    torch.manual_seed(0)
    model.nll(Batch(tokens, context, lengths), "diffusion")[0].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert bool(parameter.grad.any()), name


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_new_model_is_uniform(system: str) -> None:
    """Published initialisation: zero output, so that every token is as probable as any other;
    SEDD's scores sum as they should.
    """
    kind = find_family(system).model_class
    model = kind(kind.config_class.preset("tiny")).eval()
    tokens = torch.randint(256, (2, 16))
    values = model.log_prob(
        Batch(tokens, torch.zeros(2, 16, dtype=torch.bool)), "diffusion", draws=16
    )
    expected = 16 * math.log(256)
    if system == "d3pm":  # a mask's share of probability, and the clean text to be repeated
        expected += 16 * math.log(257)
    torch.testing.assert_close(-values.sum(1), torch.full((2,), expected), rtol=0.01, atol=0.0)


def answers(**changes: Any) -> tuple[str, ...]:
    return small_diffusion("mdlm", **changes).config.modes


def test_a_denoiser_answers_marginals_too() -> None:
    assert answers(modes=("diffusion",)) == ("diffusion", "ac")
    assert answers(modes=("ac",)) == ("ac",)
