"""Token ids in, token ids out: fill the targets of a batch, any pattern of holes."""

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from tracformer.generation.orders import Ancestral, Order
from tracformer.generation.samplers import PLAIN, Pick, Sampler, adjusted
from tracformer.generation.scheduler import Filled, Filling, Job, Likely, Revealed, Rules, Top
from tracformer.model.base import ConditionalModel, Passes, finish
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig

__all__ = ["Filled", "Revealed", "Top", "fill"]


def fill(
    model: ConditionalModel,
    batch: Batch,
    mode: str = "car",
    *,
    cached: bool = True,
    **rules: Unpack[Rules],
) -> Filled:
    """Fill every target of the batch.

    `sampler` and `order`: one for all or one a sequence. `seed`: one number means the same number
    for each sequence, so that it gets what it would get alone. `only(row, position)` restricts a
    position to some tokens. `stop` ends a sequence (`ar`: end of text): a token, or a function of
    row, position and token. `watch` is told of tokens as they come; with `drafts`, and an order
    that looks, also of what has become the likeliest token of a position still open. `top`: so many
    candidates of each token. The tokens at targets are ignored.
    """
    job = Job(model.config, batch, mode, **rules)
    if mode == "diffusion":
        return finish(reverse_process(model, job))
    filling = Filling(model, *batch.tokens.shape, cached=cached)
    filling.add(job)
    while not job.done:
        filling.step()
    return job.result()


@torch.no_grad()
def reverse_process(model: ConditionalModel, job: Job) -> Passes[Filled]:
    """A diffusion model's own sampler, which decides itself when a token is revealed.

    Tokens behind the first that stops are dropped.
    """
    steps = check_reverse(model.config, job.samplers, job.order)
    # the 64 bits that count, with a sign
    seeds = torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in job.seeds])
    batch = job.batch
    top = Top.of_none((*batch.tokens.shape, job.top)) if job.top else None
    filled, log_probs = yield from model.ancestral_passes(
        batch, steps, seeds, restrict=_restriction(job, top)
    )  # type: ignore[operator]
    lengths = _stopped(job, filled)
    targets = Batch(filled, batch.context, lengths).targets()
    if job.watch is not None:
        job.watch(
            [
                Revealed(b, t, int(filled[b, t]), float(log_probs[b, t]), _likely(top, b, t))
                for b, t in targets.nonzero().tolist()
            ]
        )
    log_probs = torch.where(targets, log_probs.double(), 0.0)
    if top is not None:
        dropped = ~targets.cpu()
        top.tokens[dropped], top.log_probs[dropped] = -1, 0.0
    return Filled(
        filled, log_probs.cpu(), lengths.cpu(), torch.where(targets, 0, -1).cpu(), top=top
    )


def check_reverse(
    config: ModelConfig, samplers: Sequence[Sampler], order: Order | Sequence[Order] | None
) -> int | None:
    """How many steps the order asks of the reverse process; None: the model's own number.

    A ValueError, where rules mean nothing to it.
    """
    if any(sampler.needs_history or sampler.required for sampler in samplers):
        raise ValueError(
            "mode 'diffusion' reveals tokens in an order of its own: repetition_penalty, "
            "no_repeat_ngram and required mean nothing to it"
        )
    if order is None:
        return None
    if isinstance(order, Ancestral):
        return order.steps
    advice = "; for other orders ask the same model in mode 'ac'" if "ac" in config.modes else ""
    raise ValueError(f"mode 'diffusion' takes the order Ancestral(steps) alone{advice}")


def _restriction(job: Job, top: Top | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    """What the job's rules make of the logits (N, V) of where (B, T), see
    `baselines.reverse_process.Restrict`; None where they change nothing.

    The model's own candidates are noted in `top` on the way.
    """
    free = job.only is None and all(sampler == PLAIN for sampler in job.samplers)
    if free and top is None:
        return None

    def restrict(where: Tensor, logits: Tensor) -> Tensor:
        if top is not None:
            best, at = logits.double().log_softmax(1).topk(job.top, dim=1), where.cpu()
            top.tokens[at], top.log_probs[at] = best.indices.cpu(), best.values.cpu()
        if free:
            return logits
        rows = []
        for number, (row, position) in enumerate(where.nonzero().tolist()):
            sampler = job.samplers[row]
            only = None if job.only is None else job.only(row, position)
            scores = adjusted(logits[number : number + 1], sampler, [Pick(sampler, 0.0, only=only)])
            if sampler.temperature == 0:  # the likeliest alone
                scores = torch.full_like(scores, -torch.inf).scatter(
                    1, scores.argmax(1, keepdim=True), 0.0
                )
            rows.append(scores)
        return torch.cat(rows) if rows else logits

    return restrict


def _likely(top: Top | None, row: int, position: int) -> Likely:
    if top is None:
        return ()
    return tuple(
        zip(top.tokens[row, position].tolist(), top.log_probs[row, position].tolist(), strict=True)
    )


def _stopped(job: Job, filled: Tensor) -> Tensor:
    """(B,): where each sequence ends, read from left to right."""
    lengths = job.batch.lengths.clone()
    if job.stop is None:
        return lengths
    for row, (tokens, targets) in enumerate(
        zip(filled.tolist(), job.batch.targets().tolist(), strict=True)
    ):
        for position, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            if target and (
                job.stop(row, position, token) if callable(job.stop) else token == job.stop
            ):
                lengths[row] = position + 1
                break
    return lengths
