"""Masked diffusion: what SEDD, MDLM and D3PM share.

Two modes are answered:

- `diffusion`: a lower bound on the joint log-likelihood of the targets (`conditional_bound`), and
  samples by the reverse process (`reverse_process.py`);
- `ac`: p(x_t | x_C) of each target, which is what the denoiser predicts when all targets are
  masked.

**The bound.** Given tokens are never noised and never counted. With R targets, each masked
independently with probability t, and c(x_t, t) the cost of a masked target (-log p for MDLM), the
negative bound on the targets' log-likelihood is

    integral over t in (0, 1] of (1/t) E[ sum over masked targets of c(x_t, t) ]
    = sum over k = 1..R of (1/k) E[ the same sum | exactly k targets masked, t ~ Beta(k, R-k+1) ].

The second form is the one that is sampled: its weights are R/k, while those of the first are 1/t,
whose variance diverges. Each target gets a uniform number, the k smallest are masked, and t is the
k-th smallest, which has that Beta law. k is stratified over the draws of a sequence.

In discrete time, t = i/steps, the integral is a sum, 1/k becomes Z_k = C(R, k) mean over i of
t^(k-1) (1-t)^(R-k), and i is drawn in proportion to its term in Z_k.

The noise is a function of (seed, draw, position), so that no batch can change an estimate.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from tracformer.baselines.dit import DiT, DiTShape
from tracformer.baselines.reverse_process import Denoised, Draws, Restrict
from tracformer.baselines.transformer import size_presets
from tracformer.devices import wide
from tracformer.model.base import (
    BOUND,
    MARGINAL,
    ConditionalModel,
    Estimate,
    Passes,
    check_batch,
    each_given_alone,
    finish,
)
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig
from tracformer.model.likelihood import logits_of, recomputed, row_chunks
from tracformer.rng import TIME, derived_seed, uniforms

Costs = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(tokens (N, T), masked (N, T), lengths (N,), t (N,)) -> (N, T): each masked target's cost.

Values at other positions are not read.
"""

DRAWS = 64
TOKENS_AT_ONCE = 2**14  # tokens that go through the network together
COUNT, STEP = 16, 17  # random streams: number of masked targets, step of a discrete process


class Noise(NamedTuple):
    """The noise of some draws: masked positions, times and weights."""

    masked: Tensor  # (n, B, T) bool
    t: Tensor  # (n, B) float64
    weight: Tensor  # (n, B) float64


