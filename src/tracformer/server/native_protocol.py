"""The native protocol: texts with any number of blanks, scores, tokens.

An unknown field is an error.
"""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from tracformer.generation.language_model import LanguageModel
from tracformer.generation.options import parse_search
from tracformer.generation.orders import Order, parse_order
from tracformer.generation.results import Callback, Infilled, Token
from tracformer.generation.samplers import Sampler
from tracformer.generation.template import Template, parse, parse_lengths
from tracformer.server.errors import ApiError, body_of
from tracformer.server.queue import QueuedRequest, Send, Service, service_of, usage_of
from tracformer.server.schema import (
    Count,
    Limits,
    ModelName,
    NotNegative,
    Seed,
    Strict,
    Text,
    choose_by,
    tagged,
)
from tracformer.server.streaming import event, stream_events

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


def _kind_of_segment(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    return "blank" if isinstance(value, dict | Blank) else None


Segment = Annotated[
    Annotated[Text, tagged("text")] | Annotated[Blank, tagged("blank")],
    choose_by(_kind_of_segment, 'must be a string or a blank such as {"blank": 8}'),
]


class InfillBody(Strict):
    """Fields of `/v1/infill`."""

    text: Text | None = Field(
        None,
        description="with blanks: [[]], [[8]] or [[3-8]]; \\[[ writes the characters themselves",
    )
    segments: list[Segment] | None = Field(
        None, description="instead of `text`: literal strings and blanks in turn"
    )
    n: Count = 1
    mode: ModelName | None = None
    order: (
        Literal["left-to-right", "random", "probability", "entropy", "margin", "ancestral"] | None
    ) = None
    k: Tokens = Field(1, description="tokens a step")
    threshold: float | None = Field(
        None, description="instead of k: all tokens that the model is so sure of"
    )
    steps: Annotated[int, Field(ge=0, le=2**16)] = Field(
        0, description="of the order `ancestral`, and of mode `diffusion`"
    )
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(0, ge=0, le=2**31 - 1)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    no_repeat_ngram: int = Field(0, ge=0, le=2**20)
    banned: list[NotNegative] = Field(default_factory=list)
    allowed: list[NotNegative] = Field(default_factory=list)
    required: list[NotNegative] = Field(default_factory=list)
    seed: Seed | None = Field(None, description="null: drawn, and told in the answer")
    best_of: int = Field(0, ge=0, le=2**31 - 1)
    search: Annotated[str, Field(max_length=40)] | None = Field(
        None, description="beam:WIDTH or best-first:BUDGET"
    )
    reread: bool = Field(
        False,
        description=(
            "rank what best_of or a beam found also by how the whole text reads from left to right"
        ),
    )
    whole: bool = Field(True, description="the text is a whole document, not a fragment")
    max_blank: Count = Field(32, description="most tokens of a blank that names none")
    lengths: Literal["sample", "rank"] = "sample"
    length_draws: int = Field(8, ge=2, le=2**20)
    top: int = Field(0, ge=0, le=2**20, description="candidates to tell of each token")
    stream: bool = False
    model: ModelName | None = None
    timeout: float | None = Timeout

    @model_validator(mode="after")
    def one_of_two(self) -> "InfillBody":
        if (self.text is None) == (self.segments is None):
            raise ValueError("give either text or segments")
        return self

    def template(self) -> Template:
        """The text, cut at its blanks."""
        if self.text is not None:
            return parse(self.text)
        pieces: list[list[str]] = [[]]
        contents: list[str] = []
        for segment in self.segments or []:
            if isinstance(segment, str):
                pieces[-1].append(segment)
            else:
                blank = segment.blank
                contents.append(
                    ""
                    if blank is None
                    else str(blank)
                    if isinstance(blank, int)
                    else f"{blank.min}-{blank.max}"
                )
                pieces.append([])
        if not contents:
            raise ValueError('the segments have no blank; write one as {"blank": 8}')
        return Template(tuple(map("".join, pieces)), tuple(contents))

    def sampler(self) -> Sampler:
        return Sampler(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram=self.no_repeat_ngram,
            banned=tuple(self.banned),
            allowed=tuple(self.allowed),
            required=tuple(self.required),
        )

    def turns(self) -> Order | None:
        if self.order is None and self.k == 1 and self.threshold is None and not self.steps:
            return None
        return parse_order(self.order, self.k, self.threshold, self.steps)

    def check(self, service: Service, template: Template) -> None:
        limits: Limits = service.settings.limits
        for name in ("n", "best_of", "length_draws", "top", "steps"):
            service.check_limit(name, getattr(self, name), getattr(limits, name))
        service.check_limit("blanks", len(template.contents), limits.blanks)
        service.check_limit("max_blank", self.max_blank, limits.blank_tokens)
        for low, high in map(parse_lengths, template.contents):
            if high not in (low, None):  # a length to be chosen
                service.check_limit("blank", high, limits.blank_tokens)
        if self.search is not None:
            method, number = parse_search(self.search)
            service.check_limit("search", number, limits.beam if method == "beam" else limits.nodes)


@router.post("/v1/infill", summary="Fill the blanks of a text")
async def infill(http: Request, body: InfillBody) -> Response:
    """Fill the blanks of a text, as one answer or as a stream of tokens."""
    service = service_of(http)
    model = service.model_name(body.model)
    seed = secrets.randbelow(2**31) if body.seed is None else body.seed
    try:
        template = body.template()
        body.check(service, template)
        sampler, order = body.sampler(), body.turns()
    except ValueError as mistake:
        raise ApiError(400, str(mistake)) from mistake

    def fill(lm: LanguageModel, send: Send) -> list[Infilled]:
        return lm.infill(
            template,
            body.n,
            mode=body.mode,
            sampler=sampler,
            seed=seed,
            order=order,
            best_of=body.best_of,
            search=body.search,
            reread=body.reread,
            whole=body.whole,
            max_blank=body.max_blank,
            lengths=body.lengths,
            length_draws=body.length_draws,
            top=body.top,
            callback=_EventCallback(send) if body.stream else lambda _: send(None),
        )

    request = service.start(http, fill, body.timeout)
    head = {
        "object": "infill",
        "id": f"infill-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
        "seed": seed,
    }
    if body.stream:
        return await stream_events(request, _events(http, request, head))
    await request.done()
    return JSONResponse(_answer(http, request, head))


class _EventCallback(Callback):
    """Send events as (name, data).

    Lengths are sent with the first tokens: before that, the request may still be refused.
    """

    def __init__(self, send: Send) -> None:
        self.send = send
        self.chosen: list[dict[str, Any]] = []

    def __call__(self, tokens: list[Token]) -> None:
        for lengths in self.chosen:
            self.send(("lengths", lengths))
        self.chosen = []
        for token in tokens:
            data = token.to_dict()
            del data["text"]  # number of the text; a request has only one
            self.send(("token", data))

    def lengths(self, text: int, sample: int, lengths: tuple[int, ...]) -> None:
        self.chosen.append({"sample": sample, "lengths": list(lengths)})


async def _events(
    http: Request, request: QueuedRequest[list[Infilled]], head: dict[str, Any]
) -> AsyncIterator[bytes]:
    yield event({name: head[name] for name in ("id", "model", "seed")}, "start")
    try:
        async for name, data in request:
            yield event(data, name)
        yield event(_answer(http, request, head), "result")
    except ApiError as problem:
        yield event(body_of(problem, "/v1/infill")[1], "error")


def _answer(
    http: Request, request: QueuedRequest[list[Infilled]], head: dict[str, Any]
) -> dict[str, Any]:
    """Return the whole answer, and record the request."""
    results = request.result
    filled = [sum(len(span.token_ids) for span in result.spans) for result in results]
    usage = usage_of(len(results[0].token_ids) - filled[0], sum(filled))
    service_of(http).count(http, request, usage)
    return {
        **head,
        "results": [result.to_dict() for result in results],
        "usage": usage,
        "timings": request.timings(sum(filled)),
    }


class ScoreBody(Strict):
    """Fields of `/v1/score`."""

    text: Text = Field(
        description=(
            "text with the parts to score in [[...]]; without marks the whole text is scored, "
            "from left to right if no mode is given"
        )
    )
    mode: ModelName | None = None
    whole: bool = True
    top: NotNegative = 0
    model: ModelName | None = None
    timeout: float | None = Timeout


@router.post("/v1/score", summary="Score the marked parts of a text, or all of it")
async def score(http: Request, body: ScoreBody) -> Response:
    """Return log-probabilities of the marked parts of a text, or of all of it."""
    service = service_of(http)
    model, limits = service.model_name(body.model), service.settings.limits
    service.check_limit("top", body.top, limits.top)
    mode = body.mode
    try:
        if not body.text:
            raise ValueError("the text is empty; there is nothing to score")
        template = parse(body.text, required=False)
    except ValueError as mistake:
        raise ApiError(400, str(mistake), param="text") from mistake
    if not template.contents:
        template = Template(("", ""), template.pieces)
        mode = mode or ("ar" if "ar" in service.backend.lm.model.config.modes else None)
    service.check_limit("blanks", len(template.contents), limits.blanks)
    request = service.start(
        http,
        lambda lm, _: lm.score(template, mode=mode, whole=body.whole, top=body.top),
        body.timeout,
    )
    scored = await request.done()
    usage = usage_of(scored.tokens, 0)
    service.count(http, request, usage)
    return JSONResponse({"object": "score", "model": model, **scored.to_dict(), "usage": usage})


class TokenizeBody(Strict):
    """Fields of `/v1/tokenize`."""

    text: Text
    inside: bool = Field(False, description="the text follows other text")


@router.post("/v1/tokenize", summary="Tokenize a text")
async def tokenize(http: Request, body: TokenizeBody) -> Response:
    """Return the tokens of a text."""

    def tokens(lm: LanguageModel, _: Send) -> list[dict[str, Any]]:
        return [
            {"id": token, "text": lm.spelling.token(token, first=i == 0 and not body.inside)}
            for i, token in enumerate(lm.tokenizer.encode(body.text, body.inside))
        ]

    request = service_of(http).start(http, tokens)
    return JSONResponse({"tokens": await request.done()})
