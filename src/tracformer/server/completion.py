"""Completions of a prompt, shared by the protocols of OpenAI, llama.cpp and Mistral.

- `Completion` is one request: checks, run, streamed events, usage. A protocol adds its fields and
  its renderers.
- `complete` generates the choices of one prompt. Without a suffix the model continues the prompt in
  mode `ar` until the end of text. With one it fills a blank of unknown length between prompt and
  suffix. Brackets in a prompt are text, never blanks.
- A sampler's option that the client leaves out takes the model's setting: see
  `GenerationConfig.sampling`. Completions are streamed, so they are never of quality `best`.
- `length_prior` weighs the lengths of that blank.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from fastapi import Request as HttpRequest
from pydantic import BaseModel
from starlette.responses import Response

from tracformer.generation.continuation import around, prompted
from tracformer.generation.language_model import LanguageModel
from tracformer.generation.results import Callback, Candidates, Token
from tracformer.generation.samplers import PLAIN, Sampler
from tracformer.server.queue import QueuedRequest, Send, service_of, usage_of
from tracformer.server.schema import ApiError, body_of
from tracformer.server.streaming import (
    DONE,
    CompletionToken,
    PartialText,
    TokenNames,
    answer_json,
    event,
    stream_events,
)

LENGTHS = 12  # lengths of a blank that are compared
LENGTH_DRAWS = 4  # samples from which the mass of each length is estimated
DEFAULT_TOKENS = 32  # where a client of llama.cpp or Mistral sets no limit


@dataclass(frozen=True)
class CompletionOptions:
    """What a request asks for, independent of its protocol."""

    suffix: str = ""
    min_tokens: int = 0  # only with a suffix
    max_tokens: int = 16
    n: int = 1  # choices for each prompt
    best_of: int = 0  # samples from which the n choices are taken, if more than n
    sampler: Sampler = PLAIN
    unset: frozenset[str] = frozenset()  # fields of the sampler that take the model's settings
    stop: tuple[str, ...] = ()
    top: int = 0  # candidates of each token
    whole: bool = False  # the suffix ends the document
    echo: bool = False  # repeat the prompt
    score_prompt: bool = False  # log-probabilities of the prompt's tokens

    @property
    def samples(self) -> int:
        """Number of samples to draw for each prompt."""
        return max(self.n, self.best_of)


def unset(request: BaseModel) -> frozenset[str]:
    """Return which of temperature and top_p a client left out or sent as null."""
    return frozenset(
        name
        for name in ("temperature", "top_p")
        if name not in request.model_fields_set or getattr(request, name) is None
    )


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it."""

    source: str | tuple[int, ...]
    text: str
    ids: tuple[int, ...]
    base: int  # where the generated text begins: before the prompt's last space if that moved there

    @property
    def skip(self) -> int:
        """Number of the prompt's characters that moved into the generated text."""
        return len(self.text) - self.base


@dataclass(frozen=True)
class Choice:
    """A prompt and what was generated after it.

    `text` stands between prompt and suffix, and ends before a stop string.
    """

    prompt: Prompt
    scored: tuple[CompletionToken, ...] = ()  # the prompt's tokens, if they were scored
    text: str = ""
    tokens: tuple[CompletionToken, ...] = ()
    generated: int = 0  # tokens, those after a stop string included
    finish: str = "length"  # or "stop": the text or the blank came to its end
    stopped: str | None = None  # the stop string that was found

    @property
    def mean_log_prob(self) -> float:
        """Mean log-probability of a token, by which `best_of` ranks."""
        return sum(token.log_prob for token in self.tokens) / max(1, len(self.tokens))


