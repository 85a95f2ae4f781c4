"""A model and its tokeniser: fill the blanks of a text, score marked parts, list candidates, write
on from a prompt.

    lm = tracformer.load("runs/stories")
    lm.infill("Once upon a time [[3-8]] lived in a wood.")[0].text
    lm.score("Once upon a time [[a fox]] lived in a wood.").log_prob

How blanks are written is in `template`; how unknown lengths are chosen, in `length_posterior`.
"""

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Self, overload

import torch

from tracformer import loading
from tracformer.data.tokenizer import Tokenizer
from tracformer.generation.continuation import Writer, prompted
from tracformer.generation.engine import Here, Runner
from tracformer.generation.infill import ask, check_options, infill_texts
from tracformer.generation.options import InfillOptions, SampleOptions, ScoreOptions
from tracformer.generation.orders import LeftToRight
from tracformer.generation.results import (
    Candidates,
    Infilled,
    Marginal,
    Sampled,
    Scored,
    TokenCallback,
    until_false,
)
from tracformer.generation.template import (
    Frame,
    Laid,
    Template,
    frame,
    literal_fills,
    parse,
    parse_lengths,
    spans_of,
    stack,
)
from tracformer.generation.token_text import Spelling
from tracformer.model.base import EXACT, ConditionalModel, check_mode, preferred_mode
from tracformer.model.batch import Batch
from tracformer.model.fast_step import check_kind
from tracformer.rng import derived_seed