@torch.no_grad()
def conditional_bound(
    costs: Costs,
    batch: Batch,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    steps: int | None = None,
) -> Estimate:
    """Return a lower bound on log p(targets | given), and its standard error.

    The noise of draw j at position t is a function of (seed, j, t) alone, so all sequences of a
    call share it, and a sequence gives the same result in any batch. The standard error comes from
    the differences of neighbouring draws, which lie in neighbouring strata; it is nan for a single
    draw.

    Args:
        costs: Computes each masked target's cost c(x_t, t).
        batch: Sequences with given tokens.
        draws: Number of draws.
        seed: Seed of the noise.
        steps: Number of steps of a process in discrete time, else None.

    Returns:
        Each target's share (B, T) of the bound, and the standard error (B,) of each sequence's sum.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; it must be at least 1")
    tokens, lengths, targets = batch.tokens, batch.lengths, batch.targets()
    B, T = tokens.shape
    size = max(1, TOKENS_AT_ONCE // (B * T))
    total = torch.zeros(B, T, dtype=torch.float64, device=tokens.device)
    sums: list[Tensor] = []
    dtype = torch.float64
    for start in range(0, draws, size):
        numbers = range(start, min(start + size, draws))
        n = len(numbers)
        masked, t, weight = draw_noise(targets, numbers, draws, seed, steps)
        cost = costs(
            tokens.repeat(n, 1), masked.flatten(0, 1), lengths.repeat(n), t.flatten()
        ).unflatten(0, (n, B))
        dtype = cost.dtype
        terms = torch.where(masked, cost.double(), 0.0) * weight[..., None]
        # One by one, and as running sums, so that neither chunks nor padding change a bit.
        for term in terms:
            total += term
            sums.append(term.cumsum(1)[:, -1])
    return Estimate((-total / draws).to(dtype), standard_error(torch.stack(sums)).to(dtype))


def draw_noise(targets: Tensor, numbers: range, draws: int, seed: int, steps: int | None) -> Noise:
    """Draw the noise of some of the draws.

    Args:
        targets: (B, T) bool.
        numbers: Numbers of the draws, in 0..draws-1.
        draws: Number of draws in all, over which k is stratified.
        seed: Seed of the noise.
        steps: Number of steps of a process in discrete time, else None.
    """
    T, device = targets.shape[1], targets.device
    seeds = [derived_seed(seed, number) for number in numbers]
    u = (
        uniforms([s for s in seeds for _ in range(T)], list(range(T)) * len(seeds), TIME)
        .view(len(seeds), 1, T)
        .to(device)
    )
    ordered, order = torch.where(targets, u, torch.inf).sort(dim=-1)  # (n, B, T)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(T, device=device).expand_as(order)
    )
    R = targets.sum(1)  # (B,)
    offset = uniforms(seeds, [0] * len(seeds), COUNT).to(device)
    # (n,): one in each of `draws` equal parts of [0, 1)
    place = (torch.tensor(numbers, device=device) + offset) / draws
    k = 1 + (place[:, None] * R).long().clamp(max=(R - 1).clamp(min=0))  # (n, B), uniform on 1..R
    masked = targets & (rank < k[..., None])
    if steps is None:
        t = ordered.gather(-1, k[..., None] - 1)[..., 0]
        t = torch.where(R > 0, t, 1.0)  # no target: nothing is masked
        return Noise(masked, t, R.double() / k)
    return Noise(
        masked, *_discrete_time(k, R, steps, uniforms(seeds, [0] * len(seeds), STEP).to(device))
    )


def _discrete_time(k: Tensor, R: Tensor, steps: int, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return (n, B) times i/steps given that k of R are masked, and the weights R Z_k.

    Args:
        k: (n, B) numbers of masked targets.
        R: (B,) numbers of targets.
        steps: Number of steps.
        u: (n,) uniform numbers.
    """
    t = torch.arange(1, steps + 1, dtype=torch.float64, device=k.device) / steps
    k, R = k.double(), R.double().clamp(min=1.0)
    hits, misses = (k - 1)[..., None], (R - k)[..., None]
    # (n, B, steps); 0 log 0 = 0
    terms = torch.special.xlogy(hits, t) + torch.special.xlog1py(misses, -t)
    choose = torch.lgamma(R + 1) - torch.lgamma(k + 1) - torch.lgamma(R - k + 1)
    weight = R * torch.exp(choose + terms.logsumexp(-1)) / steps
    reached = terms.softmax(-1).cumsum(-1)
    i = torch.searchsorted(
        reached, (u[:, None, None] * reached[..., -1:]).contiguous(), right=True
    )[..., 0]
    return t[i.clamp(max=steps - 1)], weight


def standard_error(sums: Tensor) -> Tensor:
    """Return the standard error (B,) of the mean of sums (draws, B), one draw per stratum.

    Neighbours differ by noise and slightly by their strata, so it errs upwards.
    """
    draws = len(sums)
    if draws < 2:
        return torch.full_like(sums[0], torch.nan)
    squares = sums.diff(dim=0).square().cumsum(0)[-1]
    return (squares / (2 * draws * (draws - 1))).sqrt()


EPSILON = 1e-3  # share that stays unmasked at t = 1 in training, so that sigma is finite
EARLIEST = 1e-3  # smallest time in training


def sigma_at(t: Tensor) -> Tensor:
    """Return log-linear noise levels sigma(t) = -log(1 - (1-eps) t).

    A token is masked with probability 1 - exp(-sigma) = (1-eps) t.
    """
    return -torch.log1p(-(1 - EPSILON) * t)


PRESETS = size_presets(
    (12, 12, 768, 128), (4, 3, 96, 32), (4, 3, 192, 64), (6, 4, 256, 128), fourth="d_condition"
)


@dataclass(frozen=True)
class DiffusionConfig(ModelConfig):
    """Shape of a masked diffusion model on a DiT."""

    possible_modes: ClassVar[tuple[str, ...]] = ("diffusion", "ac")
    presets = PRESETS

    n_layer: int = 12
    n_head: int = 12
    d_model: int = 768
    d_condition: int = 128  # size of the encoded noise level
    dropout: float = 0.0  # on residual branches, never inside attention

    def __post_init__(self) -> None:
        super().__post_init__()
        if "diffusion" in self.modes:
            # One denoiser, trained on every share of masks, serves both modes.
            object.__setattr__(self, "modes", self.possible_modes)
        self.require_positive("n_layer", "n_head", "d_model", "d_condition")
        if self.d_model % self.n_head or self.d_model // self.n_head % 2:
            raise ValueError(
                f"d_model is {self.d_model} and n_head {self.n_head}; d_model must be n_head times "
                "an even head size"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout!r}; it must lie in [0, 1)")

    def dit_shape(self) -> DiTShape:
        """Return the size of the DiT."""
        return DiTShape(
            self.vocab_size + 1,
            self.n_layer,
            self.n_head,
            self.d_model,
            self.d_condition,
            self.dropout,
        )


