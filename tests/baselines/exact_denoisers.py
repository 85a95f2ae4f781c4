"""A distribution small enough to enumerate, with denoisers that know it exactly.

Every line of a diffusion system except its network runs on them.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from tracformer.baselines.diffusion import DiffusionModel
from tracformer.baselines.mdlm import MDLM, MDLMConfig
from tracformer.baselines.plaid import Plaid, PlaidConfig
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
