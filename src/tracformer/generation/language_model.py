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
from functools import partial
from os import PathLike
from typing import Any, Self

import torch
from torch import Tensor

from tracformer import loading
from tracformer.data.tokenizer import Tokenizer
from tracformer.generation.continuation import Writer, prompted
from tracformer.generation.engine import Here, Runner
from tracformer.generation.infill import Options, ask, check_options, infill_texts
from tracformer.generation.length_posterior import Prior
from tracformer.generation.orders import LeftToRight, Order
from tracformer.generation.results import (
    Candidates,
    Infilled,
    Marginal,
    Sampled,
    Scored,
    Watch,
    heeded,
)
from tracformer.generation.samplers import PLAIN, Sampler
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

    def infill(
        self,
        text: str | Template,
        n: int = 1,
        *,
        mode: str | None = None,
        sampler: Sampler = PLAIN,
        seed: int = 0,
        order: Order | None = None,
        best_of: int = 0,
        search: str | None = None,
        reread: bool = False,
        whole: bool = True,
        max_blank: int = 32,
        prior: Prior | None = None,
        length_draws: int = 8,
        lengths: str = "sample",
        batch: int = 16,
        top: int = 0,
        watch: Watch | None = None,
    ) -> list[Infilled]:
        """Fill the blanks of a text.

        Args:
            text: Text with blanks: [[]] (any length), [[5]] (5 tokens) or [[3-8]] (3 to 8 tokens).
            n: Number of samples, in the order they are drawn. Sample i has seed
                `derived_seed(seed, i)`.
            mode: `car` sees both sides and all that is filled before; `ac` takes any `order`.
                Default: the first of these that the model has.
            sampler: Temperature, top-p and other changes of the distribution.
            seed: Random seed.
            order: Order in which positions are filled, for `ac`.
            best_of: Draw this many and return the `n` most probable distinct ones, best first.
            search: "beam:WIDTH" approximates the most probable fillings; "best-first:BUDGET" finds
                them, or says in `note` that it gave up.
            reread: Rank what `best_of` or a beam found also by how the whole text reads from left
                to right (see `infill`).
            whole: The text is a whole document, so the end of text is given; False: a fragment.
            max_blank: Longest filling of a blank of any length.
            prior: Weight of each length of a blank; None: all alike (see `length_posterior`).
            length_draws: Samples from which the mass of a length is estimated.
            lengths: "sample" draws lengths; "rank" gives sample i the i-th most likely length.
            batch: Number of sequences at once.
            top: Number of most likely tokens to return for each position.
            watch: Callback for each token as it arrives; a `Watcher` gets drafts and lengths too.

        Returns:
            The filled texts with the log-probability of what was filled.

        Raises:
            ValueError: The text has no blank, does not fit the model, or options contradict.
        """
        [results] = self.infill_many(
            [text],
            n,
            mode=mode,
            sampler=sampler,
            seed=seed,
            order=order,
            best_of=best_of,
            search=search,
            reread=reread,
            whole=whole,
            max_blank=max_blank,
            prior=prior,
            length_draws=length_draws,
            lengths=lengths,
            batch=batch,
            top=top,
            watch=watch,
        )
        return results

    def infill_many(
        self,
        texts: Sequence[str | Template],
        n: int = 1,
        *,
        mode: str | None = None,
        order: Order | None = None,
        **options: Any,
    ) -> list[list[Infilled]]:
        """`infill` for several texts, with its options, in shared batches: what each text gets is
        what it gets alone.
        """
        return infill_texts(
            self.runner, self.spelling, texts, self._options(n, mode, order, **options)
        )

    def check_infill(
        self,
        text: str | Template | None = None,
        n: int = 1,
        *,
        mode: str | None = None,
        order: Order | None = None,
        **options: Any,
    ) -> None:
        """What `infill` would refuse at once, of this text or, without one, of the options alone,
        is a ValueError; nothing is filled.
        """
        asked = self._options(n, mode, order, **options)
        check_options(self.model, asked)
        if text is not None:
            ask(self.model, self.spelling, text, asked)

    def _options(self, n: int, mode: str | None, order: Order | None, **options: Any) -> Options:
        if mode is None and order not in (None, LeftToRight()) and "ac" in self.model.config.modes:
            mode = "ac"  # the one mode that has every order
        return Options(n=n, mode=self._mode(mode), order=order, **options)

    def score(
        self,
        text: str | Template,
        *,
        mode: str | None = None,
        whole: bool = True,
        draws: int | None = None,
        seed: int = 0,
        top: int = 0,
    ) -> Scored:
        """The log-probability of what stands in [[...]], given the rest. `top`: so many candidates
        of each token, besides.

        `draws` and `seed` matter only where the answer is a bound.
        """
        return self.score_many([text], mode=mode, whole=whole, draws=draws, seed=seed, top=top)[0]

    def score_many(
        self,
        texts: Sequence[str | Template],
        *,
        mode: str | None = None,
        whole: bool = True,
        batch: int = 16,
        draws: int | None = None,
        seed: int = 0,
        top: int = 0,
    ) -> list[Scored]:
        mode = self._mode(mode)
        marked = [self._marked(text, whole) for text in texts]
        scored: dict[int, Scored] = {}
        by_length = sorted(range(len(texts)), key=lambda i: len(marked[i][1].tokens))
        for start in range(0, len(texts), max(1, batch)):
            some = by_length[start : start + max(1, batch)]
            asked = stack([marked[i][1] for i in some], self.model.head.device)
            question = (asked.tokens, asked.context, mode, asked.lengths)
            estimate = self.runner.call(
                partial(self.model.estimate, *question, draws=draws, seed=int(seed))
            )
            errors = (
                [None] * len(some)
                if estimate.standard_error is None
                else estimate.standard_error.tolist()
            )
            candidates = self._candidates(*question, top) if top else [()] * len(some)
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
        question = (*self._tensors(token_ids, context), self._mode(mode))
        values: list[float] = (
            self.runner.call(partial(self.model.log_prob, *question)).double()[0].tolist()
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
        [found] = self._candidates(*self._tensors(token_ids, context), self._mode(mode), None, top)
        return found

    def _tensors(self, token_ids: Sequence[int], context: Sequence[bool]) -> tuple[Tensor, Tensor]:
        device = self.model.head.device
        return torch.tensor([list(token_ids)], device=device), torch.tensor(
            [list(context)], device=device
        )

    def _candidates(
        self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor | None, top: int
    ) -> list[Candidates]:
        if top < 1:
            raise ValueError(f"top is {top}; it must be at least 1")
        return self.spelling.candidates(
            *self.runner.call(partial(self.model.candidates, tokens, context, mode, lengths, top))
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
        [candidates] = self._candidates(asked.tokens, asked.context, mode, asked.lengths, top)
        return [
            Marginal(i, *laid.place(i), candidates[i])
            for i, given in enumerate(laid.context)
            if not given
        ]

    def sample(
        self,
        n: int = 1,
        *,
        prompt: str | Sequence[int] = "",
        max_tokens: int | None = None,
        sampler: Sampler = PLAIN,
        seed: int = 0,
        batch: int = 16,
        stop: Sequence[str] = (),
        top: int = 0,
        watch: Watch | None = None,
    ) -> list[Sampled]:
        """Write on from a prompt (a text, or token ids) until the end of text, one of the `stop`
        strings, or `max_tokens` tokens.

        In mode `ar`. A model without it fills a blank of that many tokens behind the prompt
        instead, knowing where the sequence ends.
        """
        if n < 1 or batch < 1:
            raise ValueError(f"n is {n} and batch {batch}; both must be at least 1")
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
            sampler,
            stop,
            top,
            None if watch is None else heeded(watch),
        )
        numbers = range(n)
        return [
            sample
            for start in range(0, n, batch)
            for sample in writer.write(
                [derived_seed(seed, i) for i in numbers[start : start + batch]], start
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
