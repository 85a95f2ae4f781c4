"""MDLM (Sahoo et al., 2024): masked diffusion whose denoiser never predicts the mask.

With that, and with unmasked tokens copied (SUBS), the cost of a masked target is -log p(x_0), and
the bound on the log-likelihood of the targets x_A given x_C is a mean of cross-entropies:

    -log p(x_A | x_C) <= integral over t in (0, 1] of (1/t) E[ sum over masked targets of
                         -log p(x_0 | z_t) ] dt,   each target masked with probability t.

`DiffusionModel.estimate` computes it through `diffusion.conditional_bound`, whose derivation and
variance reduction are in `diffusion.py`; `MDLM.cost` is its integrand, `MDLM.training_loss` its
estimate from one t per sequence (the paper's last appendix). The network is the published DiT, or
the `ac` network of a Tracformer with everything else unchanged.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.baselines import diffusion
from tracformer.baselines.diffusion import (
    EPSILON,
    DiffusionConfig,
    DiffusionModel,
    random_masks,
    random_times,
    sigma_at,
)
from tracformer.baselines.reverse_process import Denoised, Draws, scheduled
from tracformer.model.base import Passes
from tracformer.model.batch import Batch
from tracformer.model.config import TracformerConfig
from tracformer.model.likelihood import logits_of, token_log_probs, weighted_nll
from tracformer.model.tracformer import Tracformer

BACKBONES = ("dit", "tracformer")

PRESETS: dict[str, dict[str, Any]] = {
    **diffusion.PRESETS,
    "laptop-tracformer": {
        "backbone": "tracformer",
        "vocab_size": 4096,
        "max_length": 256,
        "n_layer": 8,
        "n_head": 3,
        "d_model": 192,
        "n_max": 16,
        "init_std": 0.04,
    },  # 7.9M
}


@dataclass(frozen=True)
class MDLMConfig(DiffusionConfig):
    """Shape of an MDLM; n_layer, n_head, d_model and dropout apply to either network."""

    model_type = "mdlm"
    presets = PRESETS

    backbone: str = "dit"  # or "tracformer"
    # Whether the DiT reads sigma(t); the published models read 0.
    time_conditioning: bool = False
    n_max: int = 16  # of the Tracformer
    init_std: float = 0.02  # of the Tracformer

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone not in BACKBONES:
            raise ValueError(f"backbone is {self.backbone!r}; allowed: {', '.join(BACKBONES)}")
        if self.backbone == "tracformer":
            if self.time_conditioning:
                raise ValueError(
                    "time_conditioning is True, but backbone 'tracformer' has no input for a noise "
                    "level; set it to False"
                )
            self.tracformer()  # check its sizes

    def tracformer(self) -> TracformerConfig:
        """Return the configuration of the Tracformer network."""
        return TracformerConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            modes=("ac",),
            n_layer=self.n_layer,
            n_head=self.n_head,
            d_model=self.d_model,
            n_max=self.n_max,
            dropout=self.dropout,
            init_std=self.init_std,
        )


class MDLM(DiffusionModel):
    """Masked diffusion by cross-entropy.

    -log p(x_A | x_C) <= integral over t in (0, 1] of (1/t) E[ sum over masked targets of
                         -log p(x_0 | z_t) ] dt

    `estimate` computes the bound by `diffusion.conditional_bound`.

    Args:
        config: Shape of the model.
        attention: Implementation of attention, for a Tracformer network.
    """

    config: MDLMConfig
    config_class = MDLMConfig

    def __init__(self, config: MDLMConfig, attention: str = "native") -> None:
        super().__init__(
            config,
            Tracformer(config.tracformer(), attention) if config.backbone == "tracformer" else None,
        )

    # ---- the network

    @property
    def _tracformer(self) -> Tracformer | None:
        return self.backbone if isinstance(self.backbone, Tracformer) else None

    @property
    def head(self) -> Tensor:
        return super().head if self._tracformer is None else self._tracformer.head

    @property
    def head_bias(self) -> Tensor | None:
        return super().head_bias if self._tracformer is None else None

    def blocks(self) -> list[nn.Module]:
        return super().blocks() if self._tracformer is None else self._tracformer.blocks()

    def embedding_tables(self) -> list[Tensor]:
        return (
            super().embedding_tables()
            if self._tracformer is None
            else self._tracformer.embedding_tables()
        )

    def noise_level(self, t: Tensor) -> Tensor:
        """Return sigma(t) (B,), or zeros where the network does not depend on time."""
        return sigma_at(t) if self.config.time_conditioning else torch.zeros_like(t)

    def states(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: Tensor, wanted: Tensor
    ) -> Tensor:
        if self._tracformer is None:
            return super().states(tokens, masked, lengths, t, wanted)
        return self.hidden(Batch.unchecked(tokens, ~masked, lengths), "ac", wanted)[0]

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        if self._tracformer is None:
            return super().hidden(batch, mode, wanted)
        self._tracformer.checkpoint_activations = self.checkpoint_activations
        return self._tracformer.hidden(batch, "ac", wanted)

    # ---- what its logits mean

    def cost(self, hidden: Tensor, targets: Tensor, t: Tensor) -> Tensor:
        """Return -log p(x_0 | z_t) (N,) of masked targets."""
        return -token_log_probs(hidden, self.head, targets, self.head_bias)

    def training_loss(
        self, tokens: Tensor, targets: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Return the sum over masked targets of -log p(x_0 | z_t) / t, each times its weight.

        The factor 1/t is sigma'(t) / expm1(sigma(t)). t is stratified over the batch.
        """
        t = random_times(len(tokens), tokens.device, stratified=True)
        masked = random_masks(targets, (1 - EPSILON) * t)
        weight = (1.0 / t)[:, None].expand_as(masked)[masked].float()
        if weights is not None:
            weight = weight * weights[masked]
        hidden = self.states(tokens, masked, lengths, t, masked)
        return weighted_nll(hidden, self.head, tokens[masked].long(), weight, self.head_bias)

    def reverse(self, batch: Batch, steps: int | None, draws: Draws) -> Passes[Denoised]:
        """Reveal a masked position between t and s with probability 1 - s/t, from p(x_0 | z_t)."""
        return scheduled(self._predict, batch, steps, draws)

    def _predict(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: Tensor, wanted: Tensor
    ) -> Tensor:
        return logits_of(self.states(tokens, masked, lengths, t, wanted), self.head, self.head_bias)
