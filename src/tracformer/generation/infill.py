"""Fill texts with blanks: from requests to ranked results.

- `InfillRequest`: a text and its options, tokenized and checked once.
- `InfillRun`: one call of `LanguageModel.infill`. It chooses lengths (`length_posterior`), draws
  samples (`decode.fill`) or searches (`decode.search`), ranks the fills and turns them into
  `Infilled`.

Every sample of every text is one sequence with its own seed; sequences of similar length are filled
in one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from tracformer.generation import length_posterior
from tracformer.generation.continuation import (
    as_revealed,
    can_hold,
    joined,
    not_utf8,
    search_note,
    text_rules,
)
from tracformer.generation.decode import Found, Runner, check_reverse, require_exact, search
from tracformer.generation.generation_config import RAW, GenerationConfig
from tracformer.generation.length_posterior import LengthVectors, Masses
from tracformer.generation.orders import LeftToRight, orders_in
from tracformer.generation.ranking import distinct, lengths_of, log_joint, reread, scored
from tracformer.generation.request_options import InfillOptions, Sampler, parse_search
from tracformer.generation.results import (
    Callback,
    Candidates,
    Infilled,
    LengthChoice,
    Token,
    TokenCallback,
    until_false,
)
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
from tracformer.model.base import EXACT, ConditionalModel, check_mode, preferred_mode
from tracformer.model.batch import Batch
from tracformer.rng import derived_seed

# Of blanks of unknown length, except under `raw`: number of combinations of lengths up to which all
# are weighed, and number of those that are weighed with all draws.
WEIGHED_LENGTHS, KEPT_LENGTHS = 16, 8
ROUGH = 2**41  # index of the seeds of rough estimates, beyond any number of samples
TOGETHER = 64  # sequences per pass where many are tried
ROUGH_FILLS = 3, 2  # of each combination tried under `best`, one greedy: up to two blanks, more
SEARCHED_LENGTHS = 4  # of blanks of unknown length: each gets its own beam search under `best`


def resolve_options(
    model: ConditionalModel,
    options: InfillOptions,
    config: GenerationConfig = RAW,
    *,
    stream: bool = False,
) -> InfillOptions:
    """Return the options with the mode and the settings that are used, checked against the model.

    Args:
        model: The model.
        options: Options of a caller.
        config: The model's settings, for what the caller left out.
        stream: Tokens are shown as they arrive.

    Raises:
        ValueError: The model cannot do what the options ask for, whatever the text.
    """
    mode, order = options.mode, options.fill_order
    if mode is None:
        other_order = order not in (None, LeftToRight()) and "ac" in model.config.modes
        mode = "ac" if other_order else preferred_mode(model.config)
    check_mode(model.config, mode)
    exact = model.answers.get(mode) == EXACT
    if "ar" not in model.config.modes:
        config = replace(config, reread=False)
    options = config.apply(options, searchable=exact, stream=stream)
    if options.reread and "ar" not in model.config.modes:
        raise ValueError(
            "reread needs mode 'ar', the left-to-right probability of a text; this model was "
            f"trained for: {', '.join(model.config.modes)}"
        )
    if options.search is not None:
        require_exact(model, mode)
    elif mode == "diffusion":
        check_reverse(model.config, [options.sampler], order)
    else:
        orders_in(mode, order, 1)
    return replace(options, mode=mode)


@dataclass(frozen=True)
class InfillRequest:
    """A text to fill and its options, tokenized and checked once. Make it with `make`.

    Args:
        text: The given pieces and their tokens.
        ranges: Smallest and largest length of each blank.
        room: Number of tokens that all blanks share.
        options: Options, with the mode that is used.
        where: Where the text comes from, put before error messages, such as "line 3: ".
    """

    text: TokenizedText
    ranges: tuple[tuple[int, int], ...]
    room: int
    options: InfillOptions
    where: str = ""

    @classmethod
    def make(
        cls,
        model: ConditionalModel,
        spelling: Spelling,
        text: str | Template,
        options: InfillOptions,
        where: str = "",
    ) -> Self:
        """Tokenize a text and check that it can be filled.

        Args:
            model: The model.
            spelling: How the tokenizer's tokens are written.
            text: Text with blanks.
            options: Options as `resolve_options` returns them.
            where: Put before error messages.

        Raises:
            ValueError: The text has no blank, or does not fit the model or the options.
        """
        try:
            template = parse(text)
            given = tokenize(template, spelling, options.whole and not model.config.fixed_length)
            ranges, room = given.length_ranges(
                template.lengths, model.config.max_length, options.max_blank
            )
            longest = min(sum(high for _, high in ranges), room)
            if not can_hold(given, longest, options.sampler, spelling):
                hint = (
                    " (after a space a blank begins with a token that has one)"
                    if any(given.spaced)
                    else ""
                )
                raise ValueError(
                    f"{len(set(options.sampler.required))} tokens are required, and the blanks "
                    f"have no place for all of them{hint}: make them larger"
                )
        except ValueError as mistake:
            raise ValueError(f"{where}{mistake}") from mistake
        return cls(given, tuple(ranges), room, options, where)


class PlannedFill(NamedTuple):
    """One sequence to fill: a sample of a request, its lengths chosen."""

    request: InfillRequest
    text: int  # number of the request
    sample: int
    seed: int
    layout: BlankLayout
    choice: LengthChoice | None
    note: str
    greedy: bool = False  # always the most likely token


@dataclass(frozen=True)
class InfillRun:
    """One call of `LanguageModel.infill`, for requests that share their options but the seed.

    Args:
        runner: Runs the model.
        spelling: How the tokenizer's tokens are written.
        options: The options of all requests; each has its own seed.
        callback: Called with the tokens of each step.
    """

    runner: Runner
    spelling: Spelling
    options: InfillOptions
    callback: TokenCallback | None = None

    @property
    def mode(self) -> str:
        """The mode that is used."""
        assert self.options.mode is not None
        return self.options.mode

    @cached_property
    def rules(self) -> Sampler:
        """The sampler, with tokens banned that are not text."""
        return text_rules(self.options.sampler, self.spelling)

    def run(self, requests: Sequence[InfillRequest]) -> list[list[Infilled]]:
        """Return the fills of each request.

        Raises:
            ValueError: A text cannot be filled under the rules of the sampler. The message names
                the text if it is the only one.
        """
        try:
            return self._run(requests)
        except ValueError as mistake:
            if len(requests) == 1 and requests[0].where:
                raise ValueError(f"{requests[0].where}{mistake}") from mistake
            raise

    def _run(self, requests: Sequence[InfillRequest]) -> list[list[Infilled]]:
        if self.options.quality == "best":
            return [self._best(number, request) for number, request in enumerate(requests)]
        plans = [self._plan(number, request) for number, request in enumerate(requests)]
        if isinstance(self.callback, Callback):
            for fill in (fill for plan in plans for fill in plan):
                self.callback.lengths(fill.text, fill.sample, fill.layout.lengths)
        if self.options.search is not None:
            return [self._search(plan[0]) for plan in plans]
        callback = None if self.callback is None else until_false(self.callback)
        filled: dict[tuple[int, int], Infilled] = {}
        # stable sort: little padding, and samples of one length stay in order
        fills = sorted(
            (fill for plan in plans for fill in plan), key=lambda fill: len(fill.layout.tokens)
        )
        for start in range(0, len(fills), self.options.batch):
            some = fills[start : start + self.options.batch]
            for fill, result in zip(some, self._fill(some, callback), strict=True):
                filled[fill.text, fill.sample] = result
        results = [[filled[fill.text, fill.sample] for fill in plan] for plan in plans]
        return [self.best(each) for each in results] if self.options.best_of else results

    def _best(self, number: int, request: InfillRequest) -> list[Infilled]:
        """Return the `n` distinct candidates with the highest scores, best first.

        Candidates are nucleus samples and the fills of beam searches, of the most likely lengths.
        """
        options, ranges, room = self.options, request.ranges, request.room
        note = self._note(request)
        pool: list[Infilled] = []
        rough = ROUGH_FILLS[sum(low < high for low, high in ranges) > 2]

        def plan(vector: tuple[int, ...], i: int, greedy: bool = False) -> PlannedFill:
            seed = derived_seed(request.options.seed, i)
            layout = request.text.with_blanks(vector)
            return PlannedFill(request, number, i, seed, layout, None, note, greedy)

        def try_out(found: LengthVectors) -> list[float]:
            """Return the score of the best of a few fills of each vector of lengths."""
            fills = [plan(v, i, greedy=i == 0) for v in found.vectors for i in range(rough)]
            results = self._scored(request, self._sampled(fills))
            pool.extend(results)
            scores = [result.score or 0.0 for result in results]
            return [max(scores[i : i + rough]) for i in range(0, len(scores), rough)]

        if all(low == high for low, high in ranges):
            vectors = [tuple(low for low, _ in ranges)]
        elif length_posterior.can_weigh(self.runner.model):
            found = length_posterior.explore(ranges, room, options.prior, try_out, SEARCHED_LENGTHS)
            vectors = found.vectors
        else:
            vectors = [length_posterior.middle(ranges, room)]
            note = joined(note, length_posterior.missing_mode(self.runner.model))
        results = self._sampled([*map(plan, vectors * options.best_of, range(options.best_of))])
        for vector in vectors:
            results += self._search(plan(vector, 0))
        pool = distinct(pool + self._scored(request, distinct(results)))
        pool.sort(key=lambda result: -(result.score or 0.0))
        tried = {lengths_of(result): result.score or 0.0 for result in reversed(pool)}
        best = [
            replace(each, note=joined(each.note, f"best of {len(pool)} candidates"))
            for each in pool[: options.n]
        ]
        if len(tried) == 1:
            return best
        vectors = sorted(tried)
        weights, no_errors = tuple(tried[vector] for vector in vectors), (0.0,) * len(vectors)
        return [
            replace(
                each,
                length_choice=LengthChoice(tuple(vectors), weights, no_errors, lengths_of(each)),
            )
            for each in best
        ]

    def _sampled(self, fills: Sequence[PlannedFill]) -> list[Infilled]:
        """Draw one sample of each planned fill; sequences of similar length share a batch."""
        callback = None if self.callback is None else until_false(self.callback)
        order = sorted(range(len(fills)), key=lambda i: len(fills[i].layout.tokens))
        results: dict[int, Infilled] = {}
        batch = max(self.options.batch, TOGETHER)
        for start in range(0, len(order), batch):
            some = order[start : start + batch]
            results |= zip(some, self._fill([fills[i] for i in some], callback), strict=True)
        return [results[i] for i in range(len(fills))]

    def _scored(self, request: InfillRequest, results: Sequence[Infilled]) -> list[Infilled]:
        """Return fills with the scores by which quality `best` ranks them."""
        twice = self.options.reread and self.mode != "ar"
        prior = partial(length_posterior.log_prior, request.ranges, self.options.prior)
        batch = max(self.options.batch, TOGETHER)
        return scored(self.runner, results, prior, batch, twice=twice)

    def best(self, results: list[Infilled]) -> list[Infilled]:
        """Return the `n` most probable distinct fills, most probable first.

        Where lengths differ, a fill's probability is that of its length times its own given it.
        """
        best = distinct(sorted(results, key=log_joint, reverse=True))
        if self.options.reread:
            best = reread(self.runner, best, [log_joint(each) for each in best], self.options.batch)
        return best[: self.options.n]

    def _note(self, request: InfillRequest) -> str:
        """Return what a reader of any fill of a request must know."""
        limit = self.runner.model.limits.get(self.mode)
        known = f"mode {self.mode} {limit}" if limit else ""
        return joined(request.text.note, known, as_revealed(self.runner.model, self.mode))

    def _plan(self, number: int, request: InfillRequest) -> list[PlannedFill]:
        """Choose the lengths of each sample of a request."""
        seeds = [derived_seed(request.options.seed, i) for i in range(self.options.draws)]
        model, ranges, note = self.runner.model, request.ranges, self._note(request)
        choices: list[LengthChoice | None] = [None] * len(seeds)
        if all(low == high for low, high in ranges):
            vectors = [tuple(low for low, _ in ranges)] * len(seeds)
        elif not length_posterior.can_weigh(model):
            vectors = [length_posterior.middle(ranges, request.room)] * len(seeds)
            note = joined(note, length_posterior.missing_mode(self.runner.model))
        else:
            found = self._choose_lengths(request, seeds)
            choices, vectors = list(found), [choice.chosen for choice in found]
        samples = zip(seeds, vectors, choices, strict=True)
        return [
            PlannedFill(
                request, number, sample, seed, request.text.with_blanks(vector), choice, note
            )
            for sample, (seed, vector, choice) in enumerate(samples)
        ]

    def _choose_lengths(self, request: InfillRequest, seeds: Sequence[int]) -> list[LengthChoice]:
        """Choose lengths by the probability that the model gives them, one choice per seed."""
        options, ranges, room = self.options, request.ranges, request.room
        raw = options.quality in (None, "raw")
        most = length_posterior.MOST if raw else WEIGHED_LENGTHS
        found = length_posterior.candidates(ranges, room, options.prior, most)
        if found is None:
            found = length_posterior.explore(
                ranges,
                room,
                options.prior,
                lambda some: self._rough(request, some).tolist(),
                KEPT_LENGTHS,
            )
        found = self._with_room(request, found)
        if not raw and len(found.vectors) > KEPT_LENGTHS:
            kept = self._rough(request, found).topk(KEPT_LENGTHS).indices.sort().values
            found = LengthVectors([found.vectors[i] for i in kept.tolist()], found.log_prior[kept])
        weighed = self._weigh(request, found.vectors, options.length_draws, 0)
        return length_posterior.choose(found, weighed, options.lengths, seeds)

    def _rough(self, request: InfillRequest, found: LengthVectors) -> Tensor:
        """Return a rough estimate of the weight of each vector of lengths."""
        return self._weigh(request, found.vectors, 2, ROUGH).log_masses + found.log_prior

    def _with_room(self, request: InfillRequest, found: LengthVectors) -> LengthVectors:
        """Return the vectors of lengths that have room for all required tokens."""
        sampler = self.options.sampler
        enough = [
            can_hold(request.text, sum(vector), sampler, self.spelling) for vector in found.vectors
        ]
        if not any(enough):
            raise ValueError(
                f"{len(set(sampler.required))} tokens are required; the blanks' lengths "
                "do not reach that: write larger ranges"
            )
        vectors = [vector for vector, kept in zip(found.vectors, enough, strict=True) if kept]
        return LengthVectors(vectors, found.log_prior[enough])

    def _weigh(
        self, request: InfillRequest, vectors: Sequence[tuple[int, ...]], draws: int, family: int
    ) -> Masses:
        """Estimate the mass of each vector of lengths; `family` sets the random numbers apart."""
        given, rules, seed = request.text, self.rules, request.options.seed
        layouts = [given.with_blanks(vector) for vector in vectors]
        return length_posterior.masses(
            self.runner,
            layouts,
            draws=draws,
            seed=derived_seed(seed, family) if family else seed,
            rules=Sampler(banned=rules.banned, allowed=rules.allowed),
            only=lambda number, at: given.word_starts(layouts[number], at, self.spelling),
            batch=max(self.options.batch, TOGETHER),
        )

    def _fill(self, fills: Sequence[PlannedFill], callback: TokenCallback | None) -> list[Infilled]:
        """Draw one sample of each planned fill."""
        draft = self.options.best_of > 0  # not every sample is returned

        def pass_on(tokens: list[Token]) -> object:
            assert callback is not None
            return callback([self._placed(fills[each.sample], each, draft) for each in tokens])

        result = self.runner.fill(
            to_batch([fill.layout for fill in fills], self.runner.model.head.device),
            self.mode,
            sampler=[
                replace(self.rules, temperature=0.0) if fill.greedy else self.rules
                for fill in fills
            ],
            seed=[fill.seed for fill in fills],
            order=self.options.fill_order,
            only=lambda row, at: fills[row].request.text.word_starts(
                fills[row].layout, at, self.spelling
            ),
            callback=None if callback is None else pass_on,
            top=self.options.top,
            drafts=isinstance(self.callback, Callback),
        )
        candidates: list[Candidates] = (
            [()] * len(fills) if result.top is None else self.spelling.candidates(*result.top)
        )
        rows = zip(
            fills, result.tokens.tolist(), result.log_probs.tolist(), candidates, strict=True
        )
        return [self._infilled(*row) for row in rows]

    def _placed(self, fill: PlannedFill, token: Token, draft: bool) -> Token:
        """Return a token with its place in the text."""
        blank, index = fill.layout.place(token.position)
        return self.spelling.placed(
            token, fill.sample, draft or token.draft, text=fill.text, blank=blank, index=index
        )

    def _search(self, fill: PlannedFill) -> list[Infilled]:
        """Search for the most probable fills."""
        options, rules = self.options, self.rules
        assert options.search is not None
        method, number = parse_search(options.search)
        batch = to_batch([fill.layout], self.runner.model.head.device)

        def only(_: int, position: int) -> Sequence[int] | None:
            starts = fill.request.text.word_starts(fill.layout, position, self.spelling)
            if not rules.allowed:
                return starts
            return rules.allowed if starts is None else sorted(set(rules.allowed) & set(starts))

        found = search(
            self.runner.model,
            batch,
            self.mode,
            method=method,
            width=number if method == "beam" else options.batch,
            budget=number,
            n=number if options.reread or options.quality == "best" else options.n,
            banned=rules.banned,
            only=only,
            open_session=self.runner.open_session,
        )
        results = distinct(
            [
                self._infilled(
                    fill._replace(note=joined(fill.note, search_note(method, number, each))),
                    each.tokens.tolist(),
                    each.log_probs.tolist(),
                    candidates,
                )
                for each, candidates in zip(
                    found, self._searched_candidates(found, batch), strict=True
                )
            ]
        )
        if not options.reread or options.quality == "best":
            return results
        own = [each.log_prob for each in results]
        return reread(self.runner, results, own, options.batch)[: options.n]

    def _searched_candidates(self, found: Sequence[Found], batch: Batch) -> list[Candidates]:
        """Return the most likely tokens of each fill found, by whole passes."""
        if not self.options.top:
            return [()] * len(found)
        candidates: list[Candidates] = []
        for start in range(0, len(found), self.options.batch):
            tokens = torch.stack(
                [each.tokens for each in found[start : start + self.options.batch]]
            )
            context, lengths = batch.context.expand_as(tokens), batch.lengths.expand(len(tokens))
            fills = Batch(tokens, context, lengths)
            likely = partial(self.runner.model.candidates, fills, self.mode, self.options.top)
            candidates += self.spelling.candidates(*self.runner.call(likely))
        return candidates

    def _infilled(
        self, fill: PlannedFill, tokens: list[int], log_probs: list[float], candidates: Candidates
    ) -> Infilled:
        text, spans = spans_of(
            fill.request.text, fill.layout, tokens, log_probs, self.spelling, candidates=candidates
        )
        return Infilled(
            text=text,
            spans=spans,
            log_prob=sum(span.log_prob for span in spans),
            seed=fill.seed,
            mode=self.mode,
            token_ids=tuple(tokens[: len(fill.layout.tokens)]),
            length_choice=fill.choice,
            note=joined(fill.note, not_utf8("a fill", "".join(span.text for span in spans))),
        )
