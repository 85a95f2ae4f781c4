"""AS-ARM: an any-subset autoregressive model with the two attention streams of XLNet.

The tokens have an order: the given tokens first, then the targets, in text order or in a random
order. Two streams go through the same blocks:

- content: one row per token, which reads the given tokens and, if it is a target, the targets up to
  itself in the order;
- query: one row per target, which starts from one learned vector at the target's position and reads
  the content of the given tokens and of the targets before it in the order, never its own.

So the query row of target t gives p(x_t | x_C, earlier targets), and one pass gives the exact joint
along the order. `car`: text order. `ac`: no target reads another. With `order="random"` training
draws a new order of the targets for every sequence, which also trains `ac`.

The blocks are this package's, with pre-norm and rotary positions; XLNet's have post-norm and
relative positions. From "Reviving Any-Subset Autoregressive Models" (2025); the streams are from
XLNet (Yang et al., 2019).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.baselines.given_first import GPT_PRESETS, packed
from tracformer.baselines.modern import ModernConfig, ModernModel, causal_mask
from tracformer.baselines.row_cache import RowCache, compressed
from tracformer.baselines.transformer import attend, attend_at
from tracformer.model.base import EXACT, MARGINAL
from tracformer.model.batch import Batch
from tracformer.model.blocks import initialise, run_blocks

ORDERS = ("text", "random")


@dataclass(frozen=True)
class AnyOrderConfig(ModernConfig):
    """Base configuration of models that can predict the targets in any order."""

    possible_modes = ("car", "ac")
    presets = GPT_PRESETS

    # Order of the targets in training: that of the text, or a random one for every sequence.
    order: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}; allowed: {', '.join(ORDERS)}")

    @classmethod
    def modes_trained_by(cls, modes: set[str], values: Mapping[str, Any]) -> set[str]:
        """Add `ac` for random orders: there each target is sometimes first."""
        return (
            modes | {"ac"}
            if values.get("order", cls.order) == "random" and "car" in modes
            else modes
        )


@dataclass(frozen=True)
class AsArmConfig(AnyOrderConfig):
    """Shape of an `AsArm` model."""

    model_type = "as-arm"

    neighbours: int = 0  # first layers that read only what is known at t-1 and t+1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_neighbours(self.neighbours, self.n_layer)


def draw_ranks(targets: Tensor, random: bool) -> Tensor:
    """Return (B, T) ranks of the positions, in text order or at random.

    Given tokens precede targets whatever their ranks.
    """
    text = torch.arange(targets.shape[1], device=targets.device).expand(targets.shape)
    return (
        torch.rand(targets.shape, device=targets.device).argsort(1).argsort(1) if random else text
    )


def packed_by_rank(targets: Tensor, ranks: Tensor) -> Tensor:
    """Return the targets' positions (B, S) by ascending rank.

    Rows with fewer targets end with other positions.
    """
    T = targets.shape[1]
    return ranks.masked_fill(~targets, T).argsort(dim=1, stable=True)[
        :, : int(targets.sum(1).max())
    ]


class AsArm(ModernModel):
    """Two-stream attention over given tokens and ordered targets."""

    config: AsArmConfig
    config_class = AsArmConfig
    answers = {"car": EXACT, "ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: AsArmConfig) -> None:
        super().__init__(config)
        self.layers = self.stack(config.n_layer)
        initialise(self, config.init_std, branches=2 * config.n_layer)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        targets = batch.targets()
        random = self.training and self.config.order == "random" and mode == "car"
        ranks = draw_ranks(targets, random)
        return self.in_order(batch, wanted, None if mode == "ac" else ranks)

    def in_order(self, batch: Batch, wanted: Tensor, ranks: Tensor | None) -> Tensor:
        """Return final query states (N, d) of some targets.

        Each target reads the given tokens and the targets of lower rank.

        Args:
            batch: Sequences with their given tokens.
            wanted: (B, T) bool, some of the targets.
            ranks: (B, T) place of each target in the order; None: no target reads another.
        """
        B = len(batch)
        targets = batch.targets()
        prefix, present = packed(batch.given())
        # (B, S)
        query = packed_by_rank(
            targets, draw_ranks(targets, random=False) if ranks is None else ranks
        )
        P, S = prefix.shape[1], query.shape[1]
        content = query[:, :0] if ranks is None else query
        M = content.shape[1]
        masks = torch.full_like(query, self.config.mask_id)
        ids = torch.cat(
            (batch.tokens.gather(1, prefix), batch.tokens.gather(1, content), masks), dim=1
        )
        positions = torch.cat((prefix, content, query), dim=1)
        seen = causal_mask(max(M, 1), batch.device)[:, :M, :M]
        # content, then query rows
        reads = torch.cat((seen, seen.tril(-1)), dim=1) if M else seen.new_zeros(1, S, 0)
        # (B, M + S, P + M)
        mask = torch.cat((present[:, None].expand(-1, M + S, -1), reads.expand(B, -1, -1)), dim=2)
        near = (
            self._near(batch.given(), targets, positions, P, M, S)
            if self.config.neighbours
            else None
        )

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = k[:, : P + M], v[:, : P + M]  # query rows are never read
            dropped = P + M + S - q.shape[1]  # P + M in the last layer
            if layer < self.config.neighbours and near is not None:
                index, known = near
                return attend_at(q, k, v, index[:, dropped:], known[:, dropped:])
            if dropped:
                return attend(q, k, v, mask[:, M:])
            return torch.cat(
                (
                    attend(q[:, :P], k[:, :P], v[:, :P], present[:, None]),
                    attend(q[:, P:], k, v, mask),
                ),
                dim=1,
            )

        angles = self.angles(positions)
        x = run_blocks(
            self.layers, self.embed(ids), angles, read, answer_from=P + M, recompute=self.recompute
        )
        column = torch.zeros_like(batch.tokens).scatter(
            1, query, torch.arange(S, device=batch.device).expand(B, -1)
        )
        row, position = wanted.nonzero(as_tuple=True)
        return self.norm(x[row, column[row, position]])

    def _near(
        self, given: Tensor, targets: Tensor, positions: Tensor, P: int, M: int, S: int
    ) -> tuple[Tensor, Tensor]:
        """Return the content columns at t-1, t and t+1 that each row may read.

        The second tensor is False where there is no such column.
        """
        B, T = given.shape
        order = torch.arange(1, M + 1, device=given.device).expand(B, -1)
        # The rank of a token without a content row, which no row reads.
        rank = torch.full((B, T), M + 1, device=given.device)
        rank = (
            rank.scatter(1, positions[:, P : P + M], order)
            .masked_fill(~targets, M + 1)
            .masked_fill(given, 0)
        )
        column = torch.where(given, (given.cumsum(1) - 1).clamp(min=0), P + rank - 1)
        rank, column = (
            nn.functional.pad(x, (1, 1), value=value) for x, value in ((rank, M + 1), (column, 0))
        )
        # t-1, t, t+1 in the padded columns
        index = (positions[..., None] + torch.arange(3, device=given.device)).flatten(1)
        own = torch.arange(1, S + 1, device=given.device)
        limit = torch.cat((own.new_zeros(P), own[:M], own - 1 if M else own * 0)).expand(B, -1)[
            ..., None
        ]
        known = rank.gather(1, index).view(B, -1, 3) <= limit
        known[:, P + M :, 1] = False  # a query row never reads its own token
        return column.gather(1, index).view(B, -1, 3).clamp(0, max(P + M - 1, 0)), known

    def empty_cache(self, mode: str, rows: int, length: int) -> "AsArmCache | None":
        return AsArmCache(self, mode, rows, length) if mode == "car" else None


class AsArmCache(RowCache):
    """Keys and values of the content stream, slot t for token t; query rows are not kept."""

    model: AsArm
    given: Tensor  # (rows, length) bool

    def slots_for(self, length: int) -> int:
        return length

    def row_state(self, rows: int, length: int, weight: Tensor) -> dict[str, Tensor]:
        return {"given": torch.zeros(rows, length, dtype=torch.bool, device=weight.device)}

    def read_given(self, rows: Tensor, batch: Batch) -> None:
        self.given[rows, : batch.width] = batch.context
        number, t = batch.context.nonzero(as_tuple=True)
        if len(t):
            row = rows[number]
            self._run(row, t, self.tokens[row, t], self.given[row], content=True)

    def states(self, rows: Tensor, positions: Tensor) -> Tensor:
        row, t, answers = self.pending(rows, positions, ~self.given)
        content = torch.ones_like(t, dtype=torch.bool)
        content[answers] = False
        before = torch.arange(self.length, device=t.device) <= t[:, None]
        if bool(content.any()):
            fed, at = row[content], t[content]
            self._run(
                fed, at, self.tokens[fed, at], self.given[fed] | before[content], content=True
            )
        for each, position in zip(rows.tolist(), positions.tolist(), strict=True):
            # The content row of this token is computed once the token is known.
            self.fed[each] = min(self.fed[each], position)
        masks = torch.full_like(positions, self.model.config.mask_id)
        known = self.given[rows] | (torch.arange(self.length, device=t.device) < positions[:, None])
        return self.model.norm(self._run(rows, positions, masks, known, content=False))

    def _run(self, row: Tensor, t: Tensor, ids: Tensor, known: Tensor, content: bool) -> Tensor:
        """Return the final states of rows at (row, t).

        Args:
            row: (N,) sequences.
            t: (N,) positions.
            ids: (N,) ids.
            known: (N, length) bool, the slots that each row reads.
            content: Content rows, which also read themselves and are stored; else query rows.
        """
        model, L = self.model, self.length
        every = compressed(known)
        around = t[:, None] + torch.arange(-1, 2, device=t.device)
        near = around.clamp(0, L - 1)
        present = (around >= 0) & (around < L) & known.gather(1, near)
        slots = row * self.slots + t

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if content:
                self.layers[layer].write(slots, k[0], v[0])
            index, there = (near, present) if layer < model.config.neighbours else every
            return self.attend(layer, q, row, index, there)

        return run_blocks(model.layers, model.embed(ids[None]), model.angles(t[None]), read)[0]
