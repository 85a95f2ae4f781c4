"""Mistral's fill-in-the-middle: a completion in the shape of a chat."""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from tracformer.generation.language_model import LanguageModel
from tracformer.generation.samplers import Sampler
from tracformer.server import completion as sse
from tracformer.server.completion import Wish, Written, read_prompt, write_on
from tracformer.server.errors import ApiError, body_of
from tracformer.server.queue import Job, Tell
from tracformer.server.schema import Lenient, Name, Seed, Stops, Text, listed
from tracformer.server.service import Service, service_of, usage_of

router = APIRouter()
PATH = "/v1/fim/completions"
UNLIMITED = 32  # tokens, where a client names no number


class FimRequest(Lenient):
    model: Name
    prompt: Text
    suffix: Text | None = None
    temperature: Annotated[float, Field(ge=0, le=1.5)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stop: Stops | None = None
    random_seed: Seed | None = None
    stream: bool | None = False


@router.post(PATH, summary="Mistral's fill-in-the-middle")
async def complete(http: Request, asked: FimRequest) -> Response:
    service = service_of(http)
    task = Fim(asked, service, service.named(asked.model))
    job = service.desk.start(http, task.run, service.seconds(None))
    if asked.stream:
        return await sse.answer(job, task.events(http, job))
    written = await job.done()
    usage = task.usage(http, job)
    message = {"role": "assistant", "content": written.text, "tool_calls": None, "prefix": False}
    choice = {"index": 0, "message": message, "finish_reason": written.finish}
    return JSONResponse(
        {**task.head, "object": "chat.completion", "usage": usage, "choices": [choice]}
    )


class Fim:
    """One request, from its fields to its answer."""

    def __init__(self, asked: FimRequest, service: Service, name: str) -> None:
        limits = service.settings.limits
        self.asked, self.suffix = asked, asked.suffix or ""
        self.most = UNLIMITED if asked.max_tokens is None else asked.max_tokens
        self.stop = listed(asked.stop)
        service.within("stop", len(self.stop), limits.stops)
        if asked.min_tokens and not self.suffix:
            raise ApiError(
                400,
                "min_tokens goes with a suffix: a text without one ends where it ends",
                param="min_tokens",
            )
        self.most = min(self.most, limits.blank_tokens) if self.suffix else self.most
        if (asked.min_tokens or 0) > self.most:
            raise ApiError(
                400,
                f"min_tokens is {asked.min_tokens}; the most here is {self.most}",
                param="min_tokens",
            )
        self.sampler = Sampler(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=asked.top_p or 1.0,
        )
        self.seed = secrets.randbelow(2**31) if asked.random_seed is None else asked.random_seed
        self.head: dict[str, Any] = {
            "id": secrets.token_hex(16),
            "created": int(time.time()),
            "model": name,
        }
        self.given = 0  # tokens

    def run(self, lm: LanguageModel, tell: Tell) -> Written:
        """In the worker's thread."""
        self.given = len(read_prompt(lm, self.asked.prompt).ids) + len(
            lm.tokenizer.encode(self.suffix, inside=True)
        )
        if self.most == 0:
            return Written("", (), len(self.asked.prompt), 0, "length")
        wish = Wish(
            self.asked.prompt,
            self.suffix,
            least=max(1, self.asked.min_tokens or 0),
            most=self.most,
            sampler=self.sampler,
            seed=self.seed,
            stop=self.stop,
        )
        return write_on(lm, wish, lambda _, text, __: tell(text if self.asked.stream else None))[0]

    async def events(self, http: Request, job: Job[Written]) -> AsyncIterator[bytes]:
        role: dict[str, Any] = {"role": "assistant"}
        try:
            async for text in job:
                yield self._chunk({**role, "content": text}, None)
                role = {}
            yield self._chunk(
                {**role, "content": ""}, job.result.finish, usage=self.usage(http, job)
            )
            yield sse.DONE
        except ApiError as problem:
            yield sse.event(body_of(problem, PATH)[1])

    def usage(self, http: Request, job: Job[Written]) -> dict[str, int]:
        usage = usage_of(self.given, job.result.generated)
        service_of(http).count(http, job, usage)
        return usage

    def _chunk(self, delta: dict[str, Any], finish: str | None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return sse.event(
            {**self.head, "object": "chat.completion.chunk", "choices": [choice], **more}
        )
