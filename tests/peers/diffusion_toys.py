"""A distribution small enough to enumerate, as a denoiser that knows it exactly: every line of the
systems but the network runs on it.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from tracformer.baselines.diffusion import DiffusionModel
from tracformer.baselines.mdlm import MDLM, MDLMConfig
from tracformer.baselines.sedd import D3PM, SEDD, D3PMConfig, SEDDConfig

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
    """(81,), far from independent."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(len(SEQUENCES), generator=generator, dtype=torch.float64)).softmax(0)


def truth(tokens: Tensor, context: Tensor) -> Tensor:
    """(B,): log p(targets | given) of sequences (B, 4)."""
    agree = SEQUENCES == tokens[:, None]  # (B, 81, 4)
    log = [
        torch.where(hits.all(-1), joint(), 0.0).sum(1).log()
        for hits in (agree, agree | ~context[:, None])
    ]
    return log[0] - log[1]


class _Toy:
    """States are logits, the head is the identity.

    With `warp`, what the denoiser says is wrong, and differently so at each time.
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
