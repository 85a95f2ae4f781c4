"""Token ids in, token ids out: fill the targets of a batch, any pattern of holes."""

from typing import Unpack

import torch
from torch import Tensor

from tracformer.generation.filling import Filling
from tracformer.generation.job import Filled, Job, Revealed, Rules, Top
from tracformer.generation.orders import Ancestral
from tracformer.generation.samplers import Sampler
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
    """A diffusion model's own sampler, which decides itself when a token is revealed."""
    temperature = job.samplers[0].temperature
    constrained = job.only is not None or job.stop is not None
    if constrained or any(sampler != Sampler(temperature=temperature) for sampler in job.samplers):
        raise ValueError("mode 'diffusion' samples by the model's reverse process: of a sampler it takes one temperature and nothing else")
    if job.order is not None and not isinstance(job.order, Ancestral):
        raise ValueError("mode 'diffusion' takes the order Ancestral(steps) alone; for other orders ask the same model in mode 'ac'")
    if job.top:
        raise ValueError(f"top is {job.top}: mode 'diffusion' reveals tokens by its own process and lists no candidates; ask in mode 'ac'")
    steps = None if job.order is None else job.order.steps
    filled, log_probs = model.ancestral(job.tokens, job.context, job.lengths, steps, torch.tensor(job.seeds), temperature)  # type: ignore[operator]
    targets = targets_of(job.context, job.lengths)
    if job.watch is not None:
        job.watch([Revealed(b, t, int(filled[b, t]), float(log_probs[b, t])) for b, t in targets.nonzero().tolist()])
    return Filled(filled, log_probs.double().cpu(), job.lengths.cpu(), torch.where(targets, 0, -1).cpu())
