"""Dense masks, filled key by key from the geometry: the readable statement that every fast path is tested against."""

from functools import lru_cache

import torch
from torch import Tensor

from tracformer import geometry


@lru_cache(maxsize=64)
def prefix_encoder_mask(length: int, offsets: tuple[int, ...] | None) -> Tensor:
    """(T, T) bool, query by key; `offsets=None` is the full encoder, dense causal."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(1, length + 1):
        keys = range(1, t + 1) if offsets is None else geometry.prefix_encoder_keys(t, offsets)
        mask[t - 1, [key - 1 for key in keys]] = True
    return mask


@lru_cache(maxsize=64)
def suffix_encoder_mask(length: int, offsets: tuple[int, ...] | None) -> Tensor:
    """(T, T) bool; `offsets=None` is the full encoder, reverse-causal."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(1, length + 1):
        keys = range(t, length + 1) if offsets is None else geometry.suffix_encoder_keys(t, offsets, length)
        mask[t - 1, [key - 1 for key in keys]] = True
    return mask


@lru_cache(maxsize=64)
def prefix_decoder_mask(length: int, stride: int) -> Tensor:
    """(T, T) bool, Eq. 5."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(1, length + 1):
        mask[t - 1, [key - 1 for key in geometry.prefix_decoder_keys(t, stride)]] = True
    return mask


@lru_cache(maxsize=64)
def suffix_decoder_mask(length: int, stride: int) -> Tensor:
    """(T, T) bool, Eq. 6."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for t in range(1, length + 1):
        mask[t - 1, [key - 1 for key in geometry.suffix_decoder_keys(t, stride, length)]] = True
    return mask
