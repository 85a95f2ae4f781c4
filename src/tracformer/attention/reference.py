"""Attention by dense masks: the definition that every other implementation is tested against.

Masks in text order are filled key by key from `tracformer.geometry`, and each attention is one
softmax. Memory is quadratic in T; this is for tests and for reading.

`Layout` says how a padded batch is read: forwards, and mirrored for the suffix. The suffix encoder
is the prefix encoder of the mirrored sequence. Each sequence is mirrored within its own length, so
that padding stays on the right in both readings, where no query that looks back reads it. One
causal geometry then serves both directions, and no implementation needs a padding mask. Tensors of
both readings stack them along the batch: rows 0..B-1 forwards, B..2B-1 mirrored.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from tracformer import geometry


@dataclass(frozen=True)
class Layout:
    """Lengths, readings and decoder queries of a batch."""

    lengths: Tensor  # (B,) true lengths
    length: int  # T, the padded length
    readings: int  # 1: prefix only (AR); 2: prefix and mirrored suffix
    rows: Tensor  # (N,) positions that the decoder predicts, as flat indices b * T + t

    @property
    def batch(self) -> int:
        """The number of sequences, B."""
        return self.lengths.shape[0]

    @cached_property
    def mirror(self) -> Tensor:
        """(B, T) zero-based mirror image of each position: length-1-t, and t in the padding.

        It is its own inverse.
        """
        t = torch.arange(self.length, device=self.lengths.device)
        last = self.lengths[:, None] - 1
        return torch.where(t <= last, last - t, t)

    @cached_property
    def positions(self) -> Tensor:
        """(readings * B, T) true zero-based position of each slot, for the rotary angles."""
        forwards = torch.arange(self.length, device=self.lengths.device).expand(self.batch, -1)
        return forwards if self.readings == 1 else torch.cat((forwards, self.mirror))

    @cached_property
    def query_slots(self) -> Tensor:
        """(readings, N) slot of each decoder query, as a flat index into (readings * B, T).

        A query reads only keys before its position, the nearest at distance 1, so its slot is the
        one before its position. A query with nothing before it has no slot: -1.
        """
        b, t = self.rows // self.length, self.rows % self.length
        slots = [torch.where(t > 0, self.rows - 1, -1)]
        if self.readings == 2:
            u = self.mirror[b, t]
            slots.append(torch.where(u > 0, (self.batch + b) * self.length + u - 1, -1))
        return torch.stack(slots)


def mirrored(x: Tensor, mirror: Tensor) -> Tensor:
    """Return each sequence of x (B, T, ...) in mirrored order; applied twice, it returns x."""
    index = mirror.reshape(*mirror.shape, *(1,) * (x.dim() - 2)).expand_as(x)
    return x.gather(1, index)


@lru_cache(maxsize=64)
def prefix_encoder_mask(length: int, offsets: tuple[int, ...] | None) -> Tensor:
    """Return (T, T) bool, query by key; `offsets=None` is the full encoder, dense causal."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(1, length + 1):
        keys = range(1, t + 1) if offsets is None else geometry.prefix_encoder_keys(t, offsets)
        mask[t - 1, [key - 1 for key in keys]] = True
    return mask


@lru_cache(maxsize=64)
def suffix_encoder_mask(length: int, offsets: tuple[int, ...] | None) -> Tensor:
    """Return (T, T) bool; `offsets=None` is the full encoder, reverse-causal."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(1, length + 1):
        keys = (
            range(t, length + 1)
            if offsets is None
            else geometry.suffix_encoder_keys(t, offsets, length)
        )
        mask[t - 1, [key - 1 for key in keys]] = True
    return mask


@lru_cache(maxsize=64)
def prefix_decoder_mask(length: int, stride: int) -> Tensor:
    """Return (T, T) bool, query by key (Eq. 5)."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(1, length + 1):
        mask[t - 1, [key - 1 for key in geometry.prefix_decoder_keys(t, stride)]] = True
    return mask


@lru_cache(maxsize=64)
def suffix_decoder_mask(length: int, stride: int) -> Tensor:
    """Return (T, T) bool, query by key (Eq. 6)."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(1, length + 1):
        mask[t - 1, [key - 1 for key in geometry.suffix_decoder_keys(t, stride, length)]] = True
    return mask


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v over the keys that a mask allows; zero where it allows none.

    Args:
        q: (B, T, H, D) queries.
        k: (B, S, H, D) keys.
        v: (B, S, H, D) values.
        mask: (B or 1, T, S) bool.
    """
    scores = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    # a row without keys is nan before it is filled with zeros
    weights = torch.softmax(scores, dim=-1).masked_fill(~mask[:, None], 0.0)
    return torch.einsum("bhts,bshd->bthd", weights, v)


class Reference:
    """Both attentions by dense masks."""

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        B, T = layout.batch, layout.length
        inside = self._inside(layout)
        mask = prefix_encoder_mask(T, offsets).to(q.device) & inside
        prefix = masked_attention(q[:B], k[:B], v[:B], mask)
        if layout.readings == 1:
            return prefix
        q, k, v = (mirrored(x[B:], layout.mirror) for x in (q, k, v))
        mask = suffix_encoder_mask(T, offsets).to(q.device) & inside
        suffix = masked_attention(q, k, v, mask)
        return torch.cat((prefix, mirrored(suffix, layout.mirror)))

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        B, T = layout.batch, layout.length
        queries = (
            q.new_zeros(B * T, *q.shape[1:]).index_copy(0, layout.rows, q).unflatten(0, (B, T))
        )
        inside = self._inside(layout)
        mask = prefix_decoder_mask(T, stride).to(q.device) & inside
        if layout.readings == 2:
            # one softmax over both directions: suffix keys follow the prefix keys
            k = torch.cat((k[:B], mirrored(k[B:], layout.mirror)), dim=1)  # (B, 2T, H, D)
            v = torch.cat((v[:B], mirrored(v[B:], layout.mirror)), dim=1)
            mask = torch.cat((mask, suffix_decoder_mask(T, stride).to(q.device) & inside), dim=2)
        return masked_attention(queries, k, v, mask).flatten(0, 1)[layout.rows]

    @staticmethod
    def _inside(layout: Layout) -> Tensor:
        """Return (B, 1, T) bool, False for keys in the padding."""
        t = torch.arange(layout.length, device=layout.lengths.device)
        return (t < layout.lengths[:, None])[:, None]
