"""Our own protocol: texts with blanks of any length, scores, tokens.

A field that it does not know is refused.
"""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import JSONResponse, Response

from tracformer.generation.options import parse_search
from tracformer.generation.orders import Order, parse_order
from tracformer.generation.results import Callback, Infilled, Token
from tracformer.generation.samplers import Sampler
from tracformer.generation.template import Template, parse, parse_lengths
from tracformer.server import completion as sse
from tracformer.server.errors import ApiError, body_of
from tracformer.server.queue import Job, Tell
from tracformer.server.schema import Count, Limits, Name, Seed, Strict, Text, TokenId
from tracformer.server.service import Service, service_of, usage_of

router = APIRouter()
Tokens = Annotated[int, Field(ge=1, le=2**20)]


class Range(Strict):
    min: Tokens = 1
    max: Tokens


class Blank(Strict):
    """So many tokens; as many as a range allows; or null: the model chooses."""

    blank: Tokens | Range | None


class InfillRequest(Strict):
    text: Text | None = Field(
        None,
        description="with blanks: [[]], [[8]] or [[3-8]]; \\[[ writes the characters themselves",
    )
    segments: list[Text | Blank] | None = Field(
        None, description="instead of `text`: literal strings and blanks in turn"
    )
    n: Count = 1
    mode: Name | None = None
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
    banned: list[TokenId] = Field(default_factory=list)
    allowed: list[TokenId] = Field(default_factory=list)
    required: list[TokenId] = Field(default_factory=list)
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
    model: Name | None = None
    timeout: float | None = Field(None, gt=0, le=10**6)

    @model_validator(mode="after")
    def one_of_two(self) -> "InfillRequest":
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
            service.within(name, getattr(self, name), getattr(limits, name))
        service.within("blanks", len(template.contents), limits.blanks)
        service.within("max_blank", self.max_blank, limits.blank_tokens)
        for low, high in map(parse_lengths, template.contents):
            if high not in (low, None):  # a length to be chosen
                service.within("blank", high, limits.blank_tokens)
        if self.search is not None:
            method, number = parse_search(self.search)
            service.within("search", number, limits.beam if method == "beam" else limits.nodes)


@router.post("/v1/infill", summary="Fill the blanks of a text")
async def infill(http: Request, asked: InfillRequest) -> Response:
    service = service_of(http)
    desk, name = service.desk, service.named(asked.model)
    seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
    try:
        template = asked.template()
        asked.check(service, template)
        sampler, order = asked.sampler(), asked.turns()
    except ValueError as mistake:
        raise ApiError(400, str(mistake)) from mistake
    job = desk.start(
        http,
        lambda lm, tell: lm.infill(
            template,
            asked.n,
            mode=asked.mode,
            sampler=sampler,
            seed=seed,
            order=order,
            best_of=asked.best_of,
            search=asked.search,
            reread=asked.reread,
            whole=asked.whole,
            max_blank=asked.max_blank,
            lengths=asked.lengths,
            length_draws=asked.length_draws,
            top=asked.top,
            # of the first token only
            callback=_Listener(tell) if asked.stream else lambda _: tell(None),
        ),
        service.seconds(asked.timeout),
    )
    head = {
        "object": "infill",
        "id": f"infill-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": name,
        "seed": seed,
    }
    if asked.stream:
        return await sse.answer(job, _events(http, job, head))
    await job.done()
    return JSONResponse(_whole(http, job, head))


class _Listener(Callback):
    """Tells of everything by the event's name and its data; of lengths with the first tokens, when
    nothing can be refused any more.
    """

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.chosen: list[dict[str, Any]] = []

    def __call__(self, arrivals: list[Token]) -> None:
        for lengths in self.chosen:
            self.tell(("lengths", lengths))
        self.chosen = []
        for arrival in arrivals:
            told = arrival.to_dict()
            del told["text"]  # there is one
            self.tell(("token", told))

    def lengths(self, text: int, sample: int, lengths: tuple[int, ...]) -> None:
        self.chosen.append({"sample": sample, "lengths": list(lengths)})


async def _events(
    http: Request, job: Job[list[Infilled]], head: dict[str, Any]
) -> AsyncIterator[bytes]:
    yield sse.event({name: head[name] for name in ("id", "model", "seed")}, "start")
    try:
        async for name, told in job:
            yield sse.event(told, name)
        yield sse.event(_whole(http, job, head), "result")
    except ApiError as problem:
        yield sse.event(body_of(problem, "/v1/infill")[1], "error")


def _whole(http: Request, job: Job[list[Infilled]], head: dict[str, Any]) -> dict[str, Any]:
    filled = [sum(len(span.token_ids) for span in result.spans) for result in job.result]
    usage = usage_of(len(job.result[0].token_ids) - filled[0], sum(filled))
    service_of(http).count(http, job, usage)
    results = [result.to_dict() for result in job.result]
    return {**head, "results": results, "usage": usage, "timings": job.timings(sum(filled))}


class ScoreRequest(Strict):
    text: Text = Field(
        description=(
            "with what is to be scored in [[...]]; without marks all of it, from left to right if "
            "no mode is named"
        )
    )
    mode: Name | None = None
    whole: bool = True
    top: int = Field(0, ge=0, le=2**20)
    model: Name | None = None
    timeout: float | None = Field(None, gt=0, le=10**6)


@router.post(
    "/v1/score", summary="The log-probability of the marked parts of a text, or of all of it"
)
async def score(http: Request, asked: ScoreRequest) -> Response:
    service = service_of(http)
    desk, name = service.desk, service.named(asked.model)
    service.within("top", asked.top, service.settings.limits.top)
    try:
        if not asked.text:
            raise ValueError("the text is empty; there is nothing to score")
        template, mode = parse(asked.text, required=False), asked.mode
    except ValueError as mistake:
        raise ApiError(400, str(mistake), param="text") from mistake
    if not template.contents:
        template = Template(("", ""), template.pieces)
        mode = asked.mode or ("ar" if "ar" in desk.lm.model.config.modes else None)
    service.within("blanks", len(template.contents), service.settings.limits.blanks)
    job = desk.start(
        http,
        lambda lm, _: lm.score(template, mode=mode, whole=asked.whole, top=asked.top),
        service.seconds(asked.timeout),
    )
    scored = await job.done()
    usage = usage_of(scored.tokens, 0)
    service.count(http, job, usage)
    return JSONResponse({"object": "score", "model": name, **scored.to_dict(), "usage": usage})


class TokenizeRequest(Strict):
    text: Text
    inside: bool = False  # does it stand behind other text?


@router.post("/v1/tokenize", summary="The tokens of a text")
async def tokenize(http: Request, asked: TokenizeRequest) -> Response:
    service = service_of(http)
    desk = service.desk
    job = desk.start(
        http,
        lambda lm, _: [
            {"id": token, "text": lm.spelling.token(token, first=i == 0 and not asked.inside)}
            for i, token in enumerate(lm.tokenizer.encode(asked.text, asked.inside))
        ],
        service.seconds(None),
    )
    return JSONResponse({"tokens": await job.done()})
