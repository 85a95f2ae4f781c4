"""The published formulas of the diffusion systems, written out one sequence at a time.

They use nothing of the package but the names of the tensors.
"""

import math

import torch
from torch import Tensor

from tracformer.baselines.gaussian import RATE


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
