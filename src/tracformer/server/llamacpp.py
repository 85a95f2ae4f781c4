"""llama.cpp's `/infill`: what editors' plugins for local models speak."""

import secrets
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from tracformer.generation.language_model import LanguageModel
from tracformer.generation.samplers import Sampler
from tracformer.server import completion as sse
from tracformer.server.completion import Piece, Wish, Written, read_prompt, write_on
from tracformer.server.errors import ApiError, body_of
from tracformer.server.queue import Job, Names, Tell
from tracformer.server.schema import Lenient, Name, Stops, Text, listed
from tracformer.server.service import Service, service_of, usage_of

router = APIRouter()
PATH = "/infill"
UNLIMITED = 32  # tokens, where a client names no number or asks for as many as there may be


class Extra(Lenient):
    text: Text
    filename: Text | None = None


class InfillRequest(Lenient):
    """The defaults are llama.cpp's."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: list[Extra] = Field(default_factory=list)
    prompt: Text = Field("", description="the beginning of what is filled in")
    n_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] = -1
    temperature: float = Field(0.8, le=100)
    top_k: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] = 40
    top_p: float = Field(0.95, ge=0, le=1)
    min_p: float = Field(0.05, ge=0, le=1)
    repeat_penalty: float = Field(1.0, gt=0, le=100)
    seed: Annotated[int, Field(ge=-(2**31), lt=2**63)] = -1
    stop: Stops | None = None
    n_probs: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    stream: bool = False
    response_fields: list[Name] | None = None
    return_tokens: bool = False
    model: Name | None = None

    @property
    def most(self) -> int:
        return self.n_predict if self.n_predict >= 0 else UNLIMITED

    def sampler(self) -> Sampler:
        """What llama.cpp switches off with zero or less is off here."""
        return Sampler(
            temperature=max(self.temperature, 0.0),
            top_k=max(self.top_k, 0),
            top_p=self.top_p or 1e-6,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
        )


@router.post(PATH, summary="llama.cpp's infill")
async def infill(http: Request, asked: InfillRequest) -> Response:
    service = service_of(http)
    task = Infill(asked, service, service.named(asked.model))
    job = service.desk.start(http, task.run, service.seconds(None))
    if asked.stream:
        return await sse.answer(job, task.events(http, job))
    await job.done()
    return JSONResponse(task.whole(http, job, streamed=False))


class Infill:
    """One request, from its fields to its answer."""

    def __init__(self, asked: InfillRequest, service: Service, name: str) -> None:
        limits = service.settings.limits
        self.asked, self.name, self.names = asked, name, service.desk.names
        self.stop = listed(asked.stop)
        service.within("stop", len(self.stop), limits.stops)
        service.within("n_probs", asked.n_probs, limits.top)
        service.within("input_extra", len(asked.input_extra), limits.prompts)
        self.most = min(asked.most, limits.blank_tokens) if asked.input_suffix else asked.most
        self.seed = secrets.randbelow(2**31) if asked.seed < 0 else asked.seed
        self.sampler = asked.sampler()
        self.prompt = asked.input_prefix + asked.prompt
        self.truncated = False
        self.evaluated = 0  # tokens of what is given
        self.told = 0  # tokens that were streamed

    def run(self, lm: LanguageModel, tell: Tell) -> Written:
        """In the worker's thread."""
        self.prompt = self._with_extra(lm)
        self.evaluated = len(read_prompt(lm, self.prompt).ids) + len(
            lm.tokenizer.encode(self.asked.input_suffix, inside=True)
        )
        if self.most == 0:
            return Written("", (), len(self.prompt), 0, "length")
        wish = Wish(
            self.prompt,
            self.asked.input_suffix,
            most=self.most,
            sampler=self.sampler,
            seed=self.seed,
            stop=self.stop,
            top=self.asked.n_probs,
        )

        def told(_: int, text: str, pieces: list[Piece]) -> bool:
            return tell((text, pieces) if self.asked.stream else None)

        return write_on(lm, wish, told)[0]

    async def events(self, http: Request, job: Job[Written]) -> AsyncIterator[bytes]:
        try:
            async for text, pieces in job:
                self.told += len(pieces)
                yield sse.event(
                    {
                        "index": 0,
                        "content": text,
                        "tokens": [piece.token_id for piece in pieces],
                        "stop": False,
                        "id_slot": 0,
                        "tokens_predicted": self.told,
                        "tokens_evaluated": self.evaluated,
                        **self._probabilities(pieces),
                    }
                )
            yield sse.event(self.whole(http, job, streamed=True))
        except ApiError as problem:
            yield sse.event(body_of(problem, PATH)[1])

    def whole(self, http: Request, job: Job[Written], streamed: bool) -> dict[str, Any]:
        written = job.result
        service_of(http).count(http, job, usage_of(self.evaluated, written.generated))
        answer = {
            "index": 0,
            "content": "" if streamed else written.text,
            "tokens": [piece.token_id for piece in written.pieces]
            if self.asked.return_tokens and not streamed
            else [],
            "id_slot": 0,
            "stop": True,
            "model": self.name,
            "tokens_predicted": written.generated,
            "tokens_evaluated": self.evaluated,
            "generation_settings": self._settings(),
            "prompt": self.prompt,
            "has_new_line": "\n" in written.text,
            "truncated": self.truncated,
            "stop_type": "word"
            if written.stopped is not None
            else "eos"
            if written.finish == "stop"
            else "limit",
            "stopping_word": written.stopped or "",
            "tokens_cached": 0,
            "timings": self._timings(job),
            **({} if streamed else self._probabilities(written.pieces)),
        }
        return (
            answer
            if self.asked.response_fields is None
            else chosen(answer, self.asked.response_fields)
        )

    def _with_extra(self, lm: LanguageModel) -> str:
        """Texts of other files go before the prefix, the last of them nearest; those that find no
        room are left out.
        """
        if not self.asked.input_extra:
            return self.prompt
        wanted = min(self.most, lm.model.config.max_length // 2)
        text, count = self.prompt, lambda text: len(lm.tokenizer.encode(text))
        room = (
            lm.model.config.max_length
            - count(self.prompt)
            - count(self.asked.input_suffix)
            - wanted
        )
        for extra in reversed(self.asked.input_extra):
            room -= count(extra.text + "\n")
            if room < 0:
                self.truncated = True
                break
            text = f"{extra.text}\n{text}"
        return text

    def _settings(self) -> dict[str, Any]:
        sampler = self.sampler
        return {
            "n_predict": self.asked.n_predict,
            "seed": self.seed,
            "temperature": sampler.temperature,
            "top_k": sampler.top_k,
            "top_p": sampler.top_p,
            "min_p": sampler.min_p,
            "repeat_penalty": sampler.repetition_penalty,
            "stop": list(self.stop),
            "max_tokens": self.asked.n_predict,
            "n_probs": self.asked.n_probs,
            "stream": self.asked.stream,
        }

    def _timings(self, job: Job[Written]) -> dict[str, Any]:
        """Reading the prompt ends with the first token; a request without any spends
        all its time on it.
        """
        first = job.first or job.ended
        return {
            **_pace("prompt", self.evaluated, first - job.started),
            **_pace("predicted", job.result.generated, job.ended - first),
        }

    def _probabilities(self, pieces: "list[Piece] | tuple[Piece, ...]") -> dict[str, Any]:
        if not self.asked.n_probs:
            return {}
        told = [
            {
                **_token(self.names, piece.token_id, piece.log_prob),
                "top_logprobs": [
                    _token(self.names, each.token_id, each.log_prob) for each in piece.candidates
                ],
            }
            for piece in pieces
        ]
        return {"completion_probabilities": told}


def chosen(answer: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    """These fields alone; a slash leads into an inner object, and the whole path is the field's
    name. What is not there is left out.
    """
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for part in path.split("/"):
            value = value.get(part, _NOTHING) if isinstance(value, dict) else _NOTHING
        if value is not _NOTHING:
            found[path] = value
    return found


_NOTHING = object()


def _token(names: Names, token_id: int, log_prob: float) -> dict[str, Any]:
    return {
        "id": token_id,
        "token": names.lm.spelling.token(token_id),
        "bytes": list(names.raw(token_id)),
        "logprob": log_prob,
    }


def _pace(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_token_ms": round(seconds * 1000 / tokens, 3) if tokens else None,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds > 0 else None,
    }
