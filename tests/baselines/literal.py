"""Definitions of diffusion models written out, and denoisers whose answers are exact."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from tracformer.baselines.diffusion import DiffusionModel
from tracformer.baselines.mdlm import MDLM, MDLMConfig
from tracformer.baselines.plaid import Plaid, PlaidConfig
from tracformer.baselines.reverse_process import RATE
from tracformer.baselines.sedd import D3PM, SEDD, D3PMConfig, SEDDConfig


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def turn(vector: Tensor, position: int) -> Tensor:
    """Rotate one head's vector (rotate-half, base 10^4)."""
    half = len(vector) // 2
    turned = vector.clone()
    for i in range(half):
        angle = position * 10000 ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def dit_logits(w: dict[str, Tensor], n_head: int, tokens: list[int], sigma: float) -> Tensor:
    """Return (T, V + 1) logits of one sequence that contains masks."""
    frequencies = [math.exp(-math.log(1e4) * i / 128) for i in range(128)]
    e = torch.tensor(
        [math.cos(sigma * f) for f in frequencies] + [math.sin(sigma * f) for f in frequencies],
        dtype=torch.float64,
    )
    c = (
        w["sigma_map.mlp.2.weight"]
        @ silu(w["sigma_map.mlp.0.weight"] @ e + w["sigma_map.mlp.0.bias"])
        + w["sigma_map.mlp.2.bias"]
    )
    c = silu(c)
    x = torch.stack([w["vocab_embed.embedding"][token] for token in tokens])
    d = x.shape[1]
    size = d // n_head
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    for layer in range(layers):
        b = {
            name.removeprefix(f"blocks.{layer}."): tensor
            for name, tensor in w.items()
            if name.startswith(f"blocks.{layer}.")
        }
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            b["adaLN_modulation.weight"] @ c + b["adaLN_modulation.bias"]
        ).split(d)
        # (T, three * head * dim)
        qkv = (layer_norm(x, b["norm1.weight"]) * (1 + scale1) + shift1) @ b["attn_qkv.weight"].T
        mixed = torch.zeros_like(x)
        for h in range(n_head):
            columns = slice(h * size, (h + 1) * size)
            q, k, v = (qkv[:, part * d : (part + 1) * d][:, columns] for part in range(3))
            q, k = (torch.stack([turn(row, t) for t, row in enumerate(rows)]) for rows in (q, k))
            mixed[:, columns] = torch.softmax(q @ k.T / math.sqrt(size), dim=-1) @ v
        x = x + gate1 * (mixed @ b["attn_out.weight"].T)
        y = (layer_norm(x, b["norm2.weight"]) * (1 + scale2) + shift2) @ b["mlp.0.weight"].T + b[
            "mlp.0.bias"
        ]
        x = x + gate2 * (tanh_gelu(y) @ b["mlp.2.weight"].T + b["mlp.2.bias"])
    shift, scale = (
        w["output_layer.adaLN_modulation.weight"] @ c + w["output_layer.adaLN_modulation.bias"]
    ).split(d)
    x = layer_norm(x, w["output_layer.norm_final.weight"]) * (1 + scale) + shift
    return x @ w["output_layer.linear.weight"].T + w["output_layer.linear.bias"]


EPS = 1e-3


def sigma_of(t: float) -> float:
    return -math.log1p(-(1 - EPS) * t)


def sigma_rate(t: float) -> float:
    return (1 - EPS) / (1 - (1 - EPS) * t)


def subs_log_probs(logits: Tensor) -> Tensor:
    """Mask logit to minus infinity, then log-softmax."""
    logits = logits.clone()
    logits[-1] = -math.inf
    return logits - torch.logsumexp(logits, 0)


def mdlm_loss(logits: Tensor, x0: int, t: float) -> Tensor:
    return -subs_log_probs(logits)[x0] * sigma_rate(t) / math.expm1(sigma_of(t))


def sedd_loss(logits: Tensor, x0: int, t: float) -> Tensor:
    sigma = sigma_of(t)
    score = logits - math.log(math.expm1(sigma)) - math.log(len(logits) - 1)
    r = 1 / math.expm1(sigma)
    return sigma_rate(t) * (score[:-1].exp().sum() - r * score[x0] + r * (math.log(r) - 1))


def d3pm_loss(logits: Tensor, x0: int, i: int, T: int) -> Tensor:
    """Return T times the KL of step i, from the two categorical distributions."""
    p = logits.softmax(0)
    t, s = i / T, (i - 1) / T
    alpha_t, alpha_s = 1 - t, 1 - s
    true = {"x0": (alpha_s - alpha_t) / t, "mask": s / t}
    total = (alpha_s - alpha_t) * p[:-1].sum() + (1 - alpha_s) + alpha_s * p[-1]
    model = {
        "x0": (alpha_s - alpha_t) * p[x0] / total,
        "mask": ((1 - alpha_s) + alpha_s * p[-1]) / total,
    }
    return T * sum(q * (math.log(q) - model[state].log()) for state, q in true.items() if q > 0)


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
    """Return (T, V) log-probabilities at every position."""
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
    """Return each position's cost at time t; t None: the reconstruction term."""
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


