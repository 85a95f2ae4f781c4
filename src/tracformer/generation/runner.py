"""Who runs the model for the text level: the caller's own thread (`Here`), or an engine that many callers share (`engine.Request`)."""

from collections.abc import Callable
from typing import Protocol, TypeVar, Unpack

import torch
from torch import Tensor

from tracformer.generation.fill import fill
from tracformer.generation.job import Filled, Rules
from tracformer.generation.sessions import Session, open_session
from tracformer.model.base import ConditionalModel

A = TypeVar("A")


class Runner(Protocol):
    @property
    def model(self) -> ConditionalModel:
        """For its configuration, and what it can answer; to be computed with only inside `call`."""
        ...

    def fill(self, tokens: Tensor, context: Tensor, mode: str = "car", lengths: Tensor | None = None, **rules: Unpack[Rules]) -> Filled:
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

    def fill(self, tokens: Tensor, context: Tensor, mode: str = "car", lengths: Tensor | None = None, **rules: Unpack[Rules]) -> Filled:
        return fill(self.model, tokens, context, mode, lengths, **rules)

    def session(self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor) -> Session:
        return open_session(self.model, tokens, context, mode, lengths)

    def call(self, f: Callable[[], A]) -> A:
        with torch.no_grad():
            return f()
