"""Log-probabilities and the training loss from hidden states.

The logits of a whole batch would be large, so rows are processed in chunks and the logits of a
chunk are dropped before the next.
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
    """Return slices of rows whose logits have at most LOGITS_AT_ONCE elements each."""
    size = max(1, LOGITS_AT_ONCE // vocab_size)
    return [slice(start, start + size) for start in range(0, rows, size)]


def logits_of(hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return logits (N, V) of hidden states (N, d), with head (V, d) and bias (V,)."""
    return linear(hidden, head, bias)


def token_log_probs(
    hidden: Tensor, head: Tensor, targets: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Return log softmax(logits)[target] for each row, (N,).

    Args:
        hidden: (N, d) final states.
        head: (V, d) output matrix.
        targets: (N,) token ids.
        bias: (V,) output bias, if any.
    """
    parts = [
        recomputed(_log_probs, hidden[rows], head, targets[rows], bias)
        for rows in row_chunks(len(hidden), len(head))
    ]
    return torch.cat(parts) if parts else hidden.new_zeros(0)


def recomputed(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Call a function, and recompute it in the backward pass instead of keeping its tensors.

    Without gradients the function is called directly: `checkpoint` would do the same, but imports
    torch's compiler first, which takes seconds.
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
    """Return the `count` most likely tokens of each row and their log-probabilities.

    Both are (N, count), sorted from the most likely; log-probabilities are float64.
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
    """Return the training loss: the sum over rows of weight * -log p(target).

    Args:
        hidden: (N, d) final states.
        head: (V, d) output matrix.
        targets: (N,) token ids.
        weights: (N,) weight of each row; None: 1.
        bias: (V,) output bias, if any.
    """
    if weights is None:
        weights = torch.ones(len(targets), dtype=torch.float32, device=hidden.device)
    return _WeightedNLL.apply(hidden, head, targets, weights, bias)


class _WeightedNLL(torch.autograd.Function):
    """The loss, with its gradient computed in the forward pass.

    The loss is a scalar, so the gradient is known up to one factor as soon as the logits are. No
    logits are recomputed, and no (N, V) tensor is kept for the backward pass.
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
        # a frozen head (an adapter's base model) gets none
        grad_head = torch.zeros_like(head, dtype=summed) if ctx.needs_input_grad[1] else None
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
                if grad_head is not None:
                    grad_head += narrow.T @ hidden[rows]
                if grad_bias is not None:
                    grad_bias += slopes.sum(0)
        if wants_grad:
            narrow_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
            narrow_head = None if grad_head is None else grad_head.to(dtypes[1])
            ctx.save_for_backward(grad_hidden.to(dtypes[0]), narrow_head, narrow_bias)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_head, grad_bias = ctx.saved_tensors
        return (
            grad_hidden * grad,
            None if grad_head is None else grad_head * grad,
            None,
            None,
            None if grad_bias is None else grad_bias * grad,
        )