class Completion(ABC):
    """One completion request, from its checks to its answer.

    A protocol's subclass names its path and renders the answer: `answer` as a whole, `chunk` and
    `closing` as events of a stream.

    Args:
        http: The HTTP request.
        model: Name of the model that the client asks for.
        prompts: Texts or token ids to complete.
        options: What to generate.
        seed: Random seed, for each prompt; None draws one for each.
        stream: Send events instead of one answer.

    Raises:
        ApiError: The model is unknown or still loading, or a limit is exceeded.
    """

    path: ClassVar[str]  # decides the shape of errors
    top_field: ClassVar[str] = "logprobs"  # the field that sets `CompletionOptions.top`
    end_mark: ClassVar[bytes] = DONE  # of a stream

    def __init__(
        self,
        http: HttpRequest,
        model: str | None,
        prompts: Sequence[str | tuple[int, ...]],
        options: CompletionOptions,
        seed: int | None,
        stream: bool,
    ) -> None:
        self.http, self.service, self.stream = http, service_of(http), stream
        self.model = self.service.model_name(model)
        self.names = TokenNames(self.service.backend.lm)
        settings = self.service.backend.lm.generation.sampling
        ours: dict[str, Any] = {
            name: value for name, value in settings.items() if name in options.unset
        }
        options = replace(options, sampler=replace(options.sampler, **ours))
        limits = self.service.settings.limits
        for name, value, limit in (
            ("n", options.n, limits.n),
            ("best_of", options.samples, limits.best_of),
            ("prompt", len(prompts), limits.prompts),
            ("prompt times best_of", len(prompts) * options.samples, limits.samples),
            (self.top_field, options.top, limits.top),
            ("stop", len(options.stop), limits.stops),
        ):
            self.service.check_limit(name, value, limit)
        if options.suffix:
            options = replace(options, max_tokens=min(options.max_tokens, limits.blank_tokens))
        if options.min_tokens > options.max_tokens:
            raise ApiError(
                400,
                f"min_tokens is {options.min_tokens}; the most here is {options.max_tokens}",
                param="min_tokens",
            )
        self.prompts, self.options = prompts, options
        self.seeds = [secrets.randbelow(2**31) if seed is None else seed for _ in prompts]
        self.prompt_tokens = 0  # of all prompts and suffixes

    @abstractmethod
    def answer(self, request: QueuedRequest[list[Choice]], usage: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer."""

    @abstractmethod
    def chunk(
        self, index: int, text: str, tokens: Sequence[CompletionToken], base: int
    ) -> dict[str, Any]:
        """Return the event of new text; called in the worker thread.

        Args:
            index: Number of the choice.
            text: The new text.
            tokens: The new tokens.
            base: Where the text starts that the tokens' `start` counts from.
        """

    @abstractmethod
    def closing(
        self, request: QueuedRequest[list[Choice]], usage: dict[str, int]
    ) -> list[dict[str, Any]]:
        """Return the events after all text was sent."""

    def read_prompts(self, lm: LanguageModel) -> list[Prompt]:
        """Return the prompts; called in the worker thread."""
        return [read_prompt(lm, prompt) for prompt in self.prompts]

    async def respond(self) -> Response:
        """Run the request and return its answer or its stream."""
        request = self.service.start(self.http, self.run)
        if self.stream:
            return await stream_events(request, self._events(request))
        await request.done()
        usage = self._count(request)
        tokens = sum(len(choice.scored) + len(choice.tokens) for choice in request.result)
        size = tokens * (1 + self.options.top)
        return await answer_json(lambda: self.answer(request, usage), size)

    def run(self, lm: LanguageModel, send: Send) -> list[Choice]:
        """Complete every prompt; called in the worker thread."""
        options = self.options
        choices: list[Choice] = []
        suffix_tokens = len(lm.tokenizer.encode(options.suffix, inside=True))
        for number, prompt in enumerate(self.read_prompts(lm)):
            first = number * options.n
            scored = score_prompt(lm, prompt, options) if options.score_prompt else ()
            self.prompt_tokens += max(len(prompt.ids), len(scored)) + suffix_tokens
            if self.stream and options.echo:
                for sample in range(options.n):
                    send(event(self.chunk(first + sample, prompt.text, scored, 0)))
            if options.max_tokens == 0:
                choices += [Choice(prompt, scored)] * options.n
                continue

            def on_text(
                sample: int,
                text: str,
                tokens: list[CompletionToken],
                first: int = first,
                base: int = prompt.base,
            ) -> bool:
                if not self.stream:
                    return send(None)
                return send(event(self.chunk(first + sample, text, tokens, base)))

            drawn = complete(lm, prompt, options, self.seeds[number], on_text)
            if len(drawn) > options.n:
                drawn = sorted(drawn, key=lambda each: -each.mean_log_prob)[: options.n]
            choices += [replace(choice, scored=scored) for choice in drawn]
        return choices

    async def _events(self, request: QueuedRequest[list[Choice]]) -> AsyncIterator[bytes]:
        try:
            async for written in request:
                yield written
            for data in self.closing(request, self._count(request)):
                yield event(data)
            yield self.end_mark
        except ApiError as problem:
            yield event(body_of(problem, self.path)[1])

    def _count(self, request: QueuedRequest[list[Choice]]) -> dict[str, int]:
        """Record the finished request and return its usage."""
        usage = usage_of(self.prompt_tokens, sum(choice.generated for choice in request.result))
        self.service.count(self.http, request, usage)
        return usage


def read_prompt(lm: LanguageModel, source: str | tuple[int, ...]) -> Prompt:
    """Return a prompt as the model reads it.

    Raises:
        ValueError: A token id is out of range.
    """
    if isinstance(source, str):
        frame = prompted(source, lm.spelling)
        return Prompt(source, source, frame.ids[0], len(frame.texts[0]))
    vocab_size = lm.tokenizer.vocab_size
    for token_id in source:
        if token_id >= vocab_size:
            raise ValueError(
                f"token id {token_id} is out of range; this model's ids are 0..{vocab_size - 1}"
            )
    text = lm.tokenizer.decode(source)
    return Prompt(source, text, source, len(text))


def complete(
    lm: LanguageModel,
    prompt: Prompt,
    options: CompletionOptions,
    seed: int,
    on_text: Callable[[int, str, list[CompletionToken]], object],
) -> list[Choice]:
    """Draw `options.samples` completions of a prompt.

    Args:
        lm: The model.
        prompt: The prompt.
        options: What to generate.
        seed: Random seed.
        on_text: Called with the number of a sample and its new text and tokens as soon as they are
            certain. When it returns False it is not called again.

    Raises:
        ValueError: The prompt leaves no room for more text.
    """
    longest = lm.model.config.max_length
    room = longest - len(prompt.ids)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(prompt.ids)} tokens, which leaves no room: this model takes "
            f"{longest}, generated tokens included"
        )
    before, moved = prompt.text[: prompt.base], prompt.skip > 0

    def decode(ids: Sequence[int]) -> str:
        return lm.spelling.text_after(before, prompt.ids, ids, moved=moved)[1]

    texts = [
        PartialText(decode, lm.tokenizer.eot_id, options.stop, prompt.skip)
        for _ in range(options.samples)
    ]
    callback = _TextCallback(texts, on_text)
    if options.suffix:
        drawn = _fill_between(lm, prompt, options, seed, callback)
    else:
        drawn = _continue(lm, prompt, options, min(options.max_tokens, room), seed, callback)
    choices = []
    for sample, (text, each) in enumerate(zip(texts, drawn, strict=True)):
        text.add_all(each.token_ids, each.log_probs, each.candidates)
        text.finish()
        if callback.wanted and any(rest := text.release(finished=True)):
            on_text(sample, *rest)
        choices.append(
            Choice(
                prompt,
                text=text.text[text.skip :],
                tokens=tuple(text.tokens),
                generated=len(each.token_ids),
                finish="stop" if each.ended or text.stopped is not None else "length",
                stopped=text.stopped,
            )
        )
    return choices


def score_prompt(
    lm: LanguageModel, prompt: Prompt, options: CompletionOptions
) -> tuple[CompletionToken, ...]:
    """Return the prompt's tokens with their log-probabilities, by the chain rule of mode `ar`."""
    ids = prompt.ids
    if options.max_tokens == 0 and prompt.skip:  # nothing follows: its last space is its own
        ids = tuple(lm.tokenizer.encode(prompt.text))
    if not ids:
        return ()
    none_given = [False] * len(ids)
    log_probs = lm.score_tokens(ids, none_given, "ar")
    candidates: Candidates = ((),) * len(ids)
    if options.top:
        candidates = lm.top_tokens(ids, none_given, options.top, "ar")
    text = PartialText(lm.tokenizer.decode, -1)
    text.add_all(ids, log_probs, candidates)
    return tuple(text.tokens)


def length_prior(low: int, high: int) -> dict[int, float]:
    """Return at most `LENGTHS` of the lengths low..high, denser where they are short.

    Each has as its weight the number of lengths that it stands for.
    """
    count = high - low + 1
    if count <= LENGTHS:
        return dict.fromkeys(range(low, high + 1), 1.0)
    steps = [count ** (i / (LENGTHS - 1)) - 1 for i in range(LENGTHS)]
    grid = sorted({low + round(step) for step in steps})
    edges = [low - 0.5, *((a + b) / 2 for a, b in pairwise(grid)), high + 0.5]
    return {
        length: after - before
        for length, (before, after) in zip(grid, pairwise(edges), strict=True)
    }


class _Sample(NamedTuple):
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    candidates: Candidates
    ended: bool


class _TextCallback(Callback):
    """Pass tokens on as text, as soon as the text is certain."""

    def __init__(
        self,
        texts: Sequence[PartialText],
        on_text: Callable[[int, str, list[CompletionToken]], object],
    ) -> None:
        self.texts, self.on_text, self.wanted = texts, on_text, True

    def __call__(self, tokens: list[Token]) -> bool:
        for token in tokens:
            if token.draft:
                continue
            text = self.texts[token.sample]
            text.add(token.token_id, token.log_prob, token.candidates)
            if any(new := text.release()) and self.on_text(token.sample, *new) is False:
                self.wanted = False
        return self.wanted


def _continue(
    lm: LanguageModel,
    prompt: Prompt,
    options: CompletionOptions,
    max_tokens: int,
    seed: int,
    callback: _TextCallback,
) -> list[_Sample]:
    sampled = lm.sample(
        options.samples,
        prompt=prompt.source,
        max_tokens=max_tokens,
        sampler=options.sampler,
        seed=seed,
        stop=options.stop,
        top=options.top,
        callback=callback,
    )
    return [
        _Sample(each.token_ids, each.log_probs, each.candidates, each.ended) for each in sampled
    ]


def _fill_between(
    lm: LanguageModel,
    prompt: Prompt,
    options: CompletionOptions,
    seed: int,
    callback: _TextCallback,
) -> list[_Sample]:
    low, high = max(1, options.min_tokens), options.max_tokens
    greedy = options.sampler.temperature == 0 and options.samples == 1
    filled = lm.infill(
        around(prompt.source, options.suffix, lm.spelling, blank=f"{low}-{high}"),
        options.samples,
        quality="raw",  # the sampler below has the model's settings already
        sampler=options.sampler,
        seed=seed,
        whole=options.whole,
        prior=length_prior(low, high),
        length_draws=LENGTH_DRAWS,
        lengths="rank" if greedy else "sample",
        top=options.top,
        callback=callback,
    )
    return [
        _Sample(span.token_ids, span.log_probs, span.candidates, ended=True)
        for result in filled
        for span in result.spans
    ]
