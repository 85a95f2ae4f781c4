"""The log-probability of sequences along a given order, under any model that answers `ac`: the paper's Figure 2.

By the chain rule, log p(x) = sum over i of log p(x_order[i] | x_order[<i], x_C). A consistent model gives every order the same sum.
"""

import torch
from torch import Tensor

from tracformer.model.base import ConditionalModel, targets_of
from tracformer.precision import wide

TOKENS_AT_ONCE = 2**14


@torch.no_grad()
def order_log_prob(
    model: ConditionalModel,
    tokens: Tensor,
    order: Tensor,
    context: Tensor | None = None,
    lengths: Tensor | None = None,
    *,
    rows_at_once: int | None = None,
    insist: bool = False,
) -> Tensor:
    """(B, T): each position's log-probability given all that come earlier in its order and what is given; zero where given or padded.

    `order` is (T,) or (B, T), a permutation of 0..T-1 in each row; places of given tokens and of padding in it are passed over. Each target
    is one row for the network, `rows_at_once` of them together.
    """
    B, T = tokens.shape
    context = torch.zeros_like(tokens, dtype=torch.bool) if context is None else context
    lengths = torch.full((B,), T, device=tokens.device) if lengths is None else lengths.to(tokens.device)
    turn = _turns(order.to(tokens.device), B, T)  # (B, T): when each position is revealed
    targets = targets_of(context, lengths)
    b, position = targets.nonzero(as_tuple=True)  # (N,) each
    values = []
    for rows in torch.arange(len(b), device=tokens.device).split(rows_at_once or max(1, TOKENS_AT_ONCE // T)):
        i, p = b[rows], position[rows]
        earlier = turn[i] < turn[i, p][:, None]
        wanted = torch.zeros_like(earlier)
        wanted[torch.arange(len(rows), device=tokens.device), p] = True
        logits = model.logits_at(tokens[i], context[i] | earlier, "ac", lengths[i], wanted, insist=insist)
        log_probs = logits.to(wide(logits.dtype)).log_softmax(-1)
        values.append(log_probs.gather(1, tokens[i, p].long()[:, None])[:, 0])
    found = torch.cat(values) if values else torch.zeros(0, device=tokens.device)
    return found.new_zeros(B, T).masked_scatter(targets, found)


def _turns(order: Tensor, B: int, T: int) -> Tensor:
    if order.shape not in ((T,), (B, T)):
        raise ValueError(f"order has shape {tuple(order.shape)}; it must be ({T},) or ({B}, {T})")
    order = order.long().expand(B, T)
    if not torch.equal(order.sort(1).values, torch.arange(T, device=order.device).expand(B, T)):
        raise ValueError(f"order must hold each of the positions 0..{T - 1} once in every row")
    return order.argsort(1)
