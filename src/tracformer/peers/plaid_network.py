"""PLAID's sizes, and its network: the blocks of the DiT, reading vectors instead of tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.peers.diffusion import DiffusionConfig
from tracformer.peers.dit import Block, DiTShape, NoiseLevel, Output, Trunk

PRESETS: dict[str, dict[str, Any]] = {
    # Sizes for one machine without a GPU; bring your own vocabulary.
    "laptop": {"vocab_size": 4096, "max_length": 256, "n_layer": 7, "n_head": 4, "d_model": 256, "d_condition": 128},  # 8.2M
    "mini": {"vocab_size": 4096, "max_length": 256, "n_layer": 4, "n_head": 3, "d_model": 192, "d_condition": 64},  # 2.1M without tables
    "tiny": {"vocab_size": 256, "max_length": 128, "n_layer": 4, "n_head": 3, "d_model": 96, "d_condition": 32},  # 0.6M
}


@dataclass(frozen=True)
class PlaidConfig(DiffusionConfig):
    model_type = "plaid"
    possible_modes = ("diffusion",)
    presets = PRESETS

    d_embedding: int = 16
    gamma_0: float = -3.0  # log noise-to-signal at t = 0 and 1, where learning starts
    gamma_1: float = 6.0
    self_conditioning: bool = True  # the network reads its own first guess, at the price of a second pass
    given_share: float = 0.5  # of the training rows without given tokens: those that get some

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("d_embedding")
        if not self.gamma_0 < self.gamma_1:
            raise ValueError(f"gamma_0 is {self.gamma_0!r} and gamma_1 {self.gamma_1!r}; noise must grow from the first to the second")
        if not 0.0 <= self.given_share <= 1.0:
            raise ValueError(f"given_share is {self.given_share!r}; it must lie in [0, 1]")

    def dit_shape(self) -> DiTShape:
        return DiTShape(self.vocab_size, self.n_layer, self.n_head, self.d_model, self.d_condition, self.dropout)


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
        self.blocks = nn.ModuleList(Block(self.shape) for _ in range(config.n_layer))
        self.output_layer = Output(self.shape)

    def forward(self, read: Tensor, given: Tensor, guess: Tensor, gamma: Tensor, lengths: Tensor, checkpointed: bool) -> Tensor:
        """read: (B, T, e), clean where given (B, T); guess: (B, T, e); gamma: (B,)"""
        noisy = (torch.sigmoid(-gamma) / self.size + torch.sigmoid(gamma)).rsqrt().to(read.dtype)  # (B,)
        scale = torch.where(given, self.size**0.5, noisy[:, None])  # to a variance of 1 in each dimension
        x = self.input(read * scale[..., None]) + given[..., None] * self.mark
        if self.guess is not None:
            x = x + self.guess(guess * self.size**0.5)
        return self.transform(x, gamma, lengths, checkpointed)
