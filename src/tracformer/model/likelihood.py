"""Log-probabilities from hidden states without ever holding all logits: the vocabulary is wide, so
rows go in chunks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tracformer.devices import wide
from tracformer.model.fast_step import linear

LOGITS_AT_ONCE = 2**24  # elements: 64 MiB in float32


def row_chunks(rows: int, vocab_size: int) -> list[slice]:
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    return [slice(start, start + size) for start in range(0, rows, size)]


def logits_of(hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden: (N, d); head: (V, d); bias: (V,)."""
    return linear(hidden, head, bias)


def token_log_probs(
    hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """log softmax(logits)[target], one per row.

    hidden: (N, d); head: (V, d); targets: (N,); bias: (V,).
    """
    parts = [
        recomputed(_log_probs, hidden[rows], head, targets[rows], bias)
        for rows in row_chunks(len(hidden), len(head))
    ]
    return torch.cat(parts) if parts else hidden.new_zeros(0)


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """function(*inputs), computed a second time in the backward pass instead of being kept. Where
    no gradient is wanted it is called as it
    is: `checkpoint` would do the same, after importing torch's compiler, which takes seconds.
    """
    result: Tensor = (
        checkpoint(function, *inputs, use_reentrant=False)
        if torch.is_grad_enabled()
        else function(*inputs)
    )
    return result


def _log_probs(hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
    logits = logits_of(hidden, head, bias)
    logits = logits.to(wide(logits.dtype))
    return logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, dim=1)


def likeliest(
    hidden: Tensor, head: Tensor, count: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(N, count) ids and float64 log-probabilities of each row's likeliest tokens,
    likeliest first.
    """
    parts = [
        logits_of(hidden[rows], head, bias).double().log_softmax(1).topk(count, dim=1)
        for rows in row_chunks(max(1, len(hidden)), len(head))
    ]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def weighted_nll(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Sum over rows of weight * -log p(target): the training loss, whose gradient is taken chunk by
    chunk on the way forward.
    """
    if weights is None:
        weights = torch.ones(len(targets), dtype=torch.float32, device=hidden.device)
    return _WeightedNLL.apply(hidden, head, targets, weights, bias)


class _WeightedNLL(torch.autograd.Function):
    """The loss is a scalar, so its gradient is known up to one factor as soon as the logits are: no
    recomputation, no (N, V) kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: Tensor,
        weights: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        summed, kind = wide(hidden.dtype), hidden.device.type
        product = (
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        )
        dtypes = hidden.dtype, head.dtype
        hidden, head = hidden.to(product), head.to(product)  # once, not in every chunk
        total = torch.zeros((), dtype=summed, device=hidden.device)
        wants_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1] or ctx.needs_input_grad[4]
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head, dtype=summed)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=summed)
        for rows in row_chunks(len(hidden), len(head)):
            logits = logits_of(hidden[rows], head, bias).to(summed)
            weight = weights[rows, None].to(summed)
            picked, peak = logits.gather(1, targets[rows, None]), logits.amax(1, keepdim=True)
            # in place: one pass of exponentials for the loss and its gradient
            powers = logits.sub_(peak).exp_()
            mass = powers.sum(1, keepdim=True)
            total += (weight * (mass.log() + peak - picked)).sum()
            if wants_grad:
                slopes = powers.mul_(weight / mass)
                slopes.scatter_add_(1, targets[rows, None], -weight)
                narrow = slopes.to(hidden.dtype)
                torch.mm(narrow, head, out=grad_hidden[rows])
                grad_head += narrow.T @ hidden[rows]
                if grad_bias is not None:
                    grad_bias += slopes.sum(0)
        if wants_grad:
            narrow_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
            ctx.save_for_backward(grad_hidden.to(dtypes[0]), grad_head.to(dtypes[1]), narrow_bias)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head, grad_bias = ctx.saved_tensors
        return (
            grad_hidden * grad,
            grad_head * grad,
            None,
            None,
            None if grad_bias is None else grad_bias * grad,
        )
