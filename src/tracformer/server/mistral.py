"""Mistral's fill-in-the-middle: a completion in the shape of a chat."""

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from tracformer.generation.samplers import Sampler
from tracformer.server.completion import (
    DEFAULT_TOKENS,
    Choice,
    Completion,
    CompletionOptions,
    unset,
)
from tracformer.server.queue import QueuedRequest
from tracformer.server.schema import (
    ApiError,
    Lenient,
    NotNegative,
    Seed,
    ShortText,
    StopStrings,
    Text,
    as_tuple,
)
from tracformer.server.streaming import CompletionToken

router = APIRouter()


class MistralRequest(Lenient):
    """Fields of Mistral's FIM API."""

    model: ShortText
    prompt: Text
    suffix: Text | None = None
    temperature: Annotated[float, Field(ge=0, le=1.5)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: NotNegative | None = None
    min_tokens: NotNegative | None = None
    stop: StopStrings | None = None
    random_seed: Seed | None = None
    stream: bool | None = False

    def options(self) -> CompletionOptions:
        """Return what to generate.

        Raises:
            ApiError: `min_tokens` is set without a suffix.
        """
        if self.min_tokens and not self.suffix:
            raise ApiError(
                400,
                "min_tokens needs a suffix: without one the model decides where the text ends",
                param="min_tokens",
            )
        return CompletionOptions(
            suffix=self.suffix or "",
            min_tokens=self.min_tokens or 0,
            max_tokens=DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens,
            sampler=Sampler(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=self.top_p or 1.0,
            ),
            unset=unset(self),
            stop=as_tuple(self.stop),
        )


class MistralCompletion(Completion):
    """A completion in the shape of Mistral's API."""

    path = "/v1/fim/completions"

    def __init__(self, http: Request, body: MistralRequest) -> None:
        super().__init__(
            http, body.model, [body.prompt], body.options(), body.random_seed, bool(body.stream)
        )
        self.head: dict[str, Any] = {
            "id": secrets.token_hex(16),
            "created": int(time.time()),
            "model": self.model,
        }
        self.role: dict[str, Any] = {"role": "assistant"}  # only the first event names it

    def answer(self, request: QueuedRequest[list[Choice]], usage: dict[str, int]) -> dict[str, Any]:
        [choice] = request.result
        message = {**self.role, "content": choice.text, "tool_calls": None, "prefix": False}
        choices = [{"index": 0, "message": message, "finish_reason": choice.finish}]
        return {**self.head, "object": "chat.completion", "usage": usage, "choices": choices}

    def chunk(
        self, index: int, text: str, tokens: Sequence[CompletionToken], base: int
    ) -> dict[str, Any]:
        return self._event(text, None)

    def closing(
        self, request: QueuedRequest[list[Choice]], usage: dict[str, int]
    ) -> list[dict[str, Any]]:
        [choice] = request.result
        return [{**self._event("", choice.finish), "usage": usage}]

    def _event(self, text: str, finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {**self.role, "content": text}, "finish_reason": finish}
        self.role = {}
        return {**self.head, "object": "chat.completion.chunk", "choices": [choice]}


@router.post(MistralCompletion.path, summary="Mistral's fill-in-the-middle")
async def fim_completions(http: Request, body: MistralRequest) -> Response:
    """Complete a prompt, or fill the text between prompt and suffix."""
    return await MistralCompletion(http, body).respond()