# ---- exact denoisers

LENGTH, LETTERS = 4, 3

SEQUENCES = torch.tensor(list(itertools.product(range(LETTERS), repeat=LENGTH)))  # (81, 4)

NEVER = -1e4  # a logit whose probability is zero

TINY = {
    "vocab_size": LETTERS,
    "max_length": 8,
    "n_layer": 1,
    "n_head": 1,
    "d_model": 2,
    "d_condition": 2,
}


def joint(seed: int = 0) -> Tensor:
    """Return the probabilities (81,) of all sequences, far from independent."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64)).softmax(0)


def truth(tokens: Tensor, context: Tensor) -> Tensor:
    """Return log p(targets | given) (B,) of sequences (B, 4)."""
    agree = SEQUENCES == tokens[:, None]  # (B, 81, 4)
    log = [
        torch.where(hits.all(-1), joint(), 0.0).sum(1).log()
        for hits in (agree, agree | ~context[:, None])
    ]
    return log[0] - log[1]


class _Toy:
    """A model whose states are logits and whose head is the identity.

    With `warp` its predictions are wrong, and differently so at each time.
    """

    warp = 0.0

    def states(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: Tensor, wanted: Tensor
    ) -> Tensor:
        tokens, masked = tokens[:, :LENGTH], masked[:, :LENGTH]
        possible = ((SEQUENCES == tokens[:, None]) | masked[:, None]).all(-1) * joint()  # (N, 81)
        # (N, 4, 3)
        marginal = (
            possible[:, :, None, None] * torch.nn.functional.one_hot(SEQUENCES, LETTERS)
        ).sum(1)
        log = marginal.log().log_softmax(-1).clamp(min=NEVER)
        log = torch.where(masked[..., None], log * (1.0 - self.warp * t[:, None, None]), log)
        return self.shape(log, masked)[wanted[:, :LENGTH]]

    def shape(self, log: Tensor, masked: Tensor) -> Tensor:
        return log

    @property
    def head(self) -> Tensor:
        return torch.eye(LETTERS, dtype=torch.float64)

    @property
    def head_bias(self) -> None:
        return None


class ToyMDLM(_Toy, MDLM):
    pass


class ToySEDD(_Toy, SEDD):
    def shape(self, log: Tensor, masked: Tensor) -> Tensor:
        return log + torch.tensor(float(LETTERS)).double().log()


class ToyD3PM(_Toy, D3PM):
    """With `warp`, a share of the probability stays on the mask."""

    def shape(self, log: Tensor, masked: Tensor) -> Tensor:
        left = log.new_full((*log.shape[:-1], 1), NEVER if self.warp == 0.0 else -2.0)
        return torch.cat((log, torch.where(masked[..., None], left, NEVER)), -1)

    @property
    def _whole_head(self) -> tuple[Tensor, Any]:
        return torch.eye(LETTERS + 1, dtype=torch.float64), None


def toy(name: str, warp: float = 0.0, **changes: Any) -> DiffusionModel:
    kind, config = {
        "mdlm": (ToyMDLM, MDLMConfig),
        "sedd": (ToySEDD, SEDDConfig),
        "d3pm": (ToyD3PM, D3PMConfig),
    }[name]
    model = kind(config(**{**TINY, **changes})).double().eval()
    model.warp = warp
    return model


TOKENS = torch.tensor([[0, 2, 1, 1], [1, 1, 0, 2], [2, 0, 0, 1]])

CONTEXT = torch.tensor(
    [[False, False, False, False], [True, False, False, True], [False, False, True, False]]
)

GIVEN = torch.tensor([False, True, False, False])

ROW = torch.tensor([0, 2, 0, 0])

SAMPLES = 1200


def chi_square(samples: Tensor, probabilities: Tensor) -> float:
    """Return the normalised chi-square statistic of samples, about standard normal.

    Outcomes expected less than five times are pooled.
    """
    numbers = (samples * LETTERS ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    seen = torch.bincount(numbers, minlength=len(SEQUENCES)).double()
    expected = probabilities * len(samples)
    rare = expected < 5
    cells = [(float(s), float(e)) for s, e in zip(seen[~rare], expected[~rare], strict=True)]
    cells.append((float(seen[rare].sum()), float(expected[rare].sum())))
    statistic = sum((s - e) ** 2 / e for s, e in cells if e > 0)
    degrees = len(cells) - 1
    return (statistic - degrees) / (2 * degrees) ** 0.5  # about a standard normal


def conditional() -> Tensor:
    agree = (SEQUENCES[:, GIVEN] == ROW[GIVEN]).all(1) * joint()
    return agree / agree.sum()


class ToyPlaid(Plaid):
    """A PLAID whose states are logits and whose head is the identity.

    p(x | z_t) is computed by enumeration: joint(x) times the Gaussian density of z_t under x. With
    `warp` its predictions are wrong.
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
    """Return a toy whose embeddings in two dimensions are not evenly spread."""
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
