"""sigma-GPT: a causal transformer over a shuffled text, with two positions per token.

A row holds a token, its own position and the position of the token that it is to predict. A start
row comes first, then the given tokens, then the targets; each row reads itself and those before it
in the order. The row before target t in the order gives p(x_t | x_C, earlier targets), so one pass
gives the exact joint along the order. `car`: text order. `ac`: the last given row is repeated for
every target, with that target's position as the next one.

With `order="random"`, the default and the published training, given tokens and targets are each
shuffled for every training sequence. From "sigma-GPTs: A New Approach to Autoregressive Models"
(Pannatier et al., 2024). Positions are learned tables; the blocks are pre-norm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tracformer.baselines.as_arm import AnyOrderConfig, draw_ranks, packed_by_rank
from tracformer.baselines.modern import ModernModel, causal_mask
from tracformer.baselines.row_cache import RowCache, compressed
from tracformer.baselines.transformer import attend
from tracformer.model.base import EXACT, MARGINAL
from tracformer.model.batch import Batch
from tracformer.model.blocks import initialise, run_blocks


@dataclass(frozen=True)
class SigmaGptConfig(AnyOrderConfig):
    """Shape of a `SigmaGpt`."""

    model_type = "sigma-gpt"

    order: str = "random"


class SigmaGpt(ModernModel):
    """A causal transformer over given tokens, then targets, in any order."""

    config: SigmaGptConfig
    config_class = SigmaGptConfig
    answers = {"car": EXACT, "ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: SigmaGptConfig) -> None:
        super().__init__(config)
        # positions 1..T; 0 is the start row
        self.own = nn.Embedding(config.max_length + 1, config.d_model)
        self.next = nn.Embedding(config.max_length + 1, config.d_model)
        self.layers = self.stack(config.n_layer)
        initialise(self, config.init_std, branches=2 * config.n_layer)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def embedding_tables(self) -> list[Tensor]:
        return [self.embedding.weight, self.own.weight, self.next.weight]

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        targets = batch.targets()
        random = self.training and self.config.order == "random"
        ranks = draw_ranks(targets, random)
        return self.in_order(batch, wanted, ranks, alone=mode == "ac")

    def in_order(
        self,
        batch: Batch,
        wanted: Tensor,
        ranks: Tensor,
        alone: bool = False,
    ) -> Tensor:
        """Return final states (N, d) of the rows that predict some targets.

        Args:
            batch: Sequences with their given tokens.
            wanted: (B, T) bool, some of the targets.
            ranks: (B, T) order of the given tokens among themselves and of the targets among
                themselves.
            alone: No target reads another (`ac`).
        """
        B, T = batch.tokens.shape
        inside = batch.inside()
        given, targets = batch.given(), batch.targets()
        order = (ranks + T * targets + 2 * T * ~inside).argsort(1)  # given tokens, targets, padding
        count = given.sum(1)  # given tokens of each
        start = torch.full_like(batch.tokens[:, :1], self.config.mask_id)
        ids = torch.cat((start, batch.tokens.gather(1, order)), dim=1)  # (B, 1 + T), in the order
        own = nn.functional.pad(order + 1, (1, 0))
        if alone:
            return self._alone(ids, own, count, targets, ranks, wanted)
        following = nn.functional.pad(own[:, 1:], (0, 1))  # row i predicts the token of row i + 1
        width = int(batch.lengths.max())  # the last token predicts nothing
        mask = causal_mask(width, batch.device)
        x = self._run(ids[:, :width], own[:, :width], following[:, :width], mask)
        turn = torch.zeros_like(order).scatter(
            1, order, torch.arange(T, device=batch.device).expand(B, -1)
        )
        row, position = wanted.nonzero(as_tuple=True)
        # row number i + 1 holds token i of the order, and row i predicts it
        return self.norm(x[row, turn[row, position]])

    def _alone(
        self,
        ids: Tensor,
        own: Tensor,
        count: Tensor,
        targets: Tensor,
        ranks: Tensor,
        wanted: Tensor,
    ) -> Tensor:
        """Return the states for `ac`, where no target reads another.

        The input is the start row and all given rows but the last, then the last one again for each
        target.
        """
        query = packed_by_rank(targets, ranks)  # (B, S) positions
        S, P = query.shape[1], int(count.max())
        last = count[:, None].expand(-1, S)
        rows, places = ids[:, :P], own[:, :P]
        ids = torch.cat((rows, ids.gather(1, last)), dim=1)
        following = torch.cat((own[:, 1 : P + 1], query + 1), dim=1)
        own = torch.cat((places, own.gather(1, last)), dim=1)
        t = torch.arange(P, device=ids.device)
        earlier = (t < count[:, None])[:, None].expand(-1, S, -1)  # rows 0 .. count - 1
        before = torch.cat(
            (causal_mask(max(P, 1), ids.device)[:, :P, :P].expand(len(ids), -1, -1), earlier), dim=1
        )
        itself = torch.eye(S, dtype=torch.bool, device=ids.device).expand(len(ids), -1, -1)
        # (B, P + S, P + S)
        mask = torch.cat((before, nn.functional.pad(itself, (0, 0, P, 0))), dim=2)
        x = self._run(ids, own, following, mask)
        column = torch.zeros_like(ranks).scatter(
            1, query, P + torch.arange(S, device=ids.device).expand(len(ids), -1)
        )
        row, position = wanted.nonzero(as_tuple=True)
        return self.norm(x[row, column[row, position]])

    def _run(self, ids: Tensor, own: Tensor, following: Tensor, mask: Tensor) -> Tensor:
        """Return the final states of rows with these ids, positions and next positions."""

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, mask)

        angles = self.angles(torch.zeros_like(ids))  # positions are in the embedding alone
        return run_blocks(
            self.layers,
            self.embed_rows(ids, own, following),
            angles,
            read,
            recompute=self.recompute,
        )

    def embed_rows(self, ids: Tensor, own: Tensor, following: Tensor) -> Tensor:
        """Return the sum of the embeddings of tokens, positions and next positions."""
        embedded: Tensor = self.dropout(self.embedding(ids) + self.own(own) + self.next(following))
        return embedded

    def empty_cache(self, mode: str, rows: int, length: int) -> "SigmaGptCache | None":
        return SigmaGptCache(self, mode, rows, length) if mode == "car" else None


class SigmaGptCache(RowCache):
    """Keys and values of the computed rows: slot 0 is the start row, slot t + 1 holds token t.

    A row is computed when the position that it predicts is known: the last given row with the first
    target as its next position.
    """

    model: SigmaGpt
    given: Tensor  # (rows, length) bool

    def slots_for(self, length: int) -> int:
        return 1 + length

    def row_state(self, rows: int, length: int, weight: Tensor) -> dict[str, Tensor]:
        return {"given": torch.zeros(rows, length, dtype=torch.bool, device=weight.device)}

    def read_given(self, rows: Tensor, batch: Batch) -> None:
        """Compute the start row and the given tokens in text order, except the last.

        The next position of the last given row is the first target, which is not known yet.
        """
        self.given[rows, : batch.width] = batch.context
        number, slot = nn.functional.pad(batch.context, (1, 0), value=True).nonzero(as_tuple=True)
        paired = number[1:] == number[:-1]
        if bool(paired.any()):
            self._feed(rows[number[:-1][paired]], slot[:-1][paired], slot[1:][paired])

    def states(self, rows: Tensor, positions: Tensor) -> Tensor:
        row, t, answers = self.pending(rows, positions, ~self.given)
        number = torch.arange(1, self.slots, device=t.device)
        given, earlier = self.given[row], number <= t[:, None]
        # the row before t in the order: a target,
        target_before = torch.where(~given & earlier, number, 0).amax(1)
        # or the last given token
        slot = torch.where(target_before > 0, target_before, torch.where(given, number, 0).amax(1))
        return self.model.norm(self._feed(row, slot, t + 1)[answers])

    def _feed(self, row: Tensor, slot: Tensor, following: Tensor) -> Tensor:
        """Compute rows, store their keys and values, and return their final states."""
        model = self.model
        ids = torch.where(slot > 0, self.tokens[row, (slot - 1).clamp(min=0)], model.config.mask_id)
        index, present = compressed(self._up_to(row, slot))
        flat = row * self.slots + slot

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.layers[layer].write(flat, k[0], v[0])
            return self.attend(layer, q, row, index, present)

        x = model.embed_rows(ids[None], slot[None], following[None])
        return run_blocks(model.layers, x, model.angles(torch.zeros_like(ids)[None]), read)[0]

    def _up_to(self, row: Tensor, slot: Tensor) -> Tensor:
        """Return (N, slots) bool: the slots up to `slot` in the order, given tokens first."""
        given = nn.functional.pad(self.given[row], (1, 0), value=True)  # the start row too
        is_given = given.gather(1, slot[:, None])
        earlier = torch.arange(self.slots, device=slot.device) <= slot[:, None]
        return (given & ~is_given) | (earlier & (given == is_given))
