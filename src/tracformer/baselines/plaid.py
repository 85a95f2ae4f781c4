"""PLAID: Gaussian diffusion on token embeddings.

Gaussian noise on vectors, in continuous time (Kingma et al., 2021, "Variational Diffusion
Models").

z_t = alpha_t x + sigma_t eps with alpha_t^2 = sigmoid(-gamma(t)) and sigma_t^2 = sigmoid(gamma(t)),
so that the signal-to-noise ratio is SNR(t) = exp(-gamma(t)). gamma rises from gamma_0 at t = 0 to
gamma_1 at t = 1. For a denoiser that answers x^ to z_t,

    -log p(x) <= -log p(x | z_0) + KL(q(z_1 | x) || N(0, I))
                 - 1/2 integral of SNR'(t) E |x - x^(z_t, t)|^2 dt.

PLAID's sizes, and its network: the blocks of the DiT, reading vectors instead of tokens.

PLAID (Gulrajani & Hashimoto, 2023): Gaussian diffusion on learnt token embeddings, with its
variational bound.

A token is a vector of norm 1 in few dimensions. The denoiser reads noisy vectors and answers with a
categorical distribution over tokens,

    log p(v | z_t) = (W h + b)_v + (alpha_t / sigma_t^2) <z_t, e(v)> + const,

h the network's state; the second term is the exact log-density of z_t under each token, which the
network need not learn. The expected embedding under p is the guess x^ of the bound (`gaussian.py`).
The bound's reconstruction term is -log p(x | z_0) from the same denoiser.

Published: unit norms, 16 dimensions, categorical answers with that density, a learnt schedule from
gamma_0 = -3 to gamma_1 = 6 whose shape minimises the variance of the loss, self-conditioning in a
quarter of the training rows. Our readings:

- The network is the DiT of the masked systems, told gamma, so that only the diffusion differs from
  theirs. A density term from the first step on, no warm-up. Self-conditioned rows train embeddings
  and schedule as others do.
- Given tokens are read as clean embeddings with a mark, never noised and never counted. So that the
  network learns to use them, a share of the training rows that come without any gets some: as many
  as a uniform draw says, at random places.
- A fixed share of the training rows is spent on reconstruction, instead of one that follows running
  variances.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from tracformer.baselines.diffusion import (
    TOKENS_AT_ONCE,
    Denoiser,
    DiffusionConfig,
    over_logits,
    standard_error,
)
from tracformer.baselines.dit import DiTBlock, DiTShape, NoiseLevel, Output, Trunk
from tracformer.baselines.reverse_process import Denoised, Draws, untouched
from tracformer.model.base import BOUND, Estimate, Passes, each_given_alone, targets_of
from tracformer.model.likelihood import logits_of
from tracformer.rng import TIME, Integers, derived_seed, uniforms

UNITS = 1024
RATE = 7.0  # the ends of the schedule are learnt that much faster than the network
GAUSS = 2**32  # first stream of Gaussian numbers


class Schedule(nn.Module):
    """gamma(t) = gamma_0 + (gamma_1 - gamma_0) (h(t) - h(0)) / (h(1) - h(0)), all of it learnt.

    h(t) = sum over k of softplus(c_k) tanh(softplus(a_k) (t - 1/2) + b_k) rises with t, whatever
    its weights. All of it is in float64.
    """

    def __init__(self, gamma_0: float, gamma_1: float) -> None:
        super().__init__()
        self.bounds = nn.Parameter(torch.tensor([gamma_0, gamma_1]) / RATE)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(UNITS)) for _ in range(3))

    def ends(self) -> tuple[Tensor, Tensor]:
        """gamma_0 and gamma_1."""
        low, high = (self.bounds.double() * RATE).unbind()
        return low, high

    def forward(self, t: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """gamma and its derivative at times t (N,).

        The ends change the bound; the shape between them changes only the variance of its estimate.
        A `factor` (N,) multiplies the gradient that the shape gets from each time. With twice that
        time's loss, put there before the backward pass, the shape descends on the mean square of
        the losses, while all else descends on their mean.
        """
        low, high = self.ends()
        start, stop = (self._shape(torch.full_like(t[:1], end))[0] for end in (0.0, 1.0))
        value, slope = self._shape(t)
        value, slope = (value - start) / (stop - start), slope / (stop - start)
        if factor is not None and value.requires_grad:
            value.register_hook(lambda gradient: gradient * factor)
            slope.register_hook(lambda gradient: gradient * factor)
        return low + (high - low) * value, (high - low) * slope

    def _shape(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """h and h' at times t (N,); sums of products rather than matrix products,
        whose last bits depend on N.
        """
        a, b, c = softplus(self.a.double()), self.b.double(), softplus(self.c.double())
        bent = torch.tanh((t[:, None] - 0.5) * a + b)  # (N, UNITS)
        return (bent * c).sum(-1), ((1 - bent.square()) * a * c).sum(-1)


def alpha_sigma(gamma: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(-gamma).sqrt(), torch.sigmoid(gamma).sqrt()


def prior_kl(gamma_1: Tensor, size: int) -> Tensor:
    """KL(N(alpha_1 x, sigma_1^2 I) || N(0, I)) for x of norm 1 in `size` dimensions;
    the same for all such x.
    """
    alpha_square = torch.sigmoid(-gamma_1)
    # softplus(-gamma) = -log sigma^2
    return 0.5 * (size * (softplus(-gamma_1) - alpha_square) + alpha_square)


def step_back(z: Tensor, guess: Tensor, gamma_t: Tensor, gamma_s: Tensor, noise: Tensor) -> Tensor:
    """z_s given z_t for s < t, where x is the guess.

    With c = 1 - exp(gamma_s - gamma_t): mean (alpha_s / alpha_t) (1 - c) z_t + alpha_s c x,
    variance sigma_s^2 c.
    """
    c = -torch.expm1(gamma_s - gamma_t)
    (alpha_t, _), (alpha_s, sigma_s) = alpha_sigma(gamma_t), alpha_sigma(gamma_s)
    return alpha_s / alpha_t * (1 - c) * z + alpha_s * c * guess + sigma_s * c.sqrt() * noise


def gaussians(seeds: Integers, length: int, size: int, number: int) -> Tensor:
    """(N, length, size) standard normal, float64: each a function of (its seed, position,
    dimension, number) alone.
    """
    N = len(seeds)
    places = torch.arange(length)[:, None] * 2**20 + torch.arange(size)  # (length, size)
    repeated = torch.as_tensor(seeds).cpu().repeat_interleave(length * size)
    u = uniforms(repeated, places.flatten().repeat(N), GAUSS + number).view(N, length, size)
    return torch.special.ndtri(u.clamp(min=2.0**-54))


PRESETS: dict[str, dict[str, Any]] = {
    # Sizes for one machine without a GPU; bring your own vocabulary.
    "laptop": {
        "vocab_size": 4096,
        "max_length": 256,
        "n_layer": 7,
        "n_head": 4,
        "d_model": 256,
        "d_condition": 128,
    },  # 8.2M
    "mini": {
        "vocab_size": 4096,
        "max_length": 256,
        "n_layer": 4,
        "n_head": 3,
        "d_model": 192,
        "d_condition": 64,
    },  # 2.1M without tables
    "tiny": {
        "vocab_size": 256,
        "max_length": 128,
        "n_layer": 4,
        "n_head": 3,
        "d_model": 96,
        "d_condition": 32,
    },  # 0.6M
}


@dataclass(frozen=True)
class PlaidConfig(DiffusionConfig):
    model_type = "plaid"
    possible_modes = ("diffusion",)
    presets = PRESETS

    d_embedding: int = 16
    gamma_0: float = -3.0  # log noise-to-signal at t = 0 and 1, where learning starts
    gamma_1: float = 6.0
    # the network reads its own first guess, at the price of a second pass
    self_conditioning: bool = True
    given_share: float = 0.5  # of the training rows without given tokens: those that get some

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("d_embedding")
        if not self.gamma_0 < self.gamma_1:
            raise ValueError(
                f"gamma_0 is {self.gamma_0!r} and gamma_1 {self.gamma_1!r}; noise must grow from "
                "the first to the second"
            )
        if not 0.0 <= self.given_share <= 1.0:
            raise ValueError(f"given_share is {self.given_share!r}; it must lie in [0, 1]")

    def dit_shape(self) -> DiTShape:
        return DiTShape(
            self.vocab_size, self.n_layer, self.n_head, self.d_model, self.d_condition, self.dropout
        )


class Network(Trunk):
    """Noisy or clean vectors (B, T, e) -> states (B, T, d)."""

    def __init__(self, config: PlaidConfig) -> None:
        super().__init__()
        self.shape = config.dit_shape()
        d, self.size = config.d_model, config.d_embedding
        self.input = nn.Linear(self.size, d, bias=False)
        self.mark = nn.Parameter(0.5 * torch.randn(d))  # of given positions
        self.guess = nn.Linear(self.size, d, bias=False) if config.self_conditioning else None
        if self.guess is not None:
            nn.init.zeros_(self.guess.weight)
        self.sigma_map = NoiseLevel(config.d_condition)
        self.blocks = nn.ModuleList(DiTBlock(self.shape) for _ in range(config.n_layer))
        self.output_layer = Output(self.shape)

    def forward(
        self,
        read: Tensor,
        given: Tensor,
        guess: Tensor,
        gamma: Tensor,
        lengths: Tensor,
        checkpointed: bool,
    ) -> Tensor:
        """read: (B, T, e), clean where given (B, T); guess: (B, T, e); gamma: (B,)"""
        # (B,)
        noisy = (torch.sigmoid(-gamma) / self.size + torch.sigmoid(gamma)).rsqrt().to(read.dtype)
        # to a variance of 1 in each dimension
        scale = torch.where(given, self.size**0.5, noisy[:, None])
        x = self.input(read * scale[..., None]) + given[..., None] * self.mark
        if self.guess is not None:
            x = x + self.guess(guess * self.size**0.5)
        return self.transform(x, gamma, lengths, checkpointed)


# share of the training rows, and of the draws of an estimate, that go to the reconstruction term
RECONSTRUCTION = 1 / 8
SELF_CONDITIONED = 4  # one training row of so many


class Plaid(Denoiser):
    config: PlaidConfig
    config_class = PlaidConfig
    answers = {"diffusion": BOUND}  # noqa: RUF012

    def __init__(self, config: PlaidConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(
            normalize(torch.randn(config.vocab_size, config.d_embedding), dim=1)
        )
        self.schedule = Schedule(config.gamma_0, config.gamma_1)
        self.network = Network(config)

    # ---- the denoiser

    @property
    def table(self) -> Tensor:
        """e(v), all of norm 1: (vocab_size, e)"""
        return normalize(self.embedding, dim=1)

    @property
    def head(self) -> Tensor:
        """(vocab_size, d + e): for the network's state and for z_t alpha_t / sigma_t^2."""
        return torch.cat((self.network.output_layer.linear.weight, self.table), dim=1)

    @property
    def head_bias(self) -> Tensor | None:
        return self.network.output_layer.linear.bias

    def blocks(self) -> list[nn.Module]:
        return list(self.network.blocks)

    def embedding_tables(self) -> list[Tensor]:
        return [self.embedding, self.network.output_layer.linear.weight]

    def states(
        self, read: Tensor, guess: Tensor, gamma: Tensor, targets: Tensor, lengths: Tensor
    ) -> Tensor:
        """(N, d + e), what `head` takes, of the targets.

        read: (B, T, e), z_t at targets, clean where given; gamma: (B,)
        """
        given = ~targets & (
            torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]
        )
        checkpointed = self.checkpoint_activations and self.training
        hidden = self.network(read, given, guess, gamma, lengths, checkpointed)[targets]
        alpha, sigma = alpha_sigma(gamma)
        density = read * (alpha / sigma.square()).to(read.dtype)[:, None, None]
        return torch.cat((hidden.to(read.dtype), density[targets]), dim=1)

    def guesses(self, states: Tensor, targets: Tensor) -> Tensor:
        """(B, T, e): expected embeddings of the targets, zero elsewhere."""
        table = self.table
        # large products with z, whose differences matter
        with torch.autocast(states.device.type, enabled=False):
            values = over_logits(
                lambda logits: logits.softmax(-1) @ table.to(logits.dtype),
                states,
                self.head,
                self.head_bias,
            )
        return table.new_zeros(*targets.shape, table.shape[1]).masked_scatter(
            targets[..., None], values.to(table.dtype)
        )

    def clean(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, e): embeddings, zero in the padding."""
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        return self.table[tokens.long().masked_fill(~inside, 0)] * inside[..., None]

    def hidden(
        self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the denoiser says at t = 1, where z is noise alone: about the marginal of each
        target given the rest.

        For a first look, and to fill token by token; the bound and `ancestral` speak for the model
        itself. The noise is a function of the position. A wanted position that is given takes a run
        of its own, in which it is a target too.
        """
        # (1, T, e)
        noise = gaussians([0], tokens.shape[1], self.config.d_embedding, 0).to(self.embedding)

        def states(row: Tensor, targets: Tensor, asked: Tensor) -> Tensor:
            read = torch.where(targets[..., None], noise, self.clean(tokens[row], lengths[row]))
            gamma = self.schedule.ends()[1].expand(len(row))
            return self.states(read, torch.zeros_like(read), gamma, targets, lengths[row])[
                asked[targets]
            ]

        return each_given_alone(wanted, targets_of(context, lengths), states, TOKENS_AT_ONCE)

    # ---- the bound

    def terms(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: Tensor,
        level: tuple[Tensor, Tensor],
        first: Tensor,
        noise: Tensor,
        guessing: Tensor,
    ) -> Tensor:
        """(B, T): each target's cost: -log p(x | z_0) where first (B,), else -SNR'(t) |e(x) - x^|^2
        / 2, -SNR' = gamma' exp(-gamma).

        level: gamma and gamma', (B,) each; noise: (B, T, e); guessing: (B,), the rows that read a
        guess of their own.
        """
        gamma, slope = level
        table, clean = self.table, self.clean(tokens, lengths)
        alpha, sigma = (x.to(clean.dtype)[:, None, None] for x in alpha_sigma(gamma))
        # z_t at targets
        read = torch.where(targets[..., None], alpha * clean + sigma * noise.to(clean.dtype), clean)
        guess = torch.zeros_like(read)
        if bool(guessing.any()):
            with torch.no_grad():
                inputs = (
                    read[guessing],
                    guess[guessing],
                    gamma[guessing],
                    targets[guessing],
                    lengths[guessing],
                )
                guess[guessing] = self.guesses(self.states(*inputs), targets[guessing])
        states = self.states(read, guess, gamma, targets, lengths)
        weight = 0.5 * slope * torch.exp(-gamma)

        def of(logits: Tensor, x: Tensor, weight: Tensor, first: Tensor) -> Tensor:
            log_p = logits.log_softmax(-1)
            vectors = table.to(log_p.dtype)
            error = (log_p.exp() @ vectors - vectors[x]).square().sum(-1)
            return torch.where(
                first, -log_p.gather(1, x[:, None])[:, 0], weight.to(error.dtype) * error
            )

        rows = (
            tokens[targets].long(),
            *(x[:, None].expand_as(targets)[targets] for x in (weight, first)),
        )
        with torch.autocast(states.device.type, enabled=False):
            values = over_logits(of, states, self.head, self.head_bias, *rows)
        return values.new_zeros(targets.shape).masked_scatter(targets, values)

    def prior(self) -> Tensor:
        """What each target costs at t = 1."""
        return prior_kl(self.schedule.ends()[1], self.config.d_embedding)

    @torch.no_grad()
    def estimate(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str = "diffusion",
        lengths: Tensor | None = None,
        *,
        draws: int | None = None,
        seed: int = 0,
        insist: bool = False,
    ) -> Estimate:
        """Each target's share of a lower bound on log p(targets | given), without gradients.

        Times are stratified over `draws`; an eighth as many (at least two) estimate the
        reconstruction. The noise of draw j is a function of (seed, j, position, dimension) alone,
        so a sequence gives the same result in any batch. One draw has no standard error: nan.
        """
        lengths = self._check(tokens, context, mode, lengths, insist)
        draws = self.default_draws if draws is None else draws
        if draws < 1:
            raise ValueError(f"draws is {draws}; it must be at least 1")
        targets = targets_of(context, lengths)
        seeds = [derived_seed(seed, number) for number in range(draws)]
        # one in each of `draws` equal parts of [0, 1)
        t = (torch.arange(draws) + uniforms(seeds, [0] * draws, TIME)) / draws
        start = torch.zeros(max(min(2, draws), int(draws * RECONSTRUCTION)), dtype=torch.float64)
        diffusion, reconstruction = (
            self._mean(tokens, targets, lengths, times, seeds, first)
            for first, times in enumerate((t, start))
        )
        values = -(diffusion.values + reconstruction.values) - torch.where(
            targets, self.prior(), 0.0
        )
        assert diffusion.standard_error is not None
        assert reconstruction.standard_error is not None
        error = torch.hypot(diffusion.standard_error, reconstruction.standard_error)
        return Estimate(values.to(self.embedding.dtype), error.to(self.embedding.dtype))

    def _mean(
        self,
        tokens: Tensor,
        targets: Tensor,
        lengths: Tensor,
        t: Tensor,
        seeds: list[int],
        first: int,
    ) -> Estimate:
        """The mean of `terms` (B, T) over draws at times t, and the standard error (B,) of its
        sums. first: 1 for reconstruction, else 0
        """
        (B, T), device = tokens.shape, tokens.device
        size = max(1, TOKENS_AT_ONCE // (B * T))
        total, sums = torch.zeros(B, T, dtype=torch.float64, device=device), []
        for start in range(0, len(t), size):
            some = t[start : start + size].to(device)
            n = len(some)
            noise = (
                gaussians(seeds[start : start + n], T, self.config.d_embedding, first)
                .to(device)
                .repeat_interleave(B, 0)
            )
            gamma, slope = (x.repeat_interleave(B) for x in self.schedule(some))
            at_first, guessing = (
                torch.full((n * B,), flag, device=device)
                for flag in (bool(first), self.config.self_conditioning)
            )
            rows = (tokens.repeat(n, 1), targets.repeat(n, 1), lengths.repeat(n))
            for term in (
                self.terms(*rows, (gamma, slope), at_first, noise, guessing)
                .double()
                .unflatten(0, (n, B))
            ):
                # one by one, and as running sums: neither the chunks nor padding may change a bit
                total += term
                sums.append(term.cumsum(1)[:, -1])
        return Estimate(total / len(t), standard_error(torch.stack(sums)))

    # ---- training

    def training_loss(
        self, tokens: Tensor, targets: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """The bound at one point of noise a row: an eighth of the rows at t = 0, for the
        reconstruction, the others at a time t.

        One low-discrepancy number u a row decides both. A row that gets given tokens has fewer
        targets; a constant factor makes up for that on average, so that the sum is still one over
        the caller's targets, and every remaining target of the batch weighs about alike.
        """
        B, device = len(tokens), tokens.device
        u = (
            torch.arange(B, device=device) / B + torch.rand(1, dtype=torch.float64, device=device)
        ) % 1.0
        first = u < RECONSTRUCTION
        t = ((u - RECONSTRUCTION) / (1 - RECONSTRUCTION)).clamp(min=0.0)
        offset = torch.randint(SELF_CONDITIONED, (1,), device=device)
        guessing = (
            (torch.arange(B, device=device) + offset) % SELF_CONDITIONED == 0
        ) & self.config.self_conditioning
        inside = torch.arange(tokens.shape[1], device=device) < lengths[:, None]
        targets, scale = self._give(targets, (targets == inside).all(1))
        factor = torch.ones(B, dtype=torch.float64, device=device)
        noise = torch.randn(*tokens.shape, self.config.d_embedding, device=device)
        terms = self.terms(
            tokens, targets, lengths, self.schedule(t, factor), first, noise, guessing
        )
        factor.copy_(
            torch.where(first, 1.0, 2.0 * terms.detach().sum(1) / targets.sum(1).clamp(min=1))
        )
        drawn = (
            terms
            * torch.where(first, 1 / RECONSTRUCTION, 1 / (1 - RECONSTRUCTION)).to(terms.dtype)[
                :, None
            ]
        )
        whole = (drawn + torch.where(targets, self.prior().to(terms.dtype), 0.0)) * scale.to(
            terms.dtype
        )[:, None]
        return (whole if weights is None else whole * weights).sum()

    def _give(self, targets: Tensor, bare: Tensor) -> tuple[Tensor, Tensor]:
        """Give tokens to some of the rows where bare (B,): what stays a target (B, T), and each
        row's n / E[targets left] (B,).

        Of n targets a uniform number of 1..n is left, (n + 1) / 2 on average.
        """
        n, share = targets.sum(1), self.config.given_share
        chosen = bare & (torch.rand(len(targets), device=targets.device) < share)
        left = 1 + (torch.rand(len(targets), device=targets.device) * n).long().clamp(
            max=(n - 1).clamp(min=0)
        )
        turn = (
            torch.where(targets, torch.rand(targets.shape, device=targets.device), torch.inf)
            .argsort(1)
            .argsort(1)
        )
        scale = 1 / (1 - share * (n - 1) / (2 * n.clamp(min=1)))
        return targets & (~chosen[:, None] | (turn < left[:, None])), torch.where(bare, scale, 1.0)

    # ---- samples

    @torch.no_grad()
    def reverse(
        self, tokens: Tensor, context: Tensor, lengths: Tensor, steps: int | None, draws: Draws
    ) -> Passes[Denoised]:
        """`steps` equal steps from z_1 ~ N(0, I) to z_0, by default as many as the longest sequence
        takes tokens; then tokens are drawn from p(x | z_0), where alone the temperature matters. A
        network with self-conditioning reads the guess of the step before.
        """
        steps = self.config.max_length if steps is None else steps
        (B, T), device, e, seeds = tokens.shape, tokens.device, self.config.d_embedding, draws.seeds
        targets, filled = targets_of(context, lengths), untouched(tokens)
        if not bool(targets.any()):
            return filled
        times = torch.tensor(
            [1.0 - step / steps for step in range(steps)] + [0.0],
            dtype=torch.float64,
            device=device,
        )
        gamma, _ = self.schedule(times)
        clean = self.clean(tokens, lengths)
        guess = torch.zeros_like(clean)
        z = gaussians(seeds, T, e, 0).to(device)
        for step in range(steps + 1):
            read = torch.where(targets[..., None], z.to(clean.dtype), clean)
            states = self.states(read, guess, gamma[step].expand(B), targets, lengths)
            if step < steps:
                guess = self.guesses(states, targets)
                z = step_back(
                    z,
                    guess.double(),
                    gamma[step],
                    gamma[step + 1],
                    gaussians(seeds, T, e, step + 1).to(device),
                )
            yield
        with torch.autocast(device.type, enabled=False):
            logits = logits_of(states, self.head, self.head_bias)
        draws.reveal(filled, logits, targets)
        return filled
