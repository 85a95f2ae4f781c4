"""AC-GPT and Compact: one stack of blocks over an input that puts the given tokens first.

A row of the input is a token at its true position (tokens at 1..T, the start token at 0):

    text      a b _ _ e _ g    given a b e g, targets c d f
    prefix    a b e g          the given tokens; each reads the prefix and nothing else
    body      ^ a b c d e      body="full", AC-GPT: the text before the last target
              b c d e          body="compact": targets, and the token before each blank

A body row reads the whole prefix and, causally, the body; the row at position t-1 predicts x_t. So
p(x_t | x_C, x_<t), and the chain rule gives the exact joint of the targets. The prefix does not
depend on the targets: generation computes it once.

- Every target has a body row even if the next token is given, since later blanks read it. The last
  target needs none.
- `ar`: no prefix, and a body of all tokens: a GPT.
- `ac`: one body row per target, which reads the prefix and itself; a predecessor that is a target
  is replaced by the mask.
- `neighbours=n`: in the first n layers a given token reads only the given tokens within `window` of
  it, itself included, and the row that predicts x_t reads only itself and the known tokens within
  `window` of t.

AC-GPT is from "Simplifying the Modeling of Arbitrary Conditionals in Natural Language" (2026). The
compact body is the layout of GLM (Du et al., 2022) with true positions.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from tracformer.baselines.modern import ModernConfig, ModernModel, causal_mask
from tracformer.baselines.row_cache import RowCache, compressed
from tracformer.baselines.transformer import attend, attend_at, size_presets
from tracformer.model.base import EXACT, MARGINAL
from tracformer.model.batch import Batch
from tracformer.model.blocks import initialise, run_blocks

GPT_PRESETS = size_presets((12, 12, 768), (7, 4, 128, 0.05), (8, 3, 144, 0.05), (9, 4, 256, 0.04))


@dataclass(frozen=True)
class GivenFirstConfig(ModernConfig):
    """Base configuration of AC-GPT and Compact."""

    presets = GPT_PRESETS

    body: ClassVar[str]  # "full" or "compact"
    mark: ClassVar[bool]  # whether a learned vector tells body rows from prefix rows
    neighbours: int = 0  # first layers that read only the neighbours
    window: int = 1  # how far a neighbour may be

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_neighbours(self.neighbours, self.n_layer)
        self.require_positive("window")


@dataclass(frozen=True)
class AcGptConfig(GivenFirstConfig):
    """Shape of an `AcGpt`."""

    model_type = "ac-gpt"
    possible_modes = ("car", "ar")
    body, mark = "full", False


@dataclass(frozen=True)
class CompactConfig(GivenFirstConfig):
    """Shape of a `Compact`."""

    model_type = "compact"
    possible_modes = ("car", "ac", "ar")
    body, mark = "compact", True

    neighbours: int = 1


@dataclass(frozen=True)
class Rows:
    """The input rows of a batch: P prefix and S body columns, each padded on the right."""

    ids: Tensor  # (B, P + S)
    positions: Tensor  # (B, P + S), counted from 1; 0 is the start token
    prefix: int  # P
    given: Tensor  # (B, P) bool: not padding
    # (B, T) column in the body of the row that predicts each position; only where there is one
    body: Tensor
    mask: Tensor  # (B, S, P + S) bool: what body rows read
    # (B, P + S, N) columns that a neighbours layer reads, and which of them exist
    near: tuple[Tensor, Tensor] | None


class GivenFirst(ModernModel):
    """Base of AC-GPT and Compact: the network, and the arrangement of its input rows."""

    config: GivenFirstConfig
    extra_rows: ClassVar[int] = 2  # the mask, and the start token

    def __init__(self, config: GivenFirstConfig) -> None:
        super().__init__(config)
        self.layers = self.stack(config.n_layer)
        initialise(self, config.init_std, branches=2 * config.n_layer)
        self.mark = nn.Parameter(torch.empty(config.d_model)) if config.mark else None
        if self.mark is not None:
            nn.init.normal_(self.mark, std=config.init_std)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    @property
    def start_id(self) -> int:
        """The id of the start token, after the mask."""
        return self.config.vocab_size + 1

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        rows = self.layout(batch, mode, wanted)
        P = rows.prefix
        inside = rows.given[:, None]

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # P in the last layer, which needs no prefix row
            answered = rows.ids.shape[1] - q.shape[1]
            if layer < self.config.neighbours and rows.near is not None:
                index, present = rows.near
                return attend_at(q, k, v, index[:, answered:], present[:, answered:])
            body = attend(q[:, P - answered :], k, v, rows.mask)
            if answered == P:
                return body
            return torch.cat((attend(q[:, :P], k[:, :P], v[:, :P], inside), body), dim=1)

        x = self.embed_rows(rows.ids, P)
        x = run_blocks(
            self.layers,
            x,
            self.angles(rows.positions),
            read,
            answer_from=P,
            recompute=self.recompute,
        )
        row, position = wanted.nonzero(as_tuple=True)
        return self.norm(x[row, rows.body[row, position]])

    def embed_rows(self, ids: Tensor, prefix: int) -> Tensor:
        """Embed rows of which the first `prefix` columns are given tokens, the others body."""
        x = self.embed(ids)
        if self.mark is None:
            return x
        return torch.cat((x[:, :prefix], x[:, prefix:] + self.mark), dim=1)

    def layout(self, batch: Batch, mode: str, wanted: Tensor) -> Rows:
        """Arrange a batch of which the `wanted` positions (B, T) are to be predicted."""
        config = self.config
        given, needed = row_flags(batch, mode, wanted, config.body)
        rows = arrange(batch, given, needed, self.start_id, config.mask_id if mode == "ac" else -1)
        if not config.neighbours:
            return rows
        prefix, body = rows.positions[:, : rows.prefix] - 1, rows.positions[:, rows.prefix :]
        return replace(rows, near=self._near(given, needed, prefix, body, mode))

    def _near(
        self, given: Tensor, needed: Tensor, prefix: Tensor, body: Tensor, mode: str
    ) -> tuple[Tensor, Tensor]:
        """Return the columns that a neighbours layer reads, and which of them exist.

        A given token reads the given tokens around it; the row that predicts x_t reads the known
        tokens around t.
        """
        reach, P = self.config.window, prefix.shape[1]
        (column, known), (own, fed) = (
            padded_columns(given, reach + 1),
            padded_columns(needed, reach + 1),
        )
        around = torch.arange(-reach, reach + 1, device=given.device)
        # (B, P, 2 reach + 1), into the padded columns
        index = (prefix + reach + 1)[..., None] + around
        of_prefix = _gather(column, index), _gather(known, index)
        # The row that predicts token t reads itself, the given tokens after t, and the known
        # tokens two or more before t.
        after = (body + reach + 1)[..., None] + torch.arange(1, reach + 1, device=given.device)
        reads = [(body_columns(body, P), torch.ones_like(body, dtype=torch.bool)[..., None])]
        reads.append((_gather(column, after), _gather(known, after)))
        for back in range(2, reach + 1):
            token = (body + reach + 1 - back)[..., None]
            reads.append((_gather(column, token), _gather(known, token)))
            # A target is read from the body row that holds it, which predicts the next token.
            if mode != "ac":
                hidden = ~_gather(known, token) & (body >= back)[..., None]
                reads.append((_gather(own, token + 1) + P, _gather(fed, token + 1) & hidden))
        of_body = tuple(torch.cat(parts, dim=2) for parts in zip(*reads, strict=True))
        wide = max(of_prefix[0].shape[2], of_body[0].shape[2])
        index, present = (
            torch.cat([nn.functional.pad(x, (0, wide - x.shape[2])) for x in pair], dim=1)
            for pair in zip(of_prefix, of_body, strict=True)
        )
        return index, present

    def empty_cache(self, mode: str, rows: int, length: int) -> "GivenFirstCache | None":
        return GivenFirstCache(self, mode, rows, length) if mode != "ac" else None


class AcGpt(GivenFirst):
    """AC-GPT: the body is the whole text before the last target."""

    config: AcGptConfig
    config_class = AcGptConfig
    answers = {"car": EXACT, "ar": EXACT}  # noqa: RUF012
    limits = {"ar": "does not see the text after a blank"}  # noqa: RUF012


class Compact(GivenFirst):
    """The compact model: the body holds only what predicts or is a target."""

    config: CompactConfig
    config_class = CompactConfig
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012
    limits = {"ar": "does not see the text after a blank"}  # noqa: RUF012


# ---- which rows there are


def row_flags(batch: Batch, mode: str, wanted: Tensor, body: str) -> tuple[Tensor, Tensor]:
    """Return which tokens make the prefix, and which positions are predicted by a body row.

    Args:
        batch: The batch.
        mode: "car", "ac" or "ar".
        wanted: (B, T) bool, the targets to predict now.
        body: "full" or "compact", the body of mode "car".

    Returns:
        Two tensors (B, T) bool.
    """
    given = torch.zeros_like(batch.context) if mode == "ar" else batch.given()
    hidden = ~given & batch.inside()
    return given, body_rows(hidden, wanted, body if mode == "car" else mode)


def arrange(batch: Batch, given: Tensor, needed: Tensor, start_id: int, mask_id: int = -1) -> Rows:
    """Arrange the input rows of a batch; `near` is left out.

    Args:
        batch: The batch.
        given: (B, T) bool, the tokens of the prefix.
        needed: (B, T) bool, the positions that a body row predicts.
        start_id: Token before the first one.
        mask_id: In place of predecessors that are targets, each body row reads this token and no
            other body row (mode "ac"). -1: predecessors are read, and body rows causally.
    """
    # (B, P) and (B, S): token numbers, from 0
    (prefix, present), (body, _) = packed(given), packed(needed)
    P, S = prefix.shape[1], body.shape[1]
    # x_{t-1}, by t
    before = torch.cat(
        (torch.full_like(batch.tokens[:, :1], start_id), batch.tokens[:, :-1]), dim=1
    )
    if mask_id >= 0:
        before[:, 1:] = before[:, 1:].masked_fill(~given[:, :-1], mask_id)
        seen = torch.eye(S, dtype=torch.bool, device=batch.device)[None]
    else:
        seen = causal_mask(S, batch.device)
    mask = torch.cat((present[:, None].expand(-1, S, -1), seen.expand(len(batch), -1, -1)), dim=2)
    columns = torch.zeros_like(batch.tokens).scatter(
        1, body, torch.arange(S, device=batch.device).expand(len(batch), -1).to(batch.tokens.dtype)
    )
    return Rows(
        ids=torch.cat((batch.tokens.gather(1, prefix), before.gather(1, body)), dim=1),
        positions=torch.cat((prefix + 1, body), dim=1),
        prefix=P,
        given=present,
        body=columns,
        mask=mask,
        near=None,
    )


def body_rows(hidden: Tensor, wanted: Tensor, kind: str) -> Tensor:
    """Return (B, T) bool: for which t the row that holds x_{t-1} and predicts x_t is in the body.

    Args:
        hidden: (B, T) bool, the targets.
        wanted: (B, T) bool, the targets to predict now; rows after the last of them are left out,
            since nothing reads them.
        kind: "compact": rows that predict or hold a target; "full" or "ar": all; "ac": the targets
            to predict, which read no other.
    """
    if kind == "ac":
        return wanted
    later = wanted.flip(1).cumsum(1).flip(1) > 0  # t or a later position is to be predicted
    if kind in ("full", "ar"):
        return later
    return (hidden | nn.functional.pad(hidden[:, :-1], (1, 0))) & later


def packed(flags: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the True entries of each row, packed to the left.

    Args:
        flags: (B, T) bool.

    Returns:
        Positions (B, n), in order, and (B, n) bool: False in the padding.
    """
    counts = flags.sum(1)
    width = int(counts.max())
    order = (~flags).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    return order, torch.arange(width, device=flags.device) < counts[:, None]


