"""The native protocol: texts with any number of blanks, scores, tokens.

An unknown field is an error.
"""

import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from tracformer.generation.language_model import LanguageModel
from tracformer.generation.request_options import (
    InfillOptions,
    ScoreOptions,
    flat_options,
    parse_search,
)
from tracformer.generation.results import Callback, Infilled, Token
from tracformer.generation.template import Template, parse
from tracformer.server.queue import QueuedRequest, Send, Service, off_the_loop, service_of, usage_of
from tracformer.server.schema import (
    ApiError,
    Seed,
    Several,
    ShortText,
    Strict,
    Text,
    body_of,
    choose_by,
    tagged,
    with_options,
)
from tracformer.server.streaming import answer_json, event, stream_events

router = APIRouter()
Timeout = Field(None, gt=0, le=10**6, description="time limit in seconds, below the server's own")
Tokens = Annotated[int, Field(ge=1, le=2**20)]


class BlankRange(Strict):
    """A blank of `min` to `max` tokens."""

    min: Tokens = 1
    max: Tokens


def _kind_of_blank(value: Any) -> str:
    return "range" if isinstance(value, dict | BlankRange) else "number"


class Blank(Strict):
    """A blank: its number of tokens, a range, or null if the model is to choose."""

    blank: (
        Annotated[
            Annotated[Tokens, tagged("number")] | Annotated[BlankRange, tagged("range")],
            choose_by(_kind_of_blank),
        ]
        | None
    )

    @property
    def content(self) -> str:
        """The blank's content in a text, such as "3-8"."""
        if isinstance(self.blank, BlankRange):
            return f"{self.blank.min}-{self.blank.max}"
        return "" if self.blank is None else str(self.blank)


