"""How a padded batch is read: forwards, and mirrored for the suffix.

The suffix encoder is the prefix encoder of the mirrored sequence. Each sequence is mirrored within
its own length, so that padding stays on the right in both readings, where no query that looks back
reads it. One causal geometry then serves both directions, and no implementation needs a padding
mask. Tensors of both readings stack them along the batch: rows 0..B-1 forwards, B..2B-1 mirrored.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


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
