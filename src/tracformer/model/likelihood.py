"""Log-probabilities from hidden states without ever holding all logits: the vocabulary is wide, so rows go in chunks."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tracformer.precision import wide

LOGITS_AT_ONCE = 2**24  # elements: 64 MiB in float32


def row_chunks(rows: int, vocab_size: int) -> list[slice]:
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    return [slice(start, start + size) for start in range(0, rows, size)]


def token_log_probs(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """log softmax(hidden embedding')[target], one per row. hidden: (N, d); embedding: (V, d); targets: (N,)."""
    parts = [
        checkpoint(_log_probs, hidden[rows], embedding, targets[rows], use_reentrant=False)
        for rows in row_chunks(len(hidden), len(embedding))
    ]
    return torch.cat(parts) if parts else hidden.new_zeros(0)


def _log_probs(hidden: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ embedding.T
    logits = logits.to(wide(logits.dtype))
    return logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, dim=1)


def weighted_nll(hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum over rows of weight * -log p(target): the training loss, whose gradient is taken chunk by chunk on the way forward."""
    if weights is None:
        weights = torch.ones(len(targets), dtype=torch.float32, device=hidden.device)
    return _WeightedNLL.apply(hidden, embedding, targets, weights)


class _WeightedNLL(torch.autograd.Function):
    """The loss is a scalar, so its gradient is known up to one factor as soon as the logits are: no recomputation, no (N, V) kept."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embedding: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        summed = wide(hidden.dtype)
        total = torch.zeros((), dtype=summed, device=hidden.device)
        wants_grad = any(ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if wants_grad else None
        grad_embedding = torch.zeros_like(embedding, dtype=summed) if wants_grad else None
        for rows in row_chunks(len(hidden), len(embedding)):
            logits = (hidden[rows] @ embedding.T).to(summed)
            weight = weights[rows, None].to(summed)
            lse = torch.logsumexp(logits, dim=1, keepdim=True)
            picked = logits.gather(1, targets[rows, None])
            total += (weight * (lse - picked)).sum()
            if grad_hidden is not None and grad_embedding is not None:
                slopes = logits.sub_(lse).exp_().mul_(weight)
                slopes.scatter_add_(1, targets[rows, None], -weight)
                narrow = slopes.to(hidden.dtype)
                torch.mm(narrow, embedding, out=grad_hidden[rows])
                grad_embedding += narrow.T @ hidden[rows]
        if grad_hidden is not None and grad_embedding is not None:
            ctx.save_for_backward(grad_hidden, grad_embedding.to(embedding.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_embedding = ctx.saved_tensors
        return grad_hidden * grad, grad_embedding * grad, None, None
