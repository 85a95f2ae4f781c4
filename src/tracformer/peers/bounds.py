"""The conditional bound of a masked diffusion model, estimated with little variance and with noise that no batch can change.

Given tokens are never noised and never counted. With R targets, each masked independently with probability t, and c(x_t, t) the cost of a
masked target (-log p for MDLM), the negative bound on the targets' log-likelihood is

    integral over t in (0, 1] of (1/t) E[ sum over masked targets of c(x_t, t) ]
    = sum over k = 1..R of (1/k) E[ the same sum | exactly k targets masked, t ~ Beta(k, R-k+1) ].

The second form is what is drawn: weights R/k instead of 1/t, whose variance diverges. Each target gets a uniform number, the k smallest are
masked, and t is the k-th smallest, which has that Beta law. k is stratified over the draws of a sequence.

In discrete time, t = i/steps, the integral is a sum, 1/k becomes Z_k = C(R, k) mean over i of t^(k-1) (1-t)^(R-k), and i is drawn in
proportion to its term in Z_k.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tracformer.generation.randomness import TIME, derived_seed, uniforms
from tracformer.model.base import Estimate, targets_of

Costs = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tokens (N, T), masked (N, T), lengths (N,), t (N,)) -> (N, T): each masked target's cost; what stands elsewhere is not read."""

DRAWS = 64
TOKENS_AT_ONCE = 2**14  # of the rows that go through the network together
COUNT, STEP = 16, 17  # streams: how many targets are masked, which step of a discrete process


class Noise(NamedTuple):
    masked: Tensor  # (n, B, T) bool
    t: Tensor  # (n, B) float64
    weight: Tensor  # (n, B) float64


@torch.no_grad()
def conditional_bound(
    costs: Costs, tokens: Tensor, context: Tensor, lengths: Tensor, *, draws: int = DRAWS, seed: int = 0, steps: int | None = None
) -> Estimate:
    """Each target's share (B, T) of a lower bound on log p(targets | given), and the standard error (B,) of each sequence's sum.

    The noise of draw j at position t is a function of (seed, j, t) alone, so all sequences of a call share it, and a sequence gives the
    same result in any batch. The standard error comes from the differences of neighbouring draws, which lie in neighbouring strata; one
    draw has none, and gets nan.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; it must be at least 1")
    B, T = tokens.shape
    targets = targets_of(context, lengths)
    size = max(1, TOKENS_AT_ONCE // (B * T))
    total = torch.zeros(B, T, dtype=torch.float64, device=tokens.device)
    sums: list[Tensor] = []
    dtype = torch.float64
    for start in range(0, draws, size):
        numbers = range(start, min(start + size, draws))
        n = len(numbers)
        masked, t, weight = draw_noise(targets, numbers, draws, seed, steps)
        cost = costs(tokens.repeat(n, 1), masked.flatten(0, 1), lengths.repeat(n), t.flatten()).unflatten(0, (n, B))
        dtype = cost.dtype
        terms = torch.where(masked, cost.double(), 0.0) * weight[..., None]
        for term in terms:  # one by one, and as running sums: neither the chunks nor padding may change a bit
            total += term
            sums.append(term.cumsum(1)[:, -1])
    return Estimate((-total / draws).to(dtype), standard_error(torch.stack(sums)).to(dtype))


def draw_noise(targets: Tensor, numbers: range, draws: int, seed: int, steps: int | None) -> Noise:
    """The noise of some of the draws, for targets (B, T)."""
    T, device = targets.shape[1], targets.device
    seeds = [derived_seed(seed, number) for number in numbers]
    u = uniforms([s for s in seeds for _ in range(T)], list(range(T)) * len(seeds), TIME).view(len(seeds), 1, T).to(device)
    ordered, order = torch.where(targets, u, torch.inf).sort(dim=-1)  # (n, B, T)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(T, device=device).expand_as(order))
    R = targets.sum(1)  # (B,)
    offset = uniforms(seeds, [0] * len(seeds), COUNT).to(device)
    place = (torch.tensor(numbers, device=device) + offset) / draws  # (n,): one in each of `draws` equal parts of [0, 1)
    k = 1 + (place[:, None] * R).long().clamp(max=(R - 1).clamp(min=0))  # (n, B), uniform on 1..R
    masked = targets & (rank < k[..., None])
    if steps is None:
        t = ordered.gather(-1, k[..., None] - 1)[..., 0]
        t = torch.where(R > 0, t, 1.0)  # a sequence without targets is never masked
        return Noise(masked, t, R.double() / k)
    return Noise(masked, *_discrete_time(k, R, steps, uniforms(seeds, [0] * len(seeds), STEP).to(device)))


def _discrete_time(k: Tensor, R: Tensor, steps: int, u: Tensor) -> tuple[Tensor, Tensor]:
    """(n, B) times i/steps given that k of R are masked, and the weights R Z_k. k: (n, B); R: (B,); u: (n,)"""
    t = torch.arange(1, steps + 1, dtype=torch.float64, device=k.device) / steps
    k, R = k.double(), R.double().clamp(min=1.0)
    hits, misses = (k - 1)[..., None], (R - k)[..., None]
    terms = torch.special.xlogy(hits, t) + torch.special.xlog1py(misses, -t)  # (n, B, steps); 0 log 0 = 0
    choose = torch.lgamma(R + 1) - torch.lgamma(k + 1) - torch.lgamma(R - k + 1)
    weight = R * torch.exp(choose + terms.logsumexp(-1)) / steps
    reached = terms.softmax(-1).cumsum(-1)
    i = torch.searchsorted(reached, (u[:, None, None] * reached[..., -1:]).contiguous(), right=True)[..., 0]
    return t[i.clamp(max=steps - 1)], weight


def standard_error(sums: Tensor) -> Tensor:
    """Of the mean of sums (draws, B), one draw a stratum. Neighbours differ by noise and a little by their strata, so it errs upwards."""
    draws = len(sums)
    if draws < 2:
        return torch.full_like(sums[0], torch.nan)
    squares = sums.diff(dim=0).square().cumsum(0)[-1]
    return (squares / (2 * draws * (draws - 1))).sqrt()
