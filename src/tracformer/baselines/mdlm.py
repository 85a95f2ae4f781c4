"""MDLM (Sahoo et al., 2024): masked diffusion whose denoiser never predicts the mask and keeps what
it sees (SUBS).

Then the cost of a masked target is -log p(x_0), and the bound a mean of cross-entropies: the
paper's last appendix. The network may be the published DiT, or the AC network of a Tracformer, with
everything else unchanged.
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
    """n_layer, n_head, d_model and dropout belong to either backbone."""

    model_type = "mdlm"
    presets = PRESETS

    backbone: str = "dit"  # or "tracformer"
    # of the DiT: whether it is told sigma(t); the published models are told 0
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
            self.tracformer()  # its own checks

    def tracformer(self) -> TracformerConfig:
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
        return sigma_at(t) if self.config.time_conditioning else torch.zeros_like(t)

    def states(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: Tensor, wanted: Tensor
    ) -> Tensor:
        if self._tracformer is None:
            return super().states(tokens, masked, lengths, t, wanted)
        return self.hidden(tokens, ~masked, "ac", lengths, wanted)[0]

    def hidden(
        self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self._tracformer is None:
            return super().hidden(tokens, context, mode, lengths, wanted)
        self._tracformer.checkpoint_activations = self.checkpoint_activations
        return self._tracformer.hidden(tokens, context, "ac", lengths, wanted)

    # ---- what its logits mean

    def cost(self, hidden: Tensor, targets: Tensor, t: Tensor) -> Tensor:
        """-log p(x_0)"""
        return -token_log_probs(hidden, self.head, targets, self.head_bias)

    def training_loss(
        self, tokens: Tensor, targets: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        """Each masked target: -log p(x_0) sigma' / expm1(sigma), which is -log p(x_0) / t.

        t is stratified over the batch.
        """
        t = random_times(len(tokens), tokens.device, stratified=True)
        masked = random_masks(targets, (1 - EPSILON) * t)
        weight = (1.0 / t)[:, None].expand_as(masked)[masked].float()
        if weights is not None:
            weight = weight * weights[masked]
        hidden = self.states(tokens, masked, lengths, t, masked)
        return weighted_nll(hidden, self.head, tokens[masked].long(), weight, self.head_bias)

    def reverse(
        self, tokens: Tensor, context: Tensor, lengths: Tensor, steps: int | None, draws: Draws
    ) -> Passes[Denoised]:
        """Between t and s a masked position is revealed with probability 1 - s/t,
        its token drawn from p(x_0).
        """
        return scheduled(self._predict, tokens, context, lengths, steps, draws)

    def _predict(
        self, tokens: Tensor, masked: Tensor, lengths: Tensor, t: Tensor, wanted: Tensor
    ) -> Tensor:
        return logits_of(self.states(tokens, masked, lengths, t, wanted), self.head, self.head_bias)
