"""Causal attention that also returns its logsumexp, and a backward that takes one: the parts from which a joint softmax is merged.

Attention over the union of disjoint key sets is the average of the parts weighted by exp(lse_part - lse_union). Its gradient is each
part's own gradient formula with the merged output and the merged logsumexp, since exp(score - lse_union) are the joint weights.

Shapes: q, k, v, out (B, H, n, D); lse (B, H, n). No n x n buffer is ever held whole.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tracformer.precision import wide

CHUNK = 128  # queries at a time in the plain version


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, lse
    return plain_causal_attention(q, k, v)


def plain_causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain products, a few queries at a time: for devices without an operation of their own here."""
    B, H, n, D = q.shape
    q, k, v = (x.reshape(B * H, n, D) for x in (q, k, v))
    chunks = _Chunks(q, k)
    out, lse = torch.empty_like(q), q.new_empty(B * H, n, dtype=chunks.dtype)
    for start, stop in chunks:
        weights = chunks.scores(start, stop)
        highest = weights.amax(-1, keepdim=True)
        total = weights.sub_(highest).exp_().sum(-1, keepdim=True)
        out[:, start:stop] = torch.bmm(weights.to(v.dtype), v[:, :stop]).div_(total)
        lse[:, start:stop] = highest.add_(total.log_())[..., 0]
    return out.view(B, H, n, D), lse.view(B, H, n)


def causal_attention_backward(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; `out` and `lse` may be those of a larger softmax that these keys are part of."""
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_out, q, k, v, out, lse, 0.0, True)
        return grads[0], grads[1], grads[2]
    return plain_causal_attention_backward(grad_out, q, k, v, out, lse)


def plain_causal_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    B, H, n, D = q.shape
    grad_out, q, k, v, out = (x.reshape(B * H, n, D) for x in (grad_out, q, k, v, out))
    lse = lse.reshape(B * H, n, 1)
    delta = (grad_out * out).sum(-1, keepdim=True, dtype=lse.dtype)  # (B * H, n, 1)
    chunks = _Chunks(q, k)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop in chunks:
        rows = slice(start, stop)
        weights = chunks.scores(start, stop).sub_(lse[:, rows]).exp_()
        slopes = torch.bmm(grad_out[:, rows], v[:, :stop].transpose(1, 2)).to(lse.dtype)
        slopes = slopes.sub_(delta[:, rows]).mul_(weights).to(q.dtype)
        grad_q[:, rows] = torch.bmm(slopes, k[:, :stop])
        grad_k[:, :stop].baddbmm_(slopes.transpose(1, 2), q[:, rows], alpha=chunks.scale)
        grad_v[:, :stop].baddbmm_(weights.to(v.dtype).transpose(1, 2), grad_out[:, rows])
    grad_q.mul_(chunks.scale)
    return grad_q.view(B, H, n, D), grad_k.view(B, H, n, D), grad_v.view(B, H, n, D)


class _Chunks:
    """Scaled scores of a few queries at a time against every key up to the last of them. q, k: (C, n, D)."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k = q, k
        self.n = q.shape[1]
        self.nothing = q.new_zeros(())
        self.scale = q.shape[-1] ** -0.5
        self.size = min(self.n, CHUNK)
        self.dtype = wide(q.dtype)
        above = torch.ones(self.size, self.size, dtype=torch.bool, device=q.device).triu_(1)
        self.bias = torch.zeros_like(above, dtype=self.dtype).masked_fill_(above, -torch.inf)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((start, min(start + self.size, self.n)) for start in range(0, self.n, self.size))

    def scores(self, start: int, stop: int) -> Tensor:
        """(C, stop - start, stop); -inf above the diagonal."""
        queries, keys = self.q[:, start:stop], self.k[:, :stop]
        scores = torch.baddbmm(self.nothing, queries, keys.transpose(1, 2), beta=0, alpha=self.scale).to(self.dtype)
        scores[:, :, start:] += self.bias[: stop - start, : stop - start]
        return scores
