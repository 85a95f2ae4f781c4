"""Dense attention of the baselines: PyTorch's own, and plain products where those train faster."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer.precision import wide

# On CPUs, up to this many tokens, the backward pass of PyTorch's fused attention takes longer than
# keeping all weights and multiplying by them: at 256 tokens in bfloat16 forward and backward take
# 31 ms fused, 18 ms plain (16 sequences, 3 heads of 32, one EPYC thread).
SHORT = 512


def trains_faster_plain(device: torch.device, length: int) -> bool:
    return device.type == "cpu" and length <= SHORT and torch.is_grad_enabled()


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v over the keys that `mask` allows; zero for a query that
    reads no key.

    Args: q: Queries (B, S, H, D). k: Keys (B, K, H, D). v: Values (B, K, H, D). mask: Bool (B or 1,
        S or 1, K), True where a query reads a key; None: every query reads every key.
    """
    if k.shape[1] == 0:
        return torch.zeros_like(q)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    allowed = None if mask is None else mask[:, None]
    if trains_faster_plain(q.device, k.shape[2]):
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        mixed = _softmax(scores, -1).to(v.dtype) @ v
    else:
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    mixed = mixed.transpose(1, 2)  # (B, S, H, D)
    return mixed if mask is None else mixed.masked_fill(~mask.any(-1)[..., None, None], 0.0)


def attend_at(q: Tensor, k: Tensor, v: Tensor, index: Tensor, present: Tensor) -> Tensor:
    """Return attention in which each query reads a few keys of its own; zero for a query that reads
    none.

    Args:
        q: Queries (B, S, H, D).
        k: Keys (B, K, H, D).
        v: Values (B, K, H, D).
        index: Keys of each query (B, S, N), each in 0..K-1.
        present: Bool (B, S, N), False where an entry of `index` is only a filler.
    """
    B, S, H, D = q.shape
    if k.shape[1] == 0:
        return torch.zeros_like(q)
    first = torch.arange(B, device=q.device)[:, None, None] * k.shape[1]
    rows = (index + first).flatten()
    k, v = (x.flatten(0, 1).index_select(0, rows).view(B, S, -1, H, D) for x in (k, v))
    scores = (q[:, :, None] * k).sum(-1) * D**-0.5  # (B, S, N, H)
    scores = scores.masked_fill(~present[..., None], torch.finfo(scores.dtype).min)
    mixed = (_softmax(scores, 2).to(v.dtype)[..., None] * v).sum(2)
    return mixed.masked_fill(~present.any(-1)[..., None, None], 0.0)


def _softmax(scores: Tensor, dim: int) -> Tensor:
    """In float32 at least: bfloat16 scores would keep two or three digits of a weight."""
    return scores.softmax(dim, dtype=wide(scores.dtype))