class LanguageModel:
    """Text in, text out. Samples are functions of (text, seed): neither batch size nor neighbours
    change them.

    The model is put in evaluation mode.
    """

    def __init__(self, model: ConditionalModel, tokenizer: Tokenizer, name: str = "") -> None:
        loading.require_fit(model, tokenizer)
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name
        self.spelling = Spelling(tokenizer)
        self.runner: Runner = Here(model)

    def on(self, runner: Runner) -> Self:
        """The same, its model run by somebody else (see `engine`): each answer is the same."""
        if runner.model is not self.model:
            raise ValueError("the runner runs another model; make it of this one's `model`")
        other = copy(self)
        other.runner = runner
        return other

    def lean(self, weights: str) -> Self:
        """Round a Tracformer's weights, where they stand and for good, to "bfloat16" or "int8".

        Generation from left to right then reads fewer bytes a token. Fillings, scores and marginals
        all speak of the rounded weights.
        """
        self.model.lean(weights)
        return self

    @overload
    def infill(
        self,
        text: str | Template,
        n: int | None = None,
        *,
        options: InfillOptions | None = None,
        callback: TokenCallback | None = None,
        **changes: Any,
    ) -> list[Infilled]: ...

    @overload
    def infill(
        self,
        text: Sequence[str | Template],
        n: int | None = None,
        *,
        options: InfillOptions | None = None,
        callback: TokenCallback | None = None,
        **changes: Any,
    ) -> list[list[Infilled]]: ...

    def infill(
        self,
        text: str | Template | Sequence[str | Template],
        n: int | None = None,
        *,
        options: InfillOptions | None = None,
        callback: TokenCallback | None = None,
        **changes: Any,
    ) -> list[Infilled] | list[list[Infilled]]:
        """Fill the blanks of a text, or of several texts in shared batches.

        Args:
            text: Text with blanks: [[]] (any length), [[5]] (5 tokens) or [[3-8]] (3 to 8 tokens).
                Or a list of such texts; each gets what it would get alone.
            n: Number of fills per text.
            options: Options; the defaults if None.
            callback: Called with the tokens of each step as they arrive. A `Callback` also
                receives drafts and lengths.
            **changes: Options to change, by name: see `InfillOptions` and `Sampler`.

        Returns:
            The fills of the text, or a list of fills for each text of a list.

        Raises:
            ValueError: A text has no blank or does not fit the model, an option is unknown or out
                of bounds, or options contradict each other.

        Example:
            >>> import tracformer
            >>> lm = tracformer.load("stories")
            >>> [fill] = lm.infill("Once upon a [[1]], there was a cat.", temperature=0)
            >>> fill.text
            'Once upon a time, there was a cat.'
        """
        resolved = self._infill_options(n, options, changes)
        one = isinstance(text, str | Template)
        texts = [text] if isinstance(text, str | Template) else list(text)
        results = infill_texts(self.runner, self.spelling, texts, resolved, callback)
        return results[0] if one else results

    def check_infill(
        self,
        text: str | Template | None = None,
        n: int | None = None,
        *,
        options: InfillOptions | None = None,
        **changes: Any,
    ) -> None:
        """Raise the ValueError that `infill` would raise before it fills anything.

        Without a text, only the options are checked.
        """
        resolved = self._infill_options(n, options, changes)
        check_options(self.model, resolved)
        if text is not None:
            ask(self.model, self.spelling, text, resolved)

    def _infill_options(
        self, n: int | None, options: InfillOptions | None, changes: dict[str, Any]
    ) -> InfillOptions:
        if n is not None:
            changes["n"] = n
        found = InfillOptions.make(options, **changes)
        mode = found.mode
        if (
            mode is None
            and found.fill_order not in (None, LeftToRight())
            and "ac" in self.model.config.modes
        ):
            mode = "ac"  # the only mode that has every order
        return replace(found, mode=self._mode(mode))

    @overload
    def score(
        self, text: str | Template, *, options: ScoreOptions | None = None, **changes: Any
    ) -> Scored: ...

    @overload
    def score(
        self, text: Sequence[str | Template], *, options: ScoreOptions | None = None, **changes: Any
    ) -> list[Scored]: ...

    def score(
        self,
        text: str | Template | Sequence[str | Template],
        *,
        options: ScoreOptions | None = None,
        **changes: Any,
    ) -> Scored | list[Scored]:
        """Return the log-probability of the marked parts of a text, given the rest.

        Args:
            text: Text with marked parts, as in "a [[cat]]". Or a list of such texts.
            options: Options; the defaults if None.
            **changes: Options to change, by name: see `ScoreOptions`.

        Returns:
            The score of the text, or of each text of a list.

        Raises:
            ValueError: A text has no marked part or does not fit the model, or an option is
                unknown or out of bounds.

        Example:
            >>> import tracformer
            >>> lm = tracformer.load("stories")
            >>> likely, unlikely = lm.score(["Once upon a [[time]],", "Once upon a [[cat]],"])
            >>> likely.log_prob > unlikely.log_prob
            True
        """
        found = ScoreOptions.make(options, **changes)
        one = isinstance(text, str | Template)
        texts = [text] if isinstance(text, str | Template) else list(text)
        scores = self._score(texts, replace(found, mode=self._mode(found.mode)))
        return scores[0] if one else scores

    def _score(self, texts: Sequence[str | Template], options: ScoreOptions) -> list[Scored]:
        mode = self._mode(options.mode)
        draws, seed, top, batch = options.draws, options.seed, options.top, options.batch
        marked = [self._marked(text, options.whole) for text in texts]
        scored: dict[int, Scored] = {}
        by_length = sorted(range(len(texts)), key=lambda i: len(marked[i][1].tokens))
        for start in range(0, len(texts), batch):
            some = by_length[start : start + batch]
            asked = stack([marked[i][1] for i in some], self.model.head.device)
            estimate = self.runner.call(
                partial(self.model.estimate, asked, mode, draws=draws, seed=seed)
            )
            errors = (
                [None] * len(some)
                if estimate.standard_error is None
                else estimate.standard_error.tolist()
            )
            candidates = self._candidates(asked, mode, top) if top else [()] * len(some)
            for i, log_probs, error, likely in zip(
                some, estimate.values.double().tolist(), errors, candidates, strict=True
            ):
                scored[i] = self._scored(*marked[i], log_probs, mode, error, likely)
        return [scored[i] for i in range(len(texts))]

    def check_score(
        self, text: str | Template | None = None, *, mode: str | None = None, whole: bool = True
    ) -> None:
        """What `score` would refuse, of this text or, without one, of the mode alone, is a
        ValueError; nothing is computed.
        """
        self._mode(mode)
        if text is not None:
            self._marked(text, whole)

    def score_tokens(
        self, token_ids: Sequence[int], context: Sequence[bool], mode: str | None = None
    ) -> tuple[float, ...]:
        """Each token's log-probability given those where `context` is True, and zero there: no
        tokeniser between question and answer.
        """
        batch = self._batch(token_ids, context)
        values: list[float] = (
            self.runner.call(partial(self.model.log_prob, batch, self._mode(mode)))
            .double()[0]
            .tolist()
        )
        return tuple(values)

    def top_tokens(
        self,
        token_ids: Sequence[int],
        context: Sequence[bool],
        top: int = 5,
        mode: str | None = None,
    ) -> Candidates:
        """The likeliest tokens in the place of each that `score_tokens` scores, likeliest first;
        none where `context` is True.
        """
        [found] = self._candidates(self._batch(token_ids, context), self._mode(mode), top)
        return found

    def _batch(self, token_ids: Sequence[int], context: Sequence[bool]) -> Batch:
        tokens, given = torch.tensor([list(token_ids)]), torch.tensor([list(context)])
        return Batch(tokens, given).to(self.model.head.device)

    def _candidates(self, batch: Batch, mode: str, top: int) -> list[Candidates]:
        if top < 1:
            raise ValueError(f"top is {top}; it must be at least 1")
        return self.spelling.candidates(
            *self.runner.call(partial(self.model.candidates, batch, mode, top))
        )

    def marginals(
        self, text: str, top: int = 5, *, mode: str | None = None, whole: bool = True
    ) -> list[Marginal]:
        """The `top` likeliest tokens at each position of blanks of fixed length, given the rest:
        the model's own, nothing ruled out.
        """
        if top < 1:
            raise ValueError(f"top is {top}; it must be at least 1")
        template = parse(text)
        wanted = [parse_lengths(content) for content in template.contents]
        if free := next(
            (
                content
                for content, (low, high) in zip(template.contents, wanted, strict=True)
                if low != high
            ),
            None,
        ):
            raise ValueError(
                f"a blank holds [[{free}]]; candidates need a fixed number of tokens, for instance "
                "[[1]]"
            )
        if any(high is None for _, high in wanted):
            raise ValueError(
                "a blank holds nothing; candidates need a fixed number of tokens, for instance "
                "[[1]]"
            )
        of = frame(template, self.spelling, whole)
        of.fitting(wanted, self.model.config.max_length, self.model.config.max_length)
        laid = of.blank([low for low, _ in wanted])
        mode = self._mode("ac" if mode is None and "ac" in self.model.config.modes else mode)
        if self.model.answers[mode] == EXACT and sum(laid.lengths) > 1:
            raise ValueError(
                f"mode {mode!r} predicts each token from those before it, so {sum(laid.lengths)} "
                "open positions have no candidates of "
                "their own; leave one blank of one token, or use a model with mode 'ac'"
            )
        asked = stack([laid], self.model.head.device)
        [candidates] = self._candidates(asked, mode, top)
        return [
            Marginal(i, *laid.place(i), candidates[i])
            for i, given in enumerate(laid.context)
            if not given
        ]

    def sample(
        self,
        n: int | None = None,
        *,
        prompt: str | Sequence[int] = "",
        options: SampleOptions | None = None,
        callback: TokenCallback | None = None,
        **changes: Any,
    ) -> list[Sampled]:
        """Write a continuation of a prompt, or whole texts.

        A text ends at the end of text, at a stop string or after `max_tokens` tokens. Sampling is
        in mode `ar`. A model without it fills a blank of `max_tokens` tokens after the prompt.

        Args:
            n: Number of texts.
            prompt: Text or token ids that the texts begin with.
            options: Options; the defaults if None.
            callback: Called with the tokens of each step as they arrive.
            **changes: Options to change, by name: see `SampleOptions` and `Sampler`.

        Returns:
            The texts, prompt included.

        Raises:
            ValueError: The prompt does not fit the model, or an option is unknown or out of bounds.

        Example:
            >>> import tracformer
            >>> lm = tracformer.load("stories")
            >>> [text] = lm.sample(prompt="Once upon a", max_tokens=1, temperature=0)
            >>> text.text
            'Once upon a time'
        """
        if n is not None:
            changes["n"] = n
        found = SampleOptions.make(options, **changes)
        max_tokens, batch = found.max_tokens, found.batch
        of = prompted(prompt, self.spelling)
        room = self.model.config.max_length - of.given
        if room < 1:
            raise ValueError(
                f"the prompt has {of.given} tokens; this model takes "
                f"{self.model.config.max_length}, with what is to be written"
            )
        count = room if max_tokens is None else max_tokens
        if count < 1 or count > room:
            raise ValueError(
                f"{count} tokens are asked for; this model takes {self.model.config.max_length}, "
                f"and the prompt has {of.given}"
            )
        mode = "ar" if "ar" in self.model.config.modes else self._mode(None)
        writer = Writer(
            self.runner,
            self.spelling,
            of,
            count,
            mode,
            found.sampler,
            found.stop,
            found.top,
            None if callback is None else until_false(callback),
        )
        numbers = range(found.n)
        return [
            sample
            for start in range(0, found.n, batch)
            for sample in writer.write(
                [derived_seed(found.seed, i) for i in numbers[start : start + batch]], start
            )
        ]

    def _marked(self, text: str | Template, whole: bool) -> tuple[Frame, Laid, list[str]]:
        template = parse(text)
        of = frame(template, self.spelling, whole)
        fills = literal_fills(template, of, self.spelling)
        laid = of.lay([ids for _, ids in fills])
        if len(laid.tokens) > self.model.config.max_length:
            raise ValueError(
                f"the text has {len(laid.tokens)} tokens; this model takes "
                f"{self.model.config.max_length}: shorten it"
            )
        return of, laid, [filling for filling, _ in fills]

    def _scored(
        self,
        of: Frame,
        laid: Laid,
        texts: list[str],
        log_probs: list[float],
        mode: str,
        error: float | None,
        candidates: Candidates,
    ) -> Scored:
        text, spans = spans_of(of, laid, laid.tokens, log_probs, self.spelling, texts, candidates)
        log_prob, tokens = math.fsum(log_probs), sum(laid.lengths)
        return Scored(
            text=text,
            spans=spans,
            log_prob=log_prob,
            tokens=tokens,
            bits_per_byte=-log_prob / math.log(2) / sum(len(filling.encode()) for filling in texts),
            perplexity=math.exp(min(-log_prob / tokens, 700.0)),
            mode=mode,
            kind=self.model.answers[mode],
            standard_error=error,
            note=f"mode {mode} {limit}" if (limit := self.model.limits.get(mode)) else "",
        )

    def _mode(self, mode: str | None) -> str:
        if mode is None:
            return preferred_mode(self.model.config)
        check_mode(self.model.config, mode)
        return mode


def load(
    where: str | PathLike[str],
    *,
    tokenizer: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    weights: str = "float32",
    **options: Any,
) -> LanguageModel:
    """A model's folder, a run's folder (its `best` or else its `model`), the name of a bundled
    model, or an id OWNER/NAME of the hub.

    Published weights of GPT-2, SEDD and MDLM are read as well; `tokenizer` names one where none
    lies beside the weights. `weights` rounds a Tracformer's to "bfloat16" or "int8", see
    `LanguageModel.lean`. `options` go to the reader of the weights: for published MDLM and SEDD,
    `mask_token_id=` and `ema=` (see `baselines.published`).
    """
    check_kind(weights)
    return LanguageModel(
        *loading.read(loading.find_folder(where), device, dtype, tokenizer, **options), str(where)
    ).lean(weights)
