"""Score marked parts of texts, and list the most likely tokens of blanks.

- `ScoreRequest`: a text with marked parts, tokenized and checked once.
- `score`: the log-probability of the marked parts, given the rest.
- `marginals`: the most likely tokens at each position of a blank.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Self

from tracformer.generation.decode import Runner
from tracformer.generation.request_options import ScoreOptions
from tracformer.generation.results import Candidates, Marginal, Scored
from tracformer.generation.template import (
    BlankLayout,
    Template,
    TokenizedText,
    parse,
    spans_of,
    to_batch,
    tokenize,
)
from tracformer.generation.token_text import Spelling
from tracformer.model.base import EXACT, ConditionalModel, preferred_mode
from tracformer.model.batch import Batch

TOKENS_AT_ONCE = 1 << 14  # of a batch, padding included


@dataclass(frozen=True)
class ScoreRequest:
    """A text with marked parts, tokenized and checked once. Make it with `make`.

    Args:
        text: The given pieces and their tokens.
        layout: The whole sequence, marked tokens included.
        parts: The text of each marked part, with a space that moved into it.
        options: Options, with the mode that is used.
    """

    text: TokenizedText
    layout: BlankLayout
    parts: tuple[str, ...]
    options: ScoreOptions

    @classmethod
    def make(
        cls,
        model: ConditionalModel,
        spelling: Spelling,
        text: str | Template,
        options: ScoreOptions,
        where: str = "",
    ) -> Self:
        """Tokenize a text and check that it can be scored.

        Args:
            model: The model.
            spelling: How the tokenizer's tokens are written.
            text: Text with marked parts. Without any, all of it is scored, in mode `ar` if the
                options name no mode and the model has it.
            options: Options.
            where: Put before error messages, such as "line 3: ".

        Raises:
            ValueError: The text is empty, has an empty marked part, or does not fit the model.
        """
        try:
            template, mode = parse(text, required=False), options.mode
            if not template.contents:
                if not template.pieces[0]:
                    raise ValueError("the text is empty; there is nothing to score")
                template = Template(("", ""), template.pieces)
                mode = "ar" if mode is None and "ar" in model.config.modes else mode
            options = _with_mode(options, mode or preferred_mode(model.config))
            given = tokenize(template, spelling, options.whole and not model.config.fixed_length)
            fills = marked_parts(template, given, spelling)
            layout = given.with_fills([ids for _, ids in fills])
            if len(layout.tokens) > model.config.max_length:
                raise ValueError(
                    f"the text has {len(layout.tokens)} tokens; this model takes "
                    f"{model.config.max_length}: shorten it"
                )
        except ValueError as mistake:
            raise ValueError(f"{where}{mistake}") from mistake
        return cls(given, layout, tuple(part for part, _ in fills), options)


def score(runner: Runner, spelling: Spelling, requests: Sequence[ScoreRequest]) -> list[Scored]:
    """Return the score of each request; those with equal options share batches."""
    scored: dict[int, Scored] = {}
    for some in batches_of(requests):
        options = requests[some[0]].options
        mode = options.mode
        assert mode is not None
        batch = to_batch([requests[i].layout for i in some], runner.model.head.device)
        estimate = runner.call(
            partial(runner.model.estimate, batch, mode, draws=options.draws, seed=options.seed)
        )
        errors: list[float | None] = (
            [None] * len(some)
            if estimate.standard_error is None
            else estimate.standard_error.tolist()
        )
        candidates: list[Candidates] = (
            top_tokens(runner, spelling, batch, mode, options.top)
            if options.top
            else [()] * len(some)
        )
        rows = zip(some, estimate.values.double().tolist(), errors, candidates, strict=True)
        for i, log_probs, error, likely in rows:
            scored[i] = _scored(runner.model, spelling, requests[i], log_probs, error, likely)
    return [scored[i] for i in range(len(requests))]


def batches_of(requests: Sequence[ScoreRequest]) -> Iterator[list[int]]:
    """Yield the numbers of requests with equal options and similar lengths.

    A batch has at most `options.batch` requests, and fewer if they are long.
    """
    alike: dict[ScoreOptions, list[int]] = {}
    for i in sorted(range(len(requests)), key=lambda i: len(requests[i].layout.tokens)):
        alike.setdefault(requests[i].options, []).append(i)
    for options, numbers in alike.items():
        some: list[int] = []
        for i in numbers:
            tokens = (len(some) + 1) * len(requests[i].layout.tokens)
            if some and (len(some) == options.batch or tokens > TOKENS_AT_ONCE):
                yield some
                some = []
            some.append(i)
        yield some


def top_tokens(
    runner: Runner, spelling: Spelling, batch: Batch, mode: str, top: int
) -> list[Candidates]:
    """Return the `top` most likely tokens at each target of each sequence."""
    if top < 1:
        raise ValueError(f"top is {top}; it must be at least 1")
    return spelling.candidates(*runner.call(partial(runner.model.candidates, batch, mode, top)))


def marginals(
    runner: Runner, spelling: Spelling, text: str | Template, mode: str, whole: bool, top: int
) -> list[Marginal]:
    """Return the `top` most likely tokens at each position of blanks of fixed length.

    Raises:
        ValueError: A blank has no fixed length, or the mode gives no marginals of several tokens.
    """
    if top < 1:
        raise ValueError(f"top is {top}; it must be at least 1")
    model, template = runner.model, parse(text)
    for content, (low, high) in zip(template.contents, template.lengths, strict=True):
        if low != high:
            raise ValueError(
                f"a blank holds {content!r}; candidates need a fixed number of tokens, for "
                "instance [[1]]"
            )
    given = tokenize(template, spelling, whole and not model.config.fixed_length)
    given.length_ranges(template.lengths, model.config.max_length, model.config.max_length)
    layout = given.with_blanks([low for low, _ in template.lengths])
    if model.answers[mode] == EXACT and sum(layout.lengths) > 1:
        raise ValueError(
            f"mode {mode!r} predicts each token from those before it, so {sum(layout.lengths)} "
            "open positions have no candidates of their own; leave one blank of one token, or use "
            "a model with mode 'ac'"
        )
    batch = to_batch([layout], model.head.device)
    [candidates] = top_tokens(runner, spelling, batch, mode, top)
    return [
        Marginal(i, *layout.place(i), candidates[i])
        for i, is_given in enumerate(layout.context)
        if not is_given
    ]


def marked_parts(
    template: Template, given: TokenizedText, spelling: Spelling
) -> list[tuple[str, list[int]]]:
    """Return each marked part's text, with the space that moved into it, and its tokens."""
    parts = []
    for number, (content, moved) in enumerate(zip(template.contents, given.spaced, strict=True)):
        if not content:
            raise ValueError(
                "a pair of brackets to score is empty; write the text to score between [[ and ]]"
            )
        text = " " + content if moved else content
        ids = spelling.tokenizer.encode(text, inside=number > 0 or bool(given.ids[0]))
        if not ids:
            raise ValueError(
                f"the marked part {content[:30]!r} has no tokens, so there is nothing to score; "
                "mark more of the text"
            )
        parts.append((text, ids))
    return parts


@lru_cache(maxsize=16)
def _with_mode(options: ScoreOptions, mode: str) -> ScoreOptions:
    return replace(options, mode=mode)


def _scored(
    model: ConditionalModel,
    spelling: Spelling,
    request: ScoreRequest,
    log_probs: list[float],
    error: float | None,
    candidates: Candidates,
) -> Scored:
    layout, parts, mode = request.layout, request.parts, request.options.mode
    assert mode is not None
    text, spans = spans_of(
        request.text, layout, layout.tokens, log_probs, spelling, parts, candidates
    )
    log_prob, tokens = math.fsum(log_probs), sum(layout.lengths)
    limit = model.limits.get(mode)
    return Scored(
        text=text,
        spans=spans,
        log_prob=log_prob,
        tokens=tokens,
        bits_per_byte=-log_prob / math.log(2) / sum(len(part.encode()) for part in parts),
        perplexity=math.exp(min(-log_prob / tokens, 700.0)),
        mode=mode,
        kind=model.answers[mode],
        standard_error=error,
        note=f"mode {mode} {limit}" if limit else "",
    )
