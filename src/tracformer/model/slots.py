"""What a cache keeps of one layer: keys and values, a row a sequence."""

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

GATHERED_AT_ONCE = 2**24  # elements of keys: 64 MiB in float32


class Slots:
    """Keys and values of one layer, (rows, slots, d) each, read and written by flat index row * slots + slot."""

    def __init__(self, like: Tensor, rows: int, slots: int) -> None:
        self.slots = slots
        self.keys, self.values = (like.new_empty(rows * slots, like.shape[-1]) for _ in range(2))  # memory is touched as rows fill
        for x in (self.keys, self.values):
            x.view(rows, slots, -1)[:, 0] = 0.0  # keys that do not exist are read from here, with weight zero

    def write(self, index: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v: (N, H, D)"""
        self.keys.index_copy_(0, index, k.flatten(-2))
        self.values.index_copy_(0, index, v.flatten(-2))

    def attend(self, q: Tensor, index: Tensor, present: Tensor) -> Tensor:
        """Each query of q (N, H, D) over its own keys `index` (N, K), where `present`; zero for a query without any."""
        N, K = index.shape
        size = max(1, GATHERED_AT_ONCE // max(1, K * self.keys.shape[-1]))
        parts = [self._attend(q[i : i + size], index[i : i + size], present[i : i + size]) for i in range(0, N, size)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend(self, q: Tensor, index: Tensor, present: Tensor) -> Tensor:
        N, H, D = q.shape
        K = index.shape[1]
        if K == 0:
            return torch.zeros_like(q)
        k, v = (x.index_select(0, index.flatten()).view(N, K, H, D).transpose(1, 2) for x in (self.keys, self.values))
        mixed = scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=present[:, None, None])[:, :, 0]
        return mixed.masked_fill(~present.any(1)[:, None, None], 0.0)

    def copy(self, sources: Tensor, index: Tensor) -> None:
        """What is kept at some flat indices, to others."""
        for x in (self.keys, self.values):
            x.index_copy_(0, index, x.index_select(0, sources))

    def select(self, rows: Tensor) -> Self:
        chosen = object.__new__(type(self))
        chosen.slots = self.slots
        chosen.keys, chosen.values = (x.unflatten(0, (-1, self.slots))[rows].flatten(0, 1) for x in (self.keys, self.values))
        return chosen
