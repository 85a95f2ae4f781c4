"""Who runs the model for the text level: the caller's own thread (`Here`), or an engine that many callers share (`engine.Request`)."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tracformer.generation.fill import fill
from tracformer.generation.job import Filled, Only, Stop, Watch
from tracformer.generation.orders import Order
from tracformer.generation.samplers import PLAIN, Sampler
from tracformer.generation.sessions import Session, open_session
from tracformer.model.base import ConditionalModel

A = TypeVar("A")


class Runner(Protocol):
    @property
    def model(self) -> ConditionalModel:
        """For its configuration, and what it can answer; to be computed with only inside `call`."""
        ...

    def fill(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str = "car",
        lengths: Tensor | None = None,
        *,
        sampler: Sampler | Sequence[Sampler] = PLAIN,
        seed: int | Sequence[int] = 0,
        order: Order | Sequence[Order] | None = None,
        only: Only | None = None,
        stop: int | Stop | None = None,
        insist: bool = False,
        watch: Watch | None = None,
        top: int = 0,
        drafts: bool = False,
    ) -> Filled:
        """As `generation.fill.fill`. `watch` is called in the caller's thread; `only` and `stop` in any."""
        ...

    def session(self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor) -> Session:
        """As `generation.sessions.open_session`."""
        ...

    def call(self, f: Callable[[], A]) -> A:
        """What f returns, which may compute with the model: whole passes. Without gradients."""
        ...


class Here:
    """In the caller's thread, at once."""

    def __init__(self, model: ConditionalModel) -> None:
        self.model = model

    def fill(
        self,
        tokens: Tensor,
        context: Tensor,
        mode: str = "car",
        lengths: Tensor | None = None,
        *,
        sampler: Sampler | Sequence[Sampler] = PLAIN,
        seed: int | Sequence[int] = 0,
        order: Order | Sequence[Order] | None = None,
        only: Only | None = None,
        stop: int | Stop | None = None,
        insist: bool = False,
        watch: Watch | None = None,
        top: int = 0,
        drafts: bool = False,
    ) -> Filled:
        return fill(
            self.model,
            tokens,
            context,
            mode,
            lengths,
            sampler=sampler,
            seed=seed,
            order=order,
            only=only,
            stop=stop,
            insist=insist,
            watch=watch,
            top=top,
            drafts=drafts,
        )

    def session(self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor) -> Session:
        return open_session(self.model, tokens, context, mode, lengths)

    def call(self, f: Callable[[], A]) -> A:
        with torch.no_grad():
            return f()