class Denoiser(ConditionalModel):
    """Base of all diffusion models, with masks or Gaussian noise.

    A subclass has its own training loss (`training_loss`) and reverse process (`reverse`).
    """

    config: DiffusionConfig
    default_draws = DRAWS

    # ---- training

    def nll(
        self, batch: Batch, mode: str = "diffusion", *, weights: Tensor | None = None
    ) -> tuple[Tensor, int]:
        """Return the training loss in mode `diffusion`, a sum over targets, and their number.

        The noise comes from torch's global generator. In mode `ac` it is the negative
        log-likelihood.
        """
        if mode != "diffusion":
            return super().nll(batch, mode, weights=weights)
        check_batch(self.config, batch, mode)
        targets = batch.targets()
        return self.training_loss(batch.tokens, targets, batch.lengths, weights), int(targets.sum())

    @abstractmethod
    def training_loss(
        self, tokens: Tensor, targets: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the sum over targets (B, T) of their terms, each times its weight."""

    # ---- samples

    def ancestral(
        self,
        batch: Batch,
        steps: int | None = None,
        seeds: Tensor | None = None,
        temperature: float = 1.0,
        *,
        restrict: Restrict | None = None,
    ) -> Denoised:
        """Fill the targets by the reverse process.

        Args:
            batch: Sequences; tokens at targets are ignored.
            steps: Number of steps; None: the system's default.
            seeds: (B,) one seed per sequence; by default 0, 1, ...
            temperature: Of the token distribution; 0 takes the most likely token.
            restrict: Which tokens are allowed where. A revealed position gets one of them, with
                probabilities in proportion to the model's.

        Returns:
            Tokens and their log-probabilities.

        Raises:
            ValueError: `steps`, `seeds` or `temperature` is out of range.
        """
        return finish(self.ancestral_passes(batch, steps, seeds, temperature, restrict=restrict))

    def ancestral_passes(
        self,
        batch: Batch,
        steps: int | None = None,
        seeds: Tensor | None = None,
        temperature: float = 1.0,
        *,
        restrict: Restrict | None = None,
    ) -> Passes[Denoised]:
        """Run `ancestral` one pass of the network at a time."""
        B = len(batch)
        batch = batch.without_targets()
        check_batch(self.config, batch, "diffusion")
        if seeds is None:
            seeds = torch.arange(B)
        if seeds.shape != (B,):
            raise ValueError(
                f"seeds has shape {tuple(seeds.shape)}; there must be one for each of the {B} "
                "sequences"
            )
        if steps is not None and steps < 1:
            raise ValueError(f"steps is {steps}; it must be at least 1")
        if not temperature >= 0.0:
            raise ValueError(f"temperature is {temperature!r}; it must be zero or more")
        return self.reverse(batch, steps, Draws(seeds, batch.width, temperature, restrict))

    @abstractmethod
    def reverse(self, batch: Batch, steps: int | None, draws: Draws) -> Passes[Denoised]:
        """Run the reverse process one pass of the network at a time; see `ancestral`."""


class DiffusionModel(Denoiser):
    """Base of masked diffusion: a network that reads masks and predicts the tokens under them.

    A system adds what its logits mean: the cost of a masked target (`cost`), its training loss, and
    its reverse process.
    """

    config: DiffusionConfig
    answers = {"diffusion": BOUND, "ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: DiffusionConfig, backbone: nn.Module | None = None) -> None:
        super().__init__()
        self.config = config
        self.backbone = DiT(config.dit_shape()) if backbone is None else backbone

    @property
    def steps(self) -> int | None:
        """The number of steps of a process in discrete time, else None."""
        return None

    # ---- the network

    @property
    def dit(self) -> DiT:
        """The network, where it is a DiT."""
        assert isinstance(self.backbone, DiT)
        return self.backbone

    @property
    def head(self) -> Tensor:
        return self.dit.output_layer.linear.weight[: self.config.vocab_size]

    @property
    def head_bias(self) -> Tensor | None:
        return self.dit.output_layer.linear.bias[: self.config.vocab_size]

    def blocks(self) -> list[nn.Module]:
        return list(self.dit.blocks)

    def embedding_tables(self) -> list[Tensor]:
        return [self.dit.vocab_embed.embedding, self.dit.output_layer.linear.weight]

    def noise_level(self, t: Tensor) -> Tensor:
        """Return the noise level (B,) that the network reads at time t (B,)."""
        return sigma_at(t)

    def time_of(self, share: Tensor) -> Tensor:
        """Return the time (B,) at which this share (B,) of the tokens is masked."""
        return (share / (1 - EPSILON)).clamp(max=1.0)

    def states(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: Tensor, wanted: Tensor
    ) -> Tensor:
        """Return final states (N, d) of the wanted positions.

        Args:
            tokens: (B, T) ids.
            masked: (B, T) bool, where the network reads masks.
            lengths: (B,) true lengths.
            t: (B,) times.
            wanted: (B, T) bool.
        """
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        read = tokens.long().masked_fill(masked | ~inside, self.config.mask_id)
        checkpointed = self.checkpoint_activations and self.training
        return self.dit(read, self.noise_level(t), lengths, checkpointed)[wanted]

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return states where all targets are masked, at the time with that share of masks.

        Each wanted position that is given takes an extra row, in which it is masked too; that is
        costly.
        """

        def states(row: Tensor, masked: Tensor, places: Tensor) -> Tensor:
            lengths = batch.lengths[row]
            time = self.time_of(masked.sum(1).double() / lengths)
            return self.states(batch.tokens[row], masked, lengths, time, places)

        return each_given_alone(wanted, batch.targets(), states, TOKENS_AT_ONCE)

    # ---- the bound

    @abstractmethod
    def cost(self, hidden: Tensor, targets: Tensor, t: Tensor) -> Tensor:
        """Return the cost c(x_t, t) (N,) of masked targets, which the bound weighs by 1/t.

        Args:
            hidden: (N, d) final states.
            targets: (N,) true tokens.
            t: (N,) times.
        """

    def costs(self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: Tensor) -> Tensor:
        """Return `cost` (B, T) at the masked positions, zero elsewhere."""
        values = self.cost(
            self.states(tokens, masked, lengths, t, masked),
            tokens[masked].long(),
            t[:, None].expand_as(masked)[masked],
        )
        return values.new_zeros(masked.shape).masked_scatter(masked, values)

    def estimate(
        self, batch: Batch, mode: str = "diffusion", *, draws: int | None = None, seed: int = 0
    ) -> Estimate:
        """Return each target's share of a bound, or in mode `ac` its exact log-probability.

        The lower bound is -integral over t of (1/t) E[sum of `cost` over masked targets]; see
        `conditional_bound`. It has no gradients.
        """
        if mode != "diffusion":
            return super().estimate(batch, mode)
        check_batch(self.config, batch, mode)
        return conditional_bound(
            self.costs,
            batch,
            draws=self.default_draws if draws is None else draws,
            seed=seed,
            steps=self.steps,
        )


def over_logits(
    function: Callable[..., Tensor],
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    *rows: Tensor,
) -> Tensor:
    """Return function(logits (n, V), *rows) (n,), computed chunk by chunk.

    The logits of all rows are never held at once, nor stored for the backward pass.
    """

    def of_chunk(hidden: Tensor, head: Tensor, bias: Tensor | None, *rows: Tensor) -> Tensor:
        logits = logits_of(hidden, head, bias)
        return function(logits.to(wide(logits.dtype)), *rows)

    chunks = row_chunks(len(hidden), len(head))
    parts = [
        recomputed(of_chunk, hidden[some], head, bias, *(row[some] for row in rows))
        for some in chunks
    ]
    return torch.cat(parts) if parts else hidden.new_zeros(0)


def random_times(batch: int, device: torch.device, stratified: bool) -> Tensor:
    """Return times (B,) in [EARLIEST, 1] from torch's global generator.

    Stratified: one in each of B equal parts of the interval.
    """
    u = torch.rand(batch, device=device, dtype=torch.float64)
    if stratified:
        u = (torch.arange(batch, device=device) + u) / batch
    return EARLIEST + (1 - EARLIEST) * u


def random_masks(targets: Tensor, probability: Tensor) -> Tensor:
    """Mask each target with its sequence's probability (B,), from torch's global generator."""
    return targets & (torch.rand(targets.shape, device=targets.device) < probability[:, None])
