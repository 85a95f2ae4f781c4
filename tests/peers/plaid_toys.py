"""PLAID with a denoiser that knows a small distribution exactly, PLAID with large random weights,
and PLAID's formulas word by word.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tests.peers.diffusion_literal import dit_logits
from tests.peers.diffusion_toys import LENGTH, LETTERS, SEQUENCES, joint
from tracformer.baselines.gaussian import RATE
from tracformer.baselines.plaid import Plaid, PlaidConfig

SMALL = {
    "vocab_size": 7,
    "max_length": 12,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 8,
    "d_condition": 6,
    "d_embedding": 3,
}


class ToyPlaid(Plaid):
    """States are logits, the head is the identity. p(x | z_t) by enumeration: joint(x) times the
    Gaussian density of z_t under x.

    With `warp`, what the denoiser says is wrong.
    """

    warp = 0.0

    def states(
        self, read: Tensor, guess: Tensor, gamma: Tensor, targets: Tensor, lengths: Tensor
    ) -> Tensor:
        read, targets = read[:, :LENGTH], targets[:, :LENGTH]
        alpha, variance = (
            torch.sigmoid(-gamma).sqrt()[:, None, None, None],
            torch.sigmoid(gamma)[:, None, None],
        )
        # (N, 4, 3)
        density = -(read[:, :, None] - alpha * self.table).square().sum(-1) / (2 * variance)
        certain = torch.where(
            (read[:, :, None] - self.table).square().sum(-1) < 1e-9, 0.0, -torch.inf
        )
        each = torch.where(targets[..., None], density, certain)
        # (N, 81)
        posterior = (
            joint().log() + sum(each[:, p, SEQUENCES[:, p]] for p in range(LENGTH))
        ).softmax(1)
        marginal = torch.stack(
            [
                torch.stack([posterior[:, SEQUENCES[:, p] == v].sum(1) for v in range(LETTERS)], 1)
                for p in range(LENGTH)
            ],
            1,
        )  # (N, 4, 3)
        return marginal.log().clamp(min=-1e4)[targets] * (1.0 - self.warp)

    @property
    def head(self) -> Tensor:
        return torch.eye(LETTERS, dtype=torch.float64)

    @property
    def head_bias(self) -> None:
        return None


def toy_plaid(warp: float = 0.0, **changes: Any) -> ToyPlaid:
    """Embeddings in two dimensions, not evenly spread."""
    shape = {
        "vocab_size": LETTERS,
        "max_length": 8,
        "n_layer": 1,
        "n_head": 1,
        "d_model": 2,
        "d_condition": 2,
        "d_embedding": 2,
    }
    torch.manual_seed(0)
    model = (
        ToyPlaid(
            PlaidConfig(
                **{**shape, "gamma_0": -5.0, "gamma_1": 7.0, "self_conditioning": False, **changes}
            )
        )
        .double()
        .eval()
    )
    angles = torch.tensor([0.0, 1.9, 3.6], dtype=torch.float64)
    # their lengths are of no account
    model.embedding.data = 1.7 * torch.stack((angles.cos(), angles.sin()), 1)
    model.warp = warp
    return model


def small_plaid(seed: int = 0, **changes: Any) -> Plaid:
    """A float64 model with large random weights: nothing hides behind zeros.

    The schedule's ends stay in order.
    """
    model = Plaid(PlaidConfig(**{**SMALL, **changes})).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
            if name != "schedule.bounds":
                parameter.copy_(1.0 + noise if bool((parameter == 1).all()) else noise)
    return model


# ---- the formulas once more, one sequence at a time, from nothing but the tensors' names


def literal_gamma(w: dict[str, Tensor], t: float) -> float:
    def h(t: float) -> float:
        units = zip(
            w["schedule.a"].tolist(),
            w["schedule.b"].tolist(),
            w["schedule.c"].tolist(),
            strict=True,
        )
        return sum(
            math.log1p(math.exp(c)) * math.tanh(math.log1p(math.exp(a)) * (t - 0.5) + b)
            for a, b, c in units
        )

    low, high = (RATE * end for end in w["schedule.bounds"].tolist())
    return low + (high - low) * (h(t) - h(0.0)) / (h(1.0) - h(0.0))


def literal_slope(w: dict[str, Tensor], t: float, width: float = 1e-4) -> float:
    return (literal_gamma(w, t + width) - literal_gamma(w, t - width)) / (2 * width)


def literal_table(w: dict[str, Tensor]) -> Tensor:
    return torch.stack([row / math.sqrt(float((row**2).sum())) for row in w["embedding"]])


def literal_log_probs(
    w: dict[str, Tensor],
    read: list[Tensor],
    given: list[bool],
    gamma: float,
    guess: list[Tensor] | None,
) -> Tensor:
    """(T, V): the categorical answer at every position."""
    e = len(read[0])
    alpha, variance = math.sqrt(1 / (1 + math.exp(gamma))), 1 / (1 + math.exp(-gamma))
    inputs = []
    for p, vector in enumerate(read):
        scale = math.sqrt(e) if given[p] else 1 / math.sqrt(alpha**2 / e + variance)
        x = w["network.input.weight"] @ (vector * scale)
        if given[p]:
            x = x + w["network.mark"]
        if guess is not None:
            x = x + w["network.guess.weight"] @ (guess[p] * math.sqrt(e))
        inputs.append(x)
    names = {
        name.removeprefix("network."): tensor
        for name, tensor in w.items()
        if name.startswith("network.")
    }
    logits = dit_logits(
        {**names, "vocab_embed.embedding": torch.stack(inputs)}, 2, list(range(len(read))), gamma
    )
    density = torch.stack([alpha / variance * (literal_table(w) @ vector) for vector in read])
    return (logits + density).log_softmax(-1)


def literal_terms(
    w: dict[str, Tensor],
    tokens: list[int],
    given: list[bool],
    t: float | None,
    noise: Tensor,
    guessing: bool,
) -> list[float]:
    """What each position costs at time t; t None: the reconstruction.

    Zero where given. noise: (T, e)
    """
    gamma, table = literal_gamma(w, t or 0.0), literal_table(w)
    alpha, sigma = math.sqrt(1 / (1 + math.exp(gamma))), math.sqrt(1 / (1 + math.exp(-gamma)))
    read = [
        table[x] if given[p] else alpha * table[x] + sigma * noise[p] for p, x in enumerate(tokens)
    ]
    guess = [torch.zeros_like(vector) for vector in read] if "network.guess.weight" in w else None
    if guessing:
        first = literal_log_probs(w, read, given, gamma, guess).exp() @ table
        guess = [torch.zeros_like(vector) if given[p] else vector for p, vector in enumerate(first)]
    log_p = literal_log_probs(w, read, given, gamma, guess)
    snr_slope = 0.0 if t is None else -math.exp(-gamma) * literal_slope(w, t)
    costs = []
    for p, x in enumerate(tokens):
        cost = (
            -log_p[p, x]
            if t is None
            else -0.5 * snr_slope * ((table[x] - log_p[p].exp() @ table) ** 2).sum()
        )
        costs.append(0.0 if given[p] else float(cost))
    return costs


def literal_prior(w: dict[str, Tensor]) -> float:
    """KL(N(alpha_1 e(x), sigma_1^2) || N(0, 1)), dimension by dimension, for some x."""
    gamma = literal_gamma(w, 1.0)
    alpha, variance = math.sqrt(1 / (1 + math.exp(gamma))), 1 / (1 + math.exp(-gamma))
    return sum(
        0.5 * (variance + (alpha * x) ** 2 - 1 - math.log(variance))
        for x in literal_table(w)[0].tolist()
    )