def padded_columns(flags: Tensor, margin: int) -> tuple[Tensor, Tensor]:
    """Return each position's column among the True ones, and the flag itself.

    Both have `margin` empty positions on either side.
    """
    pad = (margin, margin)
    return nn.functional.pad((flags.cumsum(1) - 1).clamp(min=0), pad), nn.functional.pad(flags, pad)


def body_columns(body: Tensor, prefix: int) -> Tensor:
    """Return (B, S, 1): the column of each body row, after `prefix` columns."""
    return (prefix + torch.arange(body.shape[1], device=body.device)).expand(len(body), -1)[
        ..., None
    ]


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Return the entries of x (B, M) at index (B, S, N)."""
    return x.gather(1, index.flatten(1)).view(index.shape)


# ---- generation


class GivenFirstCache(RowCache):
    """Keys and values of given tokens and body rows.

    Slot t holds given token t; slot length + t holds the body row that predicts token t.
    """

    model: GivenFirst
    given: Tensor  # (rows, length) bool: in the prefix
    body: Tensor  # (rows, length) bool: predicted by a row of the body

    def slots_for(self, length: int) -> int:
        return 2 * length

    def read_given(self, rows: Tensor, batch: Batch) -> None:
        """Compute the prefixes of new sequences once, and store their keys and values."""
        model = self.model
        given = batch.context if self.mode == "car" else torch.zeros_like(batch.context)
        hidden = ~given & batch.inside()
        T = batch.width
        kind = model.config.body if self.mode == "car" else "ar"
        self.given[rows, :T], self.body[rows, :T] = given, body_rows(hidden, hidden, kind)
        if not bool(given.any()):
            return
        rows_in = model.layout(batch.with_context(given), self.mode, torch.zeros_like(given))
        numbers, columns = rows_in.given.nonzero(as_tuple=True)
        slots = rows[numbers] * self.slots + rows_in.positions[numbers, columns] - 1
        inside = rows_in.given[:, None]

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.layers[layer].write(slots, k[numbers, columns], v[numbers, columns])
            near = layer < model.config.neighbours and rows_in.near is not None
            return attend_at(q, k, v, *rows_in.near) if near else attend(q, k, v, inside)  # type: ignore[misc]

        run_blocks(
            model.layers,
            model.embed_rows(rows_in.ids, rows_in.prefix),
            model.angles(rows_in.positions),
            read,
        )

    def row_state(self, rows: int, length: int, weight: Tensor) -> dict[str, Tensor]:
        flags = torch.zeros(rows, length, dtype=torch.bool, device=weight.device)
        return {"given": flags, "body": flags.clone()}

    def states(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the states of the body rows that predict `positions`.

        Body rows before them that were not computed yet are computed first.
        """
        row, t, answers = self.pending(rows, positions, self.body)
        model, L = self.model, self.length
        start = torch.full_like(t, model.start_id)
        ids = torch.where(t > 0, self.tokens[row, (t - 1).clamp(min=0)], start)
        before = torch.arange(L, device=t.device) <= t[:, None]
        all_keys = compressed(torch.cat((self.given[row], self.body[row] & before), dim=1))
        few_keys = self._near(row, t)
        slots = row * self.slots + L + t

        def read(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            index, present = few_keys if layer < model.config.neighbours else all_keys
            self.layers[layer].write(slots, k[0], v[0])
            return self.attend(layer, q, row, index, present)

        x = run_blocks(model.layers, model.embed_rows(ids[None], 0), model.angles(t[None]), read)
        return model.norm(x[0, answers])

    def _near(self, row: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slots that a row reads in a neighbours layer, and which of them exist.

        They are the row itself, the given tokens after t, and the known tokens two or more before
        t.
        """
        L, reach = self.length, self.model.config.window
        index, present = [L + t], [torch.ones_like(t, dtype=torch.bool)]
        for distance in range(1, reach + 1):
            token = t + distance
            index.append(token.clamp(max=L - 1))
            present.append((token < L) & self.given[row, token.clamp(max=L - 1)])
        for back in range(2, reach + 1):
            token = (t - back).clamp(min=0)
            known, fed = (
                (t >= back) & self.given[row, token],
                (t >= back) & self.body[row, token + 1] & ~self.given[row, token],
            )
            index += [token, L + token + 1]
            present += [known, fed]
        return torch.stack(index, 1), torch.stack(present, 1)
