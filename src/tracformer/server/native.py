"""Our own protocol: texts with blanks of any length, scores, tokens. Fields it does not know are refused."""

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from starlette.responses import JSONResponse, Response

from tracformer.generation.blanks import write
from tracformer.generation.orders import Order, parse_order
from tracformer.generation.results import Arrival, Infilled
from tracformer.generation.samplers import Sampler
from tracformer.server import sse
from tracformer.server.errors import Problem, body_of
from tracformer.server.jobs import Job
from tracformer.server.service import Service, service_of

router = APIRouter()
SEEDS = 2**53  # JSON's integers, as JavaScript reads them


def plain_text(text: str) -> str:
    if "\0" in text:
        raise ValueError(f"character {text.index(chr(0))} is NUL, which is not text")
    return text


Text = Annotated[str, AfterValidator(plain_text)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Range(Strict):
    min: int = Field(1, ge=1, le=2**20)
    max: int = Field(ge=1, le=2**20)


class Blank(Strict):
    """So many tokens; as many as a range allows; or null: the model chooses."""

    blank: Annotated[int, Field(ge=1, le=2**20)] | Range | None


class InfillRequest(Strict):
    text: Text | None = Field(None, description="with blanks: [[]], [[8]] or [[3-8]]; \\[[ writes the characters themselves")
    segments: list[Text | Blank] | None = Field(None, description="instead of `text`: literal strings and blanks in turn")
    n: int = Field(1, ge=1)
    mode: str | None = None
    order: Literal["left-to-right", "random", "probability", "entropy", "margin", "ancestral"] | None = None
    k: int = Field(1, ge=1, le=2**20, description="tokens a step")
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(0, ge=0, le=2**31)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    no_repeat_ngram: int = Field(0, ge=0, le=2**20)
    seed: int | None = Field(None, ge=0, lt=SEEDS, description="null: drawn, and told in the answer")
    best_of: int = Field(0, ge=0)
    search: str | None = Field(None, max_length=40, description="beam:WIDTH or best-first:BUDGET")
    whole: bool = Field(True, description="the text is a whole document, not a fragment")
    max_blank: int = Field(32, ge=1)
    lengths: Literal["sample", "rank"] = "sample"
    length_draws: int = Field(8, ge=2)
    top: int = Field(0, ge=0, description="candidates to tell of each token")
    stream: bool = False
    model: str | None = None
    timeout: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def one_of_two(self) -> "InfillRequest":
        if (self.text is None) == (self.segments is None):
            raise ValueError("give either text or segments")
        return self

    @property
    def marked(self) -> str:
        """The text with its blanks."""
        if self.segments is None:
            assert self.text is not None
            return self.text
        pieces, contents = [""], []
        for segment in self.segments:
            if isinstance(segment, str):
                pieces[-1] += segment
            else:
                blank = segment.blank
                contents.append("" if blank is None else str(blank) if isinstance(blank, int) else f"{blank.min}-{blank.max}")
                pieces.append("")
        return write(pieces, contents)

    @property
    def sampler(self) -> Sampler:
        return Sampler(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            no_repeat_ngram=self.no_repeat_ngram,
        )

    @property
    def turns(self) -> Order | None:
        if self.order is None:
            return parse_order("left-to-right", self.k) if self.k > 1 else None
        return parse_order(self.order, self.k)


@router.post("/v1/infill")
async def infill(http: Request, asked: InfillRequest) -> Response:
    service = service_of(http)
    name = service.named(asked.model)
    seed = secrets.randbelow(2**31) if asked.seed is None else asked.seed
    options: dict[str, Any] = {
        "n": asked.n,
        "mode": asked.mode,
        "sampler": asked.sampler,
        "seed": seed,
        "order": asked.turns,
        "best_of": asked.best_of,
        "search": asked.search,
        "whole": asked.whole,
        "max_blank": asked.max_blank,
        "lengths": asked.lengths,
        "length_draws": asked.length_draws,
    }
    job = service.desk.start(http, lambda lm, watch: lm.infill(asked.marked, **options, watch=watch), service.seconds(asked.timeout))
    head = {"object": "infill", "id": f"infill-{secrets.token_hex(12)}", "created": int(time.time()), "model": name, "seed": seed}
    if asked.stream:
        return sse.answer(_events(job, head))
    await job.done()
    return JSONResponse(_whole(job, head))


async def _events(job: Job[list[Infilled]], head: dict[str, Any]) -> AsyncIterator[bytes]:
    yield sse.event({name: head[name] for name in ("id", "model", "seed")}, "start")
    try:
        async for arrivals in job:
            for arrival in arrivals:
                yield sse.event(_told(arrival), "token")
        yield sse.event(_whole(job, head), "result")
    except Problem as problem:
        yield sse.event(body_of(problem, "/v1/infill")[1], "error")


def _told(arrival: Arrival) -> dict[str, Any]:
    told = arrival.to_dict()
    del told["text"]
    return {"draft": False, "candidates": [], **told}


def _whole(job: Job[list[Infilled]], head: dict[str, Any]) -> dict[str, Any]:
    filled = sum(len(span.token_ids) for result in job.result for span in result.spans)
    first = job.result[0]
    given = len(first.token_ids) - sum(len(span.token_ids) for span in first.spans)
    return {
        **head,
        "results": [result.to_dict() for result in job.result],
        "usage": {"prompt_tokens": given, "completion_tokens": filled, "total_tokens": given + filled},
        "timings": job.timings(filled),
    }


class ScoreRequest(Strict):
    text: Text
    mode: str | None = None
    whole: bool = True
    top: int = Field(0, ge=0)
    model: str | None = None
    timeout: float | None = Field(None, gt=0)


@router.post("/v1/score")
async def score(http: Request, asked: ScoreRequest) -> Response:
    service = service_of(http)
    name = service.named(asked.model)
    text, mode = (asked.text, asked.mode) if "[[" in asked.text else (write(["", ""], [asked.text]), "ar")
    job = service.desk.start(http, lambda lm, _: lm.score(text, mode=mode, whole=asked.whole), service.seconds(asked.timeout))
    scored = await job.done()
    usage = {"prompt_tokens": scored.tokens, "completion_tokens": 0, "total_tokens": scored.tokens}
    return JSONResponse({"object": "score", "model": name, **scored.to_dict(), "usage": usage})


class TokenizeRequest(Strict):
    text: Text


@router.post("/v1/tokenize")
async def tokenize(http: Request, asked: TokenizeRequest) -> Response:
    lm = service_of(http).desk.lm
    try:
        ids = lm.tokenizer.encode(asked.text)
    except ValueError as mistake:
        raise Problem(400, str(mistake), param="text") from mistake
    return JSONResponse({"tokens": [{"id": i, "text": lm.spelling.token(i)} for i in ids]})
