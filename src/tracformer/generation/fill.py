"""Token ids in, token ids out: fill the targets of a batch, any pattern of holes."""

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from tracformer.generation.filling import Filling
from tracformer.generation.job import Filled, Job, Revealed, Rules, Top
from tracformer.generation.orders import Ancestral
from tracformer.generation.samplers import PLAIN, Pick, adjusted
from tracformer.model.base import ConditionalModel, targets_of

__all__ = ["Filled", "Revealed", "Top", "fill"]


def fill(
    model: ConditionalModel,
    tokens: Tensor,
    context: Tensor,
    mode: str = "car",
    lengths: Tensor | None = None,
    *,
    cached: bool = True,
    **rules: Unpack[Rules],
) -> Filled:
    """Fill every target of the batch.

    `sampler` and `order`: one for all or one a sequence. `seed`: one number means the same number for each sequence, so that it gets what
    it would get alone. `only(row, position)` restricts a position to some tokens. `stop` ends a sequence (`ar`: end of text): a token, or
    a function of row, position and token. `watch` is told of tokens as they come; with `drafts`, and an order that looks, also of what
    has become the likeliest token of a position still open. `top`: so many candidates of each token. What stands at targets in `tokens`
    is ignored. `insist`: ask in a mode that the weights were not trained for.
    """
    job = Job(model.config, tokens, context, mode, lengths, **rules)
    if mode == "diffusion":
        return reverse_process(model, job)
    filling = Filling(model, *tokens.shape, cached=cached)
    filling.add(job)
    while not job.done:
        filling.step()
    return job.result()


@torch.no_grad()
def reverse_process(model: ConditionalModel, job: Job) -> Filled:
    """A diffusion model's own sampler, which decides itself when a token is revealed. Tokens behind the first that stops are dropped."""
    if any(sampler.needs_history or sampler.required for sampler in job.samplers):
        raise ValueError(
            "mode 'diffusion' reveals tokens in an order of its own: repetition_penalty, no_repeat_ngram and required mean nothing to it"
        )
    if job.order is not None and not isinstance(job.order, Ancestral):
        raise ValueError("mode 'diffusion' takes the order Ancestral(steps) alone; for other orders ask the same model in mode 'ac'")
    if job.top:
        raise ValueError(f"top is {job.top}: mode 'diffusion' reveals tokens by its own process and lists no candidates; ask in mode 'ac'")
    steps = None if job.order is None else job.order.steps
    seeds = torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in job.seeds])  # the 64 bits that count, with a sign
    question = (job.tokens, job.context, job.lengths, steps, seeds)
    filled, log_probs = model.ancestral(*question, restrict=_restriction(job))  # type: ignore[operator]
    lengths = _stopped(job, filled)
    targets = targets_of(job.context, lengths)
    if job.watch is not None:
        job.watch([Revealed(b, t, int(filled[b, t]), float(log_probs[b, t])) for b, t in targets.nonzero().tolist()])
    log_probs = torch.where(targets, log_probs.double(), 0.0)
    return Filled(filled, log_probs.cpu(), lengths.cpu(), torch.where(targets, 0, -1).cpu())


def _restriction(job: Job) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What the job's rules make of the logits (N, V) of where (B, T), see `peers.ancestral.Restrict`; None where they change nothing."""
    if job.only is None and all(sampler == PLAIN for sampler in job.samplers):
        return None

    def restrict(where: Tensor, logits: Tensor) -> Tensor:
        rows = []
        for number, (row, position) in enumerate(where.nonzero().tolist()):
            sampler = job.samplers[row]
            only = None if job.only is None else job.only(row, position)
            scores = adjusted(logits[number : number + 1], sampler, [Pick(sampler, 0.0, only=only)])
            if sampler.temperature == 0:  # the likeliest alone
                scores = torch.full_like(scores, -torch.inf).scatter(1, scores.argmax(1, keepdim=True), 0.0)
            rows.append(scores)
        return torch.cat(rows) if rows else logits

    return restrict


def _stopped(job: Job, filled: Tensor) -> Tensor:
    """(B,): where each sequence ends, read from left to right."""
    lengths = job.lengths.clone()
    if job.stop is None:
        return lengths
    for row, (tokens, targets) in enumerate(zip(filled.tolist(), targets_of(job.context, lengths).tolist(), strict=True)):
        for position, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            if target and (job.stop(row, position, token) if callable(job.stop) else token == job.stop):
                lengths[row] = position + 1
                break
    return lengths
