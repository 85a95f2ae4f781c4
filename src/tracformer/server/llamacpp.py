"""llama.cpp's `/infill`, which editor plugins for local models use."""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from tracformer.generation.language_model import LanguageModel
from tracformer.generation.samplers import Sampler
from tracformer.server.completion import (
    DEFAULT_TOKENS,
    Choice,
    Completion,
    CompletionOptions,
    Prompt,
    read_prompt,
    unset,
)
from tracformer.server.queue import QueuedRequest
from tracformer.server.schema import (
    LARGEST_INT,
    Lenient,
    NotNegative,
    Several,
    ShortText,
    StopStrings,
    Text,
    as_tuple,
)
from tracformer.server.streaming import CompletionToken

router = APIRouter()
MISSING = object()


class ExtraText(Lenient):
    """Text of another file, as context."""

    text: Text
    filename: Text | None = None


class LlamaCppRequest(Lenient):
    """Fields of llama.cpp's `/infill`, with llama.cpp's defaults."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Several[ExtraText] = Field(default_factory=list)
    prompt: Text = Field("", description="the beginning of the text to fill in")
    n_predict: Annotated[int, Field(ge=-2, le=LARGEST_INT)] = -1
    temperature: float = Field(0.8, le=100)
    top_k: Annotated[int, Field(ge=-(2**31), le=LARGEST_INT)] = 40
    top_p: float = Field(0.95, ge=0, le=1)
    min_p: float = Field(0.05, ge=0, le=1)
    repeat_penalty: float = Field(1.0, gt=0, le=100)
    seed: Annotated[int, Field(ge=-(2**31), lt=2**63)] = -1
    stop: StopStrings | None = None
    n_probs: NotNegative = 0
    stream: bool = False
    response_fields: Several[ShortText] | None = None
    return_tokens: bool = False
    model: ShortText | None = None

    def options(self) -> CompletionOptions:
        """Return what to generate; zero and less switch a sampler off, as in llama.cpp."""
        return CompletionOptions(
            suffix=self.input_suffix,
            max_tokens=self.n_predict if self.n_predict >= 0 else DEFAULT_TOKENS,
            sampler=Sampler(
                temperature=max(self.temperature, 0.0),
                top_k=max(self.top_k, 0),
                top_p=self.top_p or 1e-6,
                min_p=self.min_p,
                repetition_penalty=self.repeat_penalty,
            ),
            unset=unset(self),
            stop=as_tuple(self.stop),
            top=self.n_probs,
        )


class LlamaCppCompletion(Completion):
    """A completion in the shape of llama.cpp's server."""

    path = "/infill"
    top_field = "n_probs"
    end_mark = b""

    def __init__(self, http: Request, body: LlamaCppRequest) -> None:
        seed = None if body.seed < 0 else body.seed
        self.prompt = body.input_prefix + body.prompt
        super().__init__(http, body.model, [self.prompt], body.options(), seed, body.stream)
        self.service.check_limit(
            "input_extra", len(body.input_extra), self.service.settings.limits.prompts
        )
        self.body = body
        self.truncated = False  # texts of `input_extra` were left out
        self.sent = 0  # streamed tokens

    def read_prompts(self, lm: LanguageModel) -> list[Prompt]:
        self.prompt = self._with_extra(lm)
        return [read_prompt(lm, self.prompt)]

    def answer(self, request: QueuedRequest[list[Choice]], usage: dict[str, int]) -> dict[str, Any]:
        [choice] = request.result
        tokens = [token.token_id for token in choice.tokens] if self.body.return_tokens else []
        return self._select(
            self._final(request, choice, choice.text, tokens) | self._probabilities(choice.tokens)
        )

    def chunk(
        self, index: int, text: str, tokens: Sequence[CompletionToken], base: int
    ) -> dict[str, Any]:
        self.sent += len(tokens)
        return {
            "index": 0,
            "content": text,
            "tokens": [token.token_id for token in tokens],
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self.sent,
            "tokens_evaluated": self.prompt_tokens,
            **self._probabilities(tokens),
        }

    def closing(
        self, request: QueuedRequest[list[Choice]], usage: dict[str, int]
    ) -> list[dict[str, Any]]:
        [choice] = request.result
        return [self._select(self._final(request, choice, "", []))]

    def _final(
        self,
        request: QueuedRequest[list[Choice]],
        choice: Choice,
        content: str,
        tokens: list[int],
    ) -> dict[str, Any]:
        """Return the fields of the whole answer and of the last event."""
        if choice.stopped is not None:
            stop_type = "word"
        else:
            stop_type = "eos" if choice.finish == "stop" else "limit"
        return {
            "index": 0,
            "content": content,
            "tokens": tokens,
            "id_slot": 0,
            "stop": True,
            "model": self.model,
            "tokens_predicted": choice.generated,
            "tokens_evaluated": self.prompt_tokens,
            "generation_settings": self._settings(),
            "prompt": self.prompt,
            "has_new_line": "\n" in choice.text,
            "truncated": self.truncated,
            "stop_type": stop_type,
            "stopping_word": choice.stopped or "",
            "tokens_cached": 0,
            "timings": self._timings(request, choice.generated),
        }

    def _select(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the client chose, or all.

        A slash leads into an inner object; the whole path is then the name of the field. Paths that
        do not exist are left out.
        """
        if self.body.response_fields is None:
            return answer
        found: dict[str, Any] = {}
        for path in self.body.response_fields:
            value: Any = answer
            for part in path.split("/"):
                value = value.get(part, MISSING) if isinstance(value, dict) else MISSING
            if value is not MISSING:
                found[path] = value
        return found

    def _with_extra(self, lm: LanguageModel) -> str:
        """Return the prompt after the texts of other files, the last of them nearest to it.

        Texts that do not fit are left out, the first ones first.
        """
        if not self.body.input_extra:
            return self.prompt

        def count(text: str) -> int:
            return len(lm.tokenizer.encode(text))

        longest, text = lm.model.config.max_length, self.prompt
        room = longest - count(text) - count(self.options.suffix)
        room -= min(self.options.max_tokens, longest // 2)
        for extra in reversed(self.body.input_extra):
            room -= count(extra.text + "\n")
            if room < 0:
                self.truncated = True
                break
            text = f"{extra.text}\n{text}"
        return text

    def _settings(self) -> dict[str, Any]:
        sampler = self.options.sampler
        return {
            "n_predict": self.body.n_predict,
            "seed": self.seeds[0],
            "temperature": sampler.temperature,
            "top_k": sampler.top_k,
            "top_p": sampler.top_p,
            "min_p": sampler.min_p,
            "repeat_penalty": sampler.repetition_penalty,
            "stop": list(self.options.stop),
            "max_tokens": self.body.n_predict,
            "n_probs": self.body.n_probs,
            "stream": self.body.stream,
        }

    def _timings(self, request: QueuedRequest[list[Choice]], generated: int) -> dict[str, Any]:
        """Return llama.cpp's timings; reading the prompt ends with the first token, if any."""
        first = request.first or request.ended
        return {
            **_pace("prompt", self.prompt_tokens, first - request.started),
            **_pace("predicted", generated, request.ended - first),
        }

    def _probabilities(self, tokens: Sequence[CompletionToken]) -> dict[str, Any]:
        if not self.options.top:
            return {}
        found = [
            {
                **self._token(token.token_id, token.log_prob),
                "top_logprobs": [
                    self._token(each.token_id, each.log_prob) for each in token.candidates
                ],
            }
            for token in tokens
        ]
        return {"completion_probabilities": found}

    def _token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        return {
            "id": token_id,
            "token": self.names.lm.spelling.token(token_id),
            "bytes": list(self.names.raw(token_id)),
            "logprob": log_prob,
        }


@router.post(LlamaCppCompletion.path, summary="llama.cpp's infill")
async def infill(http: Request, body: LlamaCppRequest) -> Response:
    """Fill the text between prefix and suffix."""
    return await LlamaCppCompletion(http, body).respond()


def _pace(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(seconds * 1000, 3),
        f"{name}_per_token_ms": round(seconds * 1000 / tokens, 3) if tokens else None,
        f"{name}_per_second": round(tokens / seconds, 3) if seconds > 0 else None,
    }
