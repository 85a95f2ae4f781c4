"""OpenAI's completions: the text between `prompt` and `suffix`, or the text after the prompt."""

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from tracformer.generation.samplers import Sampler
from tracformer.server.completion import Choice, Completion, CompletionOptions, unset
from tracformer.server.queue import QueuedRequest
from tracformer.server.schema import (
    ApiError,
    Count,
    Lenient,
    Many,
    NotNegative,
    Seed,
    Several,
    ShortText,
    StopStrings,
    Text,
    as_tuple,
    choose_by,
    tagged,
)
from tracformer.server.streaming import CompletionToken

router = APIRouter()


class StreamOptions(Lenient):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


def _kind_of_prompt(prompt: Any) -> str:
    """Return which alternative a prompt is, judging by its first element."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    return "id lists" if isinstance(first, list) else "ids" if isinstance(first, int) else "texts"


TokenIds = Many[NotNegative]
PromptField = Annotated[
    Annotated[Text, tagged("text")]
    | Annotated[Several[Text], tagged("texts")]
    | Annotated[TokenIds, tagged("ids")]
    | Annotated[Several[TokenIds], tagged("id lists")],
    choose_by(_kind_of_prompt),
]


class OpenAIRequest(Lenient):
    """Fields of OpenAI's completions API."""

    model: ShortText | None = None
    prompt: PromptField | None = None
    suffix: Text | None = None
    max_tokens: NotNegative | None = 16
    n: Count | None = 1
    best_of: Count | None = None
    echo: bool | None = False
    logprobs: NotNegative | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    seed: Seed | None = None
    stop: StopStrings | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = Field(
        None, description="only 0: not supported"
    )
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = Field(
        None, description="only 0: not supported"
    )
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = Field(
        None, description="only empty: not supported"
    )
    whole: bool = Field(False, description="not part of OpenAI's API: the suffix ends the document")

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Return the prompts as texts or token ids."""
        prompt: Any = self.prompt or ""
        kind = _kind_of_prompt(prompt)
        if kind in ("text", "ids"):
            prompt = [prompt]
        return [each if isinstance(each, str) else tuple(each) for each in prompt]

    def options(self) -> CompletionOptions:
        """Return what to generate.

        Raises:
            ApiError: Fields contradict each other.
        """
        n = self.n or 1
        best_of = self.best_of or n
        if best_of < n:
            raise ApiError(
                400, f"best_of is {best_of}; it must be at least n = {n}", param="best_of"
            )
        if self.prompt == []:
            raise ApiError(400, "prompt is an empty list; give at least one text", param="prompt")
        if self.stream and best_of > n:
            raise ApiError(
                400,
                f"best_of is {best_of} and n is {n}: samples that are compared first cannot be "
                "streamed; set stream to false or leave best_of out",
                param="best_of",
            )
        if self.suffix and self.echo:
            raise ApiError(
                400,
                "echo repeats and scores the prompt from left to right; it cannot be combined "
                "with a suffix",
                param="echo",
            )
        return CompletionOptions(
            suffix=self.suffix or "",
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            n=n,
            best_of=best_of,
            sampler=Sampler(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=self.top_p or 1.0,
            ),
            unset=unset(self),
            stop=as_tuple(self.stop),
            top=self.logprobs or 0,
            whole=self.whole,
            echo=bool(self.echo),
            score_prompt=bool(self.echo) and self.logprobs is not None,
        )


class OpenAICompletion(Completion):
    """A completion in the shape of OpenAI's API."""

    path = "/v1/completions"

    def __init__(self, http: Request, body: OpenAIRequest) -> None:
        super().__init__(
            http, body.model, body.prompts(), body.options(), body.seed, bool(body.stream)
        )
        self.with_logprobs = body.logprobs is not None
        self.with_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }

    def answer(self, request: QueuedRequest[list[Choice]], usage: dict[str, int]) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(request.result):
            prompt = choice.prompt
            scored = self._logprobs(choice.scored, 0)
            logprobs = self._logprobs(choice.tokens, prompt.base)
            if scored is not None and logprobs is not None:
                logprobs = {name: scored[name] + logprobs[name] for name in scored}
            text = (prompt.text if self.options.echo else "") + choice.text
            choices.append(_choice(index, text, logprobs, choice.finish))
        return {**self.head, "choices": choices, "usage": usage}

    def chunk(
        self, index: int, text: str, tokens: Sequence[CompletionToken], base: int
    ) -> dict[str, Any]:
        return self._event([_choice(index, text, self._logprobs(tokens, base), None)])

    def closing(
        self, request: QueuedRequest[list[Choice]], usage: dict[str, int]
    ) -> list[dict[str, Any]]:
        events = [
            self._event([_choice(index, "", None, choice.finish)])
            for index, choice in enumerate(request.result)
        ]
        return (
            [*events, {**self.head, "choices": [], "usage": usage}] if self.with_usage else events
        )

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "choices": choices, **({"usage": None} if self.with_usage else {})}

    def _logprobs(
        self, tokens: Sequence[CompletionToken], base: int
    ) -> dict[str, list[Any]] | None:
        """Return OpenAI's `logprobs` of tokens whose text starts at `base`; None if not wanted."""
        if not self.with_logprobs:
            return None
        names, tops = self.names, []
        for token in tokens:
            # of two candidates with one name, the more likely one
            top = {names[each.token_id]: each.log_prob for each in reversed(token.candidates)}
            top[names[token.token_id]] = token.log_prob
            tops.append(top)
        return {
            "tokens": [names[token.token_id] for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": tops,
            "text_offset": [base + token.start for token in tokens],
        }


@router.post(OpenAICompletion.path, summary="OpenAI's completions, with and without a suffix")
async def completions(http: Request, body: OpenAIRequest) -> Response:
    """Complete one or several prompts."""
    return await OpenAICompletion(http, body).respond()


def _choice(
    index: int, text: str, logprobs: dict[str, list[Any]] | None, finish: str | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