def _kind_of_segment(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "blank" if isinstance(value, dict | Blank) else None


Segment = Annotated[
    Annotated[Text, tagged("text")] | Annotated[Blank, tagged("blank")],
    choose_by(_kind_of_segment, 'must be a string or a blank such as {"blank": 8}'),
]


@with_options(InfillOptions, skip=("seed", "batch"))
class InfillBody(Strict):
    """Fields of `/v1/infill`: a text and the options of `InfillOptions`."""

    text: Text | None = Field(
        None,
        description="text with blanks: [[]], [[8]] or [[3-8]]; \\[[ stands for the characters. In "
        "a text without any, [MASK], <mask> or ____ is a blank of any length",
    )
    segments: Several[Segment] | None = Field(
        None, description="instead of `text`: literal strings and blanks in turn"
    )
    seed: Seed | None = Field(None, description="random seed; null draws one, which is returned")
    stream: bool = Field(False, description="send tokens as server-sent events")
    model: ShortText | None = None
    timeout: float | None = Timeout

    @model_validator(mode="after")
    def _one_text(self) -> Self:
        if (self.text is None) == (self.segments is None):
            raise ValueError("give either text or segments")
        return self

    def template(self) -> Template:
        """Return the text, cut at its blanks."""
        if self.text is not None:
            return parse(self.text)
        pieces: list[list[str]] = [[]]
        contents: list[str] = []
        for segment in self.segments or []:
            if isinstance(segment, str):
                pieces[-1].append(segment)
            else:
                contents.append(segment.content)
                pieces.append([])
        if not contents:
            raise ValueError('the segments have no blank; write one as {"blank": 8}')
        return Template(tuple(map("".join, pieces)), tuple(contents))

    def options(self, seed: int) -> InfillOptions:
        """Return the options.

        Raises:
            ValueError: Options contradict each other.
        """
        known = set(flat_options(InfillOptions))
        values = self.model_dump(include=known & self.model_fields_set)
        if self.stream and self.quality == "best":  # type: ignore[attr-defined]
            raise ValueError(
                "quality is 'best', which compares whole fills and cannot be streamed; use "
                "quality fast or raw, or stream false"
            )
        return InfillOptions.make(**{**values, "seed": seed})


def check_limits(service: Service, template: Template, options: InfillOptions) -> None:
    """Raise ApiError if a request to fill blanks exceeds a limit of the server."""
    limits = service.settings.limits
    for name in ("n", "best_of", "length_draws", "top", "steps"):
        service.check_limit(name, getattr(options, name), getattr(limits, name))
    service.check_limit("blanks", len(template.contents), limits.blanks)
    service.check_limit("max_blank", options.max_blank, limits.blank_tokens)
    for low, high in template.lengths:
        if high not in (low, None):  # a length that is to be chosen
            service.check_limit("blank", high, limits.blank_tokens)
    if options.search is not None:
        method, number = parse_search(options.search)
        service.check_limit("search", number, limits.beam if method == "beam" else limits.nodes)


@router.post("/v1/infill", summary="Fill the blanks of a text")
async def infill(http: Request, body: InfillBody) -> Response:
    """Fill the blanks of a text, as one answer or as a stream of tokens."""
    service = service_of(http)
    model = service.model_name(body.model)
    seed = secrets.randbelow(2**31) if body.seed is None else body.seed

    def read() -> tuple[Template, InfillOptions]:
        template, options = body.template(), body.options(seed)
        check_limits(service, template, options)
        return template, options

    try:
        template, options = await off_the_loop(read, len(body.text or ""))
    except ValueError as mistake:
        raise ApiError(400, str(mistake)) from mistake

    def fill(lm: LanguageModel, send: Send) -> list[Infilled]:
        callback = _EventCallback(send) if body.stream else lambda _: send(None)
        [request] = lm.infill_requests([template], options=options, stream=body.stream)
        return lm.infill(request, callback=callback)

    request = service.start(http, fill, body.timeout)
    head = {
        "object": "infill",
        "id": f"infill-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
        "seed": seed,
    }
    size = 1 + options.top  # of a token
    if body.stream:
        return await stream_events(request, _events(http, request, head, size))
    await request.done()
    usage = _count(http, request)
    size *= usage["completion_tokens"]
    return await answer_json(lambda: _answer(request, head, usage), size)


class _EventCallback(Callback):
    """Send events.

    Lengths are sent with the first tokens: before that, the request may still be refused.
    """

    def __init__(self, send: Send) -> None:
        self.send = send
        self.chosen: list[dict[str, Any]] = []

    def __call__(self, tokens: list[Token]) -> None:
        for lengths in self.chosen:
            self.send(event(lengths, "lengths"))
        self.chosen = []
        for token in tokens:
            data = token.to_dict()
            del data["text"]  # number of the text; a request has only one
            self.send(event(data, "token"))

    def lengths(self, text: int, sample: int, lengths: tuple[int, ...]) -> None:
        self.chosen.append({"sample": sample, "lengths": list(lengths)})


async def _events(
    http: Request, request: QueuedRequest[list[Infilled]], head: dict[str, Any], size: int
) -> AsyncIterator[bytes]:
    yield event({name: head[name] for name in ("id", "model", "seed")}, "start")
    try:
        async for written in request:
            yield written
        usage = _count(http, request)
        size *= usage["completion_tokens"]
        yield await off_the_loop(lambda: event(_answer(request, head, usage), "result", size), size)
    except ApiError as problem:
        yield event(body_of(problem, "/v1/infill")[1], "error")


def _count(http: Request, request: QueuedRequest[list[Infilled]]) -> dict[str, int]:
    """Record the finished request and return its usage."""
    results = request.result
    filled = [sum(len(span.token_ids) for span in result.spans) for result in results]
    usage = usage_of(len(results[0].token_ids) - filled[0], sum(filled))
    service_of(http).count(http, request, usage)
    return usage


def _answer(
    request: QueuedRequest[list[Infilled]], head: dict[str, Any], usage: dict[str, int]
) -> dict[str, Any]:
    """Return the whole answer."""
    return {
        **head,
        "results": [result.to_dict() for result in request.result],
        "usage": usage,
        "timings": request.timings(usage["completion_tokens"]),
    }


@with_options(ScoreOptions, skip=("seed", "batch"))
class ScoreBody(Strict):
    """Fields of `/v1/score`: a text and the options of `ScoreOptions`."""

    text: Text = Field(
        description=(
            "text with the parts to score in [[...]]; without marks the whole text is scored, "
            "from left to right if no mode is given"
        )
    )
    seed: Seed = Field(0, description="random seed of an estimate")
    model: ShortText | None = None
    timeout: float | None = Timeout


@router.post("/v1/score", summary="Score the marked parts of a text, or all of it")
async def score(http: Request, body: ScoreBody) -> Response:
    """Return log-probabilities of the marked parts of a text, or of all of it."""
    service = service_of(http)
    model, limits = service.model_name(body.model), service.settings.limits
    options = ScoreOptions(**body.model_dump(include=set(flat_options(ScoreOptions))))
    service.check_limit("top", options.top, limits.top)
    service.check_limit("draws", options.draws or 0, limits.draws)
    try:
        if not body.text:
            raise ValueError("the text is empty; there is nothing to score")
        template = await off_the_loop(lambda: parse(body.text, required=False), len(body.text))
    except ValueError as mistake:
        raise ApiError(400, str(mistake), param="text") from mistake
    service.check_limit("blanks", len(template.contents), limits.blanks)
    request = service.start(http, lambda lm, _: lm.score(template, options=options), body.timeout)
    scored = await request.done()
    usage = usage_of(scored.tokens, 0)
    service.count(http, request, usage)
    return await answer_json(
        lambda: {"object": "score", "model": model, **scored.to_dict(), "usage": usage},
        scored.tokens * (1 + options.top),
    )


class TokenizeBody(Strict):
    """Fields of `/v1/tokenize`."""

    text: Text
    inside: bool = Field(False, description="the text follows other text")


@router.post("/v1/tokenize", summary="Tokenize a text")
async def tokenize(http: Request, body: TokenizeBody) -> Response:
    """Return the tokens of a text."""

    def tokens(lm: LanguageModel, _: Send) -> bytes:
        # written token by token in this thread: other requests wait for one long `json.dumps`
        written = (
            json.dumps(
                {"id": token, "text": lm.spelling.token(token, first=i == 0 and not body.inside)},
                ensure_ascii=False,
                separators=(",", ":"),
            )
            for i, token in enumerate(lm.tokenizer.encode(body.text, body.inside))
        )
        return f'{{"tokens":[{",".join(written)}]}}'.encode()

    request = service_of(http).start(http, tokens)
    return Response(await request.done(), media_type="application/json")
