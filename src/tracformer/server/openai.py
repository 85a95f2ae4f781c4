"""OpenAI's completions: with a `suffix` the text between, without one the text that follows."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from tracformer.generation.language_model import LanguageModel
from tracformer.generation.samplers import Sampler
from tracformer.server import completion as sse
from tracformer.server.completion import (
    Piece,
    Prompt,
    Wish,
    Written,
    read_prompt,
    score_prompt,
    write_on,
)
from tracformer.server.errors import ApiError, body_of
from tracformer.server.queue import Job, Tell
from tracformer.server.schema import Count, Lenient, Name, Seed, Stops, Text, TokenId, listed
from tracformer.server.service import Service, service_of, usage_of

router = APIRouter()
PATH = "/v1/completions"


class StreamOptions(Lenient):
    include_usage: bool | None = None


class CompletionRequest(Lenient):
    model: Name | None = None
    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]] | None = None
    suffix: Text | None = None
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = 16
    n: Count | None = 1
    best_of: Count | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    seed: Seed | None = None
    stop: Stops | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = Field(
        None, description="only 0: not supported"
    )
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = Field(
        None, description="only 0: not supported"
    )
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = Field(
        None, description="only empty: not supported"
    )
    whole: bool = Field(False, description="not OpenAI's: the suffix ends the document")

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        prompt = self.prompt
        if prompt is None or isinstance(prompt, str):
            return [prompt or ""]
        if prompt and isinstance(prompt[0], int):
            return [tuple(i for i in prompt if isinstance(i, int))]
        return [
            each if isinstance(each, str) else tuple(each)
            for each in prompt
            if not isinstance(each, int)
        ]


class Choice:
    """One choice: a prompt that may be repeated and scored, and what was written behind it."""

    def __init__(
        self, prompt: Prompt, scored: Sequence[Piece], written: Written | None, echo: bool
    ) -> None:
        self.prompt, self.scored, self.written, self.echo = prompt, scored, written, echo

    @property
    def text(self) -> str:
        return (self.prompt.text if self.echo else "") + (
            self.written.text if self.written is not None else ""
        )

    @property
    def finish(self) -> str:
        return "length" if self.written is None else self.written.finish


@router.post(PATH, summary="OpenAI's completions, with and without a suffix")
async def completions(http: Request, asked: CompletionRequest) -> Response:
    service = service_of(http)
    name = service.named(asked.model)
    task = Completion(asked, service, name)
    job = service.desk.start(http, task.run, service.seconds(None))
    if asked.stream:
        return await sse.answer(job, task.events(http, job))
    answers = await job.done()
    usage = task.usage(answers)
    service.count(http, job, usage)
    choices = [task.choice(i, answer) for i, answer in enumerate(answers)]
    return JSONResponse({**task.head, "choices": choices, "usage": usage})


class Completion:
    """One request, from its fields to its choices."""

    def __init__(self, asked: CompletionRequest, service: Service, name: str) -> None:
        limits = service.settings.limits
        self.asked, self.prompts = asked, asked.prompts
        self.n = asked.n or 1
        self.draws = asked.best_of or self.n
        self.most = 16 if asked.max_tokens is None else asked.max_tokens
        self.echo, self.suffix = bool(asked.echo), asked.suffix or ""
        self.stop = listed(asked.stop)
        self.names = service.desk.names
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        service.within("n", self.n, limits.n)
        service.within("best_of", self.draws, limits.best_of)
        service.within("prompt", len(self.prompts), limits.prompts)
        service.within("logprobs", asked.logprobs or 0, limits.top)
        service.within("stop", len(self.stop), limits.stops)
        if self.draws < self.n:
            raise ApiError(
                400, f"best_of is {self.draws}; it must be at least n = {self.n}", param="best_of"
            )
        if not self.prompts:
            raise ApiError(400, "prompt is an empty list; give at least one text", param="prompt")
        if asked.stream and self.draws > self.n:
            raise ApiError(
                400,
                f"best_of is {self.draws} and n {self.n}: what is thrown away cannot be streamed",
                param="best_of",
            )
        if self.suffix and self.echo:
            raise ApiError(
                400,
                "echo repeats and scores the prompt from left to right; it does not go with a "
                "suffix",
                param="echo",
            )
        self.sampler = Sampler(
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=asked.top_p or 1.0,
        )
        # one a prompt
        self.seeds = [
            secrets.randbelow(2**31) if asked.seed is None else asked.seed for _ in self.prompts
        ]
        self.blank = min(self.most, limits.blank_tokens)
        self.behind = 0  # tokens of the suffix

    def run(self, lm: LanguageModel, tell: Tell) -> list[Choice]:
        """In the worker's thread."""
        answers: list[Choice] = []
        self.behind = len(lm.tokenizer.encode(self.suffix, inside=True))
        for number, given in enumerate(self.prompts):
            prompt = read_prompt(lm, given)
            scored = self._score(lm, prompt)
            if self.asked.stream and self.echo:
                for sample in range(self.n):
                    tell((number * self.n + sample, prompt.text, self._fields(scored, 0)))
            if self.most == 0:
                answers += [Choice(prompt, scored, None, self.echo)] * self.n
                continue
            wish = Wish(
                prompt=given,
                suffix=self.suffix,
                most=self.blank if self.suffix else self.most,
                n=self.draws,
                sampler=self.sampler,
                seed=self.seeds[number],
                stop=self.stop,
                top=self.asked.logprobs or 0,
                whole=self.asked.whole,
            )

            def told(
                sample: int,
                text: str,
                pieces: list[Piece],
                first: int = number * self.n,
                base: int = prompt.base,
            ) -> bool:
                return tell(
                    (first + sample, text, self._fields(pieces, base))
                    if self.asked.stream
                    else None
                )

            written = write_on(lm, wish, told)
            best = (
                sorted(written, key=lambda each: -each.mean_log_prob)[: self.n]
                if self.draws > self.n
                else written
            )
            answers += [Choice(prompt, scored, each, self.echo) for each in best]
        return answers

    def choice(self, index: int, answer: Choice) -> dict[str, Any]:
        fields = self._fields(answer.scored, 0)
        if answer.written is not None:
            fields = _joined(fields, self._fields(answer.written.pieces, answer.prompt.base))
        return _choice(index, answer.text, fields, answer.finish)

    def usage(self, answers: Sequence[Choice]) -> dict[str, int]:
        given = sum(
            max(len(answer.prompt.ids), len(answer.scored)) + self.behind
            for answer in answers[:: self.n]
        )
        written = sum(answer.written.generated for answer in answers if answer.written is not None)
        return usage_of(given, written)

    async def events(self, http: Request, job: "Job[list[Choice]]") -> AsyncIterator[bytes]:
        counted = self.asked.stream_options is not None and bool(
            self.asked.stream_options.include_usage
        )
        empty = {"usage": None} if counted else {}
        try:
            async for index, text, fields in job:
                yield sse.event(
                    {**self.head, "choices": [_choice(index, text, fields, None)], **empty}
                )
            usage = self.usage(job.result)
            for index, answer in enumerate(job.result):
                yield sse.event(
                    {**self.head, "choices": [_choice(index, "", None, answer.finish)], **empty}
                )
            if counted:
                yield sse.event({**self.head, "choices": [], "usage": usage})
            yield sse.DONE
            service_of(http).count(http, job, usage)
        except ApiError as problem:
            yield sse.event(body_of(problem, PATH)[1])

    def _score(self, lm: LanguageModel, prompt: Prompt) -> list[Piece]:
        """The prompt's own tokens, where they are asked for; with what will be written, not the
        space that moves into it.
        """
        if not self.echo or self.asked.logprobs is None:
            return []
        ids = prompt.ids
        if self.most == 0 and prompt.skip:
            ids = tuple(lm.tokenizer.encode(prompt.text))
        return score_prompt(lm, ids, self.asked.logprobs) if ids else []

    def _fields(self, pieces: Sequence[Piece], base: int) -> dict[str, list[Any]] | None:
        if self.asked.logprobs is None:
            return None
        tops = []
        for piece in pieces:
            # the likelier of two of one name
            top = {self.names[each.token_id]: each.log_prob for each in reversed(piece.candidates)}
            top[self.names[piece.token_id]] = piece.log_prob
            tops.append(top)
        return {
            "tokens": [self.names[piece.token_id] for piece in pieces],
            "token_logprobs": [piece.log_prob for piece in pieces],
            "top_logprobs": tops,
            "text_offset": [base + piece.start for piece in pieces],
        }


def _joined(
    first: dict[str, list[Any]] | None, second: dict[str, list[Any]] | None
) -> dict[str, list[Any]] | None:
    return (
        None
        if first is None or second is None
        else {name: first[name] + second[name] for name in first}
    )


def _choice(
    index: int, text: str, logprobs: dict[str, list[Any]] | None, finish: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
