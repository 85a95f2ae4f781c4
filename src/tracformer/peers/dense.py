"""Dense attention of the baselines: PyTorch's own, and plain products where those train faster."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# On CPUs, up to so many tokens, the backward pass of PyTorch's fused attention takes longer than keeping all weights and multiplying by
# them: at 256 tokens in bfloat16 forward and backward take 31 ms fused, 18 ms plain (16 sequences, 3 heads of 32, one thread of an EPYC).
SHORT = 512


def trains_faster_plain(device: torch.device, length: int) -> bool:
    return device.type == "cpu" and length <= SHORT and torch.is_grad_enabled()


def dense_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """q, k, v: (B, H, T, D); seen: (B, 1, 1, T) bool, where every query sees something, or None where it sees all."""
    if not trains_faster_plain(q.device, q.shape[2]):
        return scaled_dot_product_attention(q, k, v, attn_mask=seen)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v
