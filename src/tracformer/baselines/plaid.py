"""PLAID (Gulrajani & Hashimoto, 2023): Gaussian diffusion on learned token embeddings.

The noise, its schedule and the bound are in `reverse_process.py`: z_t = alpha_t x + sigma_t eps,
where x is the embedding of a token.

**Denoiser.** A token is a vector of norm 1 in few dimensions. The network reads noisy vectors and
returns a categorical distribution over tokens,

    log p(v | z_t) = (W h + b)_v + (alpha_t / sigma_t^2) <z_t, e(v)> + const,

where h is its state. The second term is the exact log-density of z_t under each token, which the
network need not learn. The expected embedding under p is x^; the reconstruction term is -log p(x |
z_0) from the same denoiser.

Published: unit norms, 16 dimensions, categorical predictions with that density, a learned schedule
from gamma_0 = -3 to gamma_1 = 6 whose shape minimises the variance of the loss, self-conditioning
in a quarter of the training rows. Choices made here:

- The network is the DiT of the masked systems, which reads gamma, so that only the diffusion
  differs from theirs. The density term is used from the first step on, without warm-up.
  Self-conditioned rows train embeddings and schedule as others do.
- Given tokens are read as clean embeddings with a mark, never noised and never counted. So that the
  network learns to use them, a share of the training rows that come without any gets a uniformly
  drawn number of them at random places.
- A fixed share of the training rows is spent on reconstruction, instead of one that follows running
  variances.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from tracformer.baselines import diffusion
from tracformer.baselines.diffusion import (
    TOKENS_AT_ONCE,
    Denoiser,
    DiffusionConfig,
    over_logits,
    standard_error,
)
from tracformer.baselines.dit import DiTBlock, DiTShape, NoiseLevel, Output, Trunk
from tracformer.baselines.reverse_process import (
    Denoised,
    Draws,
    Schedule,
    alpha_sigma,
    gaussians,
    prior_kl,
    step_back,
    untouched,
)
from tracformer.model.base import BOUND, Estimate, Passes, check_batch, each_given_alone
from tracformer.model.batch import Batch
from tracformer.model.likelihood import logits_of
from tracformer.rng import TIME, derived_seed, uniforms

PRESETS = {name: diffusion.PRESETS[name] for name in ("tiny", "mini")}
PRESETS["laptop"] = {**diffusion.PRESETS["laptop"], "n_layer": 7}


@dataclass(frozen=True)
class PlaidConfig(DiffusionConfig):
    """Shape of a `Plaid`, and the start of its schedule."""

    model_type = "plaid"
    possible_modes = ("diffusion",)
    presets = PRESETS

    d_embedding: int = 16
    gamma_0: float = -3.0  # log noise-to-signal at t = 0 and 1, before training
    gamma_1: float = 6.0
    # The network reads its own first guess, at the cost of a second pass.
    self_conditioning: bool = True
    given_share: float = 0.5  # share of the training rows without given tokens that get some

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("d_embedding")
        if not self.gamma_0 < self.gamma_1:
            raise ValueError(
                f"gamma_0 is {self.gamma_0!r} and gamma_1 {self.gamma_1!r}; gamma_0 must be less "
                "than gamma_1"
            )
        if not 0.0 <= self.given_share <= 1.0:
            raise ValueError(f"given_share is {self.given_share!r}; it must lie in [0, 1]")

    def dit_shape(self) -> DiTShape:
        return DiTShape(
            self.vocab_size, self.n_layer, self.n_head, self.d_model, self.d_condition, self.dropout
        )


class Network(Trunk):
    """The DiT, reading noisy or clean vectors (B, T, e) instead of tokens -> states (B, T, d)."""

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
        """Return states (B, T, d).

        Args:
            read: (B, T, e), z_t, clean where given.
            given: (B, T) bool.
            guess: (B, T, e), the network's own first guess, or zero.
            gamma: (B,) noise levels.
            lengths: (B,) true lengths.
            checkpointed: Recompute each block in the backward pass.
        """
        # (B,)
        noisy = (torch.sigmoid(-gamma) / self.size + torch.sigmoid(gamma)).rsqrt().to(read.dtype)
        # to a variance of 1 in each dimension
        scale = torch.where(given, self.size**0.5, noisy[:, None])
        x = self.input(read * scale[..., None]) + given[..., None] * self.mark
        if self.guess is not None:
            x = x + self.guess(guess * self.size**0.5)
        return self.transform(x, gamma, lengths, checkpointed)


# Share of the training rows, and of the draws of an estimate, for the reconstruction term.
RECONSTRUCTION = 1 / 8
SELF_CONDITIONED = 4  # one in four training rows reads a guess


class Plaid(Denoiser):
    """Gaussian diffusion on token embeddings e(v), with log p(v | z_t) from the denoiser.

    -log p(x_A | x_C) <= sum over targets of ( -log p(x | z_0) + KL(q(z_1 | x) || N(0, I))
                         + 1/2 integral of gamma' exp(-gamma) E |e(x) - x^(z_t, t)|^2 dt )

    `terms` computes the first and the third term, `prior` the second, `estimate` the sum.
    """

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
        """The embeddings e(v) (vocab_size, e), all of norm 1."""
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
        """Return (N, d + e), the input of `head`, of the targets.

        Args:
            read: (B, T, e), z_t at targets, clean where given.
            guess: (B, T, e), the network's own first guess, or zero.
            gamma: (B,) noise levels.
            targets: (B, T) bool.
            lengths: (B,) true lengths.
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
        """Return x^ (B, T, e), the expected embeddings of the targets; zero elsewhere."""
        table = self.table
        # Not in bfloat16: products with z are large, and their differences matter.
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
        """Return the embeddings (B, T, e) of tokens, zero in the padding."""
        inside = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        return self.table[tokens.long().masked_fill(~inside, 0)] * inside[..., None]

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the denoiser's states at t = 1, where z is pure noise.

        They predict the marginal of each target given the rest, for a first look and to fill token
        by token; the bound and `ancestral` use the whole model. The noise is a function of the
        position. Each wanted position that is given takes an extra row, in which it is a target
        too.
        """
        # (1, T, e)
        noise = gaussians([0], batch.width, self.config.d_embedding, 0).to(self.embedding)

        def states(row: Tensor, targets: Tensor, places: Tensor) -> Tensor:
            lengths = batch.lengths[row]
            read = torch.where(targets[..., None], noise, self.clean(batch.tokens[row], lengths))
            gamma = self.schedule.ends()[1].expand(len(row))
            hidden = self.states(read, torch.zeros_like(read), gamma, targets, lengths)
            return hidden[places[targets]]

        return each_given_alone(wanted, batch.targets(), states, TOKENS_AT_ONCE)

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
        """Return each target's cost (B, T).

        It is -log p(x | z_0) where `first` (B,), else -SNR'(t) |e(x) - x^|^2 / 2, where -SNR' =
        gamma' exp(-gamma).

        Args:
            tokens: (B, T) ids.
            targets: (B, T) bool.
            lengths: (B,) true lengths.
            level: gamma and gamma', (B,) each.
            first: (B,) bool, the rows of the reconstruction term.
            noise: (B, T, e), standard normal.
            guessing: (B,) bool, the rows that read a guess of their own.
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
        """Return the cost of each target at t = 1 (`prior_kl`)."""
        return prior_kl(self.schedule.ends()[1], self.config.d_embedding)

    @torch.no_grad()
    def estimate(
        self, batch: Batch, mode: str = "diffusion", *, draws: int | None = None, seed: int = 0
    ) -> Estimate:
        """Return each target's share of a lower bound on log p(targets | given).

        It is the bound of `reverse_process.py`: reconstruction, prior and the integral over t; it
        has no gradients. Times are stratified over `draws`; an eighth as many (at least two)
        estimate the reconstruction. The noise of draw j is a function of (seed, j, position,
        dimension) alone, so a sequence gives the same result in any batch. The standard error of a
        single draw is nan.
        """
        check_batch(self.config, batch, mode)
        draws = self.default_draws if draws is None else draws
        if draws < 1:
            raise ValueError(f"draws is {draws}; it must be at least 1")
        targets = batch.targets()
        seeds = [derived_seed(seed, number) for number in range(draws)]
        # one in each of `draws` equal parts of [0, 1)
        t = (torch.arange(draws) + uniforms(seeds, [0] * draws, TIME)) / draws
        start = torch.zeros(max(min(2, draws), int(draws * RECONSTRUCTION)), dtype=torch.float64)
        diffusion, reconstruction = (
            self._mean(batch.tokens, targets, batch.lengths, times, seeds, first)
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
        """Return the mean of `terms` (B, T) over draws at times t, and its standard error (B,).

        `first` is 1 for the reconstruction term, else 0. The standard error is that of the sum over
        a sequence.
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
                # One by one, and as running sums, so that neither chunks nor padding change a bit.
                total += term
                sums.append(term.cumsum(1)[:, -1])
        return Estimate(total / len(t), standard_error(torch.stack(sums)))

    # ---- training

    def training_loss(
        self, tokens: Tensor, targets: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the bound at one point of noise per row, summed over targets with their weights.

        An eighth of the rows is at t = 0, for the reconstruction, the others at a time t; one
        low-discrepancy number u per row decides both. A row that gets given tokens has fewer
        targets; a constant factor compensates for that on average, so that the sum is still one
        over the caller's targets, and every remaining target of the batch has about the same
        weight.
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
        """Give tokens to some of the rows where `bare` (B,).

        Of n targets a uniform number of 1..n is left, (n + 1) / 2 on average.

        Returns:
            What remains a target (B, T), and n / E[targets left] (B,) of each row.
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
    def reverse(self, batch: Batch, steps: int | None, draws: Draws) -> Passes[Denoised]:
        """Take `steps` equal steps from z_1 ~ N(0, I) to z_0, by default `max_length` of them.

        Then tokens are drawn from p(x | z_0); the temperature applies only there. A network with
        self-conditioning reads the guess of the step before.
        """
        steps = self.config.max_length if steps is None else steps
        (B, T), device, e = batch.tokens.shape, batch.device, self.config.d_embedding
        targets, filled, seeds = batch.targets(), untouched(batch.tokens), draws.seeds
        if not bool(targets.any()):
            return filled
        times = torch.tensor(
            [1.0 - step / steps for step in range(steps)] + [0.0],
            dtype=torch.float64,
            device=device,
        )
        gamma, _ = self.schedule(times)
        clean = self.clean(batch.tokens, batch.lengths)
        guess = torch.zeros_like(clean)
        z = gaussians(seeds, T, e, 0).to(device)
        for step in range(steps + 1):
            read = torch.where(targets[..., None], z.to(clean.dtype), clean)
            states = self.states(read, guess, gamma[step].expand(B), targets, batch.lengths)
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
