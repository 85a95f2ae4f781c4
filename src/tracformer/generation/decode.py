"""Fill batches of token ids.

- `fill`: fill every target of a batch, by the scheduler or a reverse process.
- `reverse_process`: the sampler of a diffusion model, one pass at a time.
- `Runner`: what text-level code uses to run a model; `engine.Request` is one for shared models.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar, Unpack

import torch
from torch import Tensor

from tracformer.generation.fill_request import Filled, FillRequest, FillRules, TopTokens
from tracformer.generation.orders import Ancestral, Order
from tracformer.generation.request_options import PLAIN, Sampler
from tracformer.generation.results import Candidate, Token
from tracformer.generation.samplers import Pick, adjusted
from tracformer.generation.scheduler import Scheduler, Session, candidates_of, open_session
from tracformer.model.base import ConditionalModel, Passes, finish
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig

A = TypeVar("A")


def fill(
    model: ConditionalModel,
    batch: Batch,
    mode: str = "car",
    *,
    cached: bool = True,
    **rules: Unpack[FillRules],
) -> Filled:
    """Fill every target of a batch.

    Args:
        model: Any registered model.
        batch: Sequences; the tokens at targets are ignored.
        mode: One of the modes that the weights were trained in.
        cached: Use the model's cache where it has one for the mode.
        **rules: `sampler`, `seed` and `order` (one for all sequences, or one for each), `only`,
            `stop`, `callback`, `top` and `drafts`: see `FillRequest`. One seed for all means that
            each sequence gets what it would get alone.

    Returns:
        The filled tokens with their log-probabilities.

    Raises:
        ValueError: The batch does not fit the model, or the rules contradict each other.

    Example:
        >>> import torch, tracformer
        >>> model = tracformer.load("stories").model
        >>> tokens = torch.tensor([[5, 0, 7]])
        >>> batch = tracformer.Batch(tokens, torch.tensor([[True, False, True]]))
        >>> tracformer.fill(model, batch, seed=1).tokens.shape
        torch.Size([1, 3])
    """
    request = FillRequest(model.config, batch, mode, **rules)
    if mode == "diffusion":
        return finish(reverse_process(model, request))
    scheduler = Scheduler(model, *batch.tokens.shape, cached=cached)
    scheduler.add(request)
    while not request.done:
        scheduler.step()
    return request.result()


class Runner:
    """Runs a model for one caller, in the calling thread."""

    def __init__(self, model: ConditionalModel) -> None:
        self.model = model

    def fill(self, batch: Batch, mode: str = "car", **rules: Unpack[FillRules]) -> Filled:
        """Fill a batch, see `fill`."""
        return fill(self.model, batch, mode, **rules)

    def open_session(self, batch: Batch, mode: str) -> Session:
        """Return a session that holds these sequences."""
        return open_session(self.model, batch, mode)

    def call(self, f: Callable[[], A]) -> A:
        """Return f(), which may run the model. Gradients are off."""
        with torch.no_grad():
            return f()


@torch.no_grad()
def reverse_process(model: ConditionalModel, request: FillRequest) -> Passes[Filled]:
    """Fill a request by a diffusion model's own sampler, which chooses the order of tokens.

    Tokens after the first one that ends a sequence are dropped.
    """
    steps = check_reverse(model.config, request.samplers, request.order)
    # 64-bit seeds as signed integers
    seeds = torch.tensor([(seed + 2**63) % 2**64 - 2**63 for seed in request.seeds])
    batch = request.batch
    top = TopTokens.empty((*batch.tokens.shape, request.top)) if request.top else None
    filled, log_probs = yield from model.ancestral_passes(
        batch, steps, seeds, restrict=_restriction(request, top)
    )  # type: ignore[operator]
    lengths = _stopped(request, filled)
    targets = Batch(filled, batch.context, lengths).targets()
    if request.callback is not None:
        request.callback(
            [
                Token(b, t, int(filled[b, t]), float(log_probs[b, t]), _candidates(top, b, t))
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
    """Return the number of steps of a reverse process; None: the model's default.

    Raises:
        ValueError: The samplers or the order have no meaning for a reverse process.
    """
    if any(sampler.needs_history or sampler.required for sampler in samplers):
        raise ValueError(
            "mode 'diffusion' chooses the order of tokens itself: repetition_penalty, "
            "no_repeat_ngram and required have no meaning there; leave them out"
        )
    if order is None:
        return None
    if isinstance(order, Ancestral):
        return order.steps
    advice = "; for other orders use the model in mode 'ac'" if "ac" in config.modes else ""
    raise ValueError(f"mode 'diffusion' takes only the order Ancestral(steps){advice}")


def _restriction(
    request: FillRequest, top: TopTokens | None
) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Return a function that applies the samplers to logits (N, V) at `where` (B, T).

    None if there is nothing to apply. The function also records the most likely tokens in `top`.
    """
    free = request.only is None and all(sampler == PLAIN for sampler in request.samplers)
    if free and top is None:
        return None

    def restrict(where: Tensor, logits: Tensor) -> Tensor:
        if top is not None:
            best, at = logits.double().log_softmax(1).topk(request.top, dim=1), where.cpu()
            top.tokens[at], top.log_probs[at] = best.indices.cpu(), best.values.cpu()
        if free:
            return logits
        rows = []
        for number, (row, position) in enumerate(where.nonzero().tolist()):
            sampler = request.samplers[row]
            only = None if request.only is None else request.only(row, position)
            scores = adjusted(logits[number : number + 1], sampler, [Pick(sampler, 0.0, only=only)])
            if sampler.temperature == 0:  # the most likely token alone
                scores = torch.full_like(scores, -torch.inf).scatter(
                    1, scores.argmax(1, keepdim=True), 0.0
                )
            rows.append(scores)
        return torch.cat(rows) if rows else logits

    return restrict


def _candidates(top: TopTokens | None, row: int, position: int) -> tuple[Candidate, ...]:
    if top is None:
        return ()
    ids, values = top.tokens[row, position].tolist(), top.log_probs[row, position].tolist()
    return candidates_of(zip(ids, values, strict=True))


def _stopped(request: FillRequest, filled: Tensor) -> Tensor:
    """Return the length (B,) of each sequence, read from left to right."""
    lengths = request.batch.lengths.clone()
    if request.stop is None:
        return lengths
    for row, (tokens, targets) in enumerate(
        zip(filled.tolist(), request.batch.targets().tolist(), strict=True)
    ):
        for position, (token, target) in enumerate(zip(tokens, targets, strict=True)):
            if target and request.ends_with(row, position, token):
                lengths[row] = position + 1
                break
    return lengths
