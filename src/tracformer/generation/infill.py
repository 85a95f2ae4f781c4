"""Fill texts with blanks: from requests to ranked results.

- `InfillRequest`: a text and its options, tokenized and checked once.
- `InfillRun`: one call of `LanguageModel.infill`. It chooses lengths (`length_posterior`), draws
  samples (`decode`) or searches (`search`), ranks the fills and turns them into `Infilled`.

Every sample of every text is one sequence with its own seed; sequences of similar length are filled
in one batch.

With `reread`, candidates are ranked by two estimates of one number, from the same model:

    log p(fill | before, after) = log p(fill | before)
                                  + log p(after | before, fill) - log p(after | before)

Mode `car` gives the left side: it knows what follows from the start. Mode `ar` gives the right
side, and notices where what follows no longer fits. The last term is the same for all fills of a
text. The two estimates err in different places, so their sum is better than either.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, Self

import torch

from tracformer.generation import length_posterior
from tracformer.generation.decode import Runner, check_reverse
from tracformer.generation.length_posterior import LengthVectors
from tracformer.generation.orders import LeftToRight, orders_in
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
from tracformer.generation.search import Found, require_exact, search
from tracformer.generation.template import (
    BlankLayout,
    Template,
    TokenizedText,
    parse,
    spans_of,
    to_batch,
    tokenize,
)
from tracformer.generation.token_text import HALF, Spelling
from tracformer.model.base import BOUND, ConditionalModel, check_mode, preferred_mode
from tracformer.model.batch import Batch
from tracformer.rng import derived_seed


def resolve_options(model: ConditionalModel, options: InfillOptions) -> InfillOptions:
    """Return the options with the mode that is used, checked against the model.

    Raises:
        ValueError: The model cannot do what the options ask for, whatever the text.
    """
    mode, order = options.mode, options.fill_order
    if mode is None:
        other_order = order not in (None, LeftToRight()) and "ac" in model.config.modes
        mode = "ac" if other_order else preferred_mode(model.config)
    check_mode(model.config, mode)
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
            given = tokenize(template, spelling, options.whole)
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

    def best(self, results: list[Infilled]) -> list[Infilled]:
        """Return the `n` most probable distinct fills, most probable first.

        Where lengths differ, a fill's probability is that of its length times its own given it.
        """

        def own(result: Infilled) -> float:
            choice = result.length_choice
            if choice is None:
                return result.log_prob
            chosen = choice.lengths.index(choice.chosen)
            return result.log_prob + choice.log_probabilities[chosen]

        best = _distinct(sorted(results, key=own, reverse=True))
        if self.options.reread:
            best = reread(self.runner, best, [own(each) for each in best], self.options.batch)
        return best[: self.options.n]

    def _plan(self, number: int, request: InfillRequest) -> list[PlannedFill]:
        """Choose the lengths of each sample of a request."""
        model, ranges = self.runner.model, request.ranges
        seeds = [derived_seed(request.options.seed, i) for i in range(self.options.draws)]
        limit = model.limits.get(self.mode)
        note = joined(f"mode {self.mode} {limit}" if limit else "", as_revealed(model, self.mode))
        choices: list[LengthChoice | None] = [None] * len(seeds)
        if all(low == high for low, high in ranges):
            vectors = [tuple(low for low, _ in ranges)] * len(seeds)
        elif not length_posterior.can_weigh(model):
            missing = " and ".join(mode for mode in ("car", "ar") if mode not in model.config.modes)
            vectors = [length_posterior.middle(ranges, request.room)] * len(seeds)
            note = joined(
                note,
                f"lengths are the middle of their ranges: weighing them needs mode {missing}, "
                "which this model was not trained in",
            )
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
        options, given, rules = self.options, request.text, self.rules
        found = length_posterior.candidates(
            request.ranges, request.room, options.prior, request.options.seed
        )
        enough = [
            can_hold(given, sum(vector), options.sampler, self.spelling) for vector in found.vectors
        ]
        if not any(enough):
            raise ValueError(
                f"{len(set(options.sampler.required))} tokens are required; the blanks' lengths "
                "do not reach that: write larger ranges"
            )
        found = LengthVectors(
            [vector for vector, kept in zip(found.vectors, enough, strict=True) if kept],
            found.log_prior[enough],
            found.log_share[enough],
        )
        layouts = [given.with_blanks(vector) for vector in found.vectors]
        weighed = length_posterior.masses(
            self.runner,
            layouts,
            draws=options.length_draws,
            seed=request.options.seed,
            rules=Sampler(banned=rules.banned, allowed=rules.allowed),
            only=lambda number, at: given.word_starts(layouts[number], at, self.spelling),
            batch=options.batch,
        )
        return length_posterior.choose(found, weighed, options.lengths, seeds)

    def _fill(self, fills: Sequence[PlannedFill], callback: TokenCallback | None) -> list[Infilled]:
        """Draw one sample of each planned fill."""
        draft = self.options.best_of > 0  # not every sample is returned

        def pass_on(tokens: list[Token]) -> object:
            assert callback is not None
            return callback([self._placed(fills[each.sample], each, draft) for each in tokens])

        result = self.runner.fill(
            to_batch([fill.layout for fill in fills], self.runner.model.head.device),
            self.mode,
            sampler=self.rules,
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
            n=number if options.reread else options.n,
            banned=rules.banned,
            only=only,
            open_session=self.runner.open_session,
        )
        results = _distinct(
            [
                self._infilled(
                    fill._replace(note=joined(fill.note, _search_note(method, number, each))),
                    each.tokens.tolist(),
                    each.log_probs.tolist(),
                    candidates,
                )
                for each, candidates in zip(
                    found, self._searched_candidates(found, batch), strict=True
                )
            ]
        )
        if not options.reread:
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


# ---- rules and notes, also of texts that are sampled


def text_rules(sampler: Sampler, spelling: Spelling, allowed: Sequence[int] = ()) -> Sampler:
    """Return the sampler with special tokens banned, except those that it names or `allowed`."""
    named = {*sampler.allowed, *sampler.required, *allowed}
    banned = {*sampler.banned, *(set(spelling.special) - named)}
    return replace(sampler, banned=tuple(sorted(banned)))


def can_hold(given: TokenizedText, count: int, sampler: Sampler, spelling: Spelling) -> bool:
    """Return whether blanks of `count` tokens in all have places for every required token.

    A blank that a space moved into begins with a word start.
    """
    required, starts = set(sampler.required), sum(given.spaced)
    if len(required) <= count - starts:
        return True
    at_starts = len(required.intersection(spelling.word_starts))
    return len(required) <= count - starts + min(starts, at_starts)


def as_revealed(model: ConditionalModel, mode: str) -> str:
    """Return a note if fills in this mode have no probability of their own."""
    if model.answers[mode] != BOUND:
        return ""
    return (
        "log p is each token's when it was filled in, not that of the whole fill: score gives a "
        "bound on that"
    )


def not_utf8(what: str, text: str) -> str:
    """Return a note if a text holds bytes that are not UTF-8."""
    return f"{what} holds bytes that are not UTF-8, shown as U+FFFD" if HALF in text else ""


def joined(*notes: str) -> str:
    """Return notes as one, empty ones left out."""
    return "; ".join(note for note in notes if note)


def _search_note(method: str, number: int, found: Found) -> str:
    if found.proven:
        return (
            f"{method} search: proven; no fill of these lengths but those before it is more "
            "probable"
        )
    if method == "beam":
        return f"beam search of width {number}: approximate"
    return f"best-first search gave up after {found.expanded} nodes: not proven the most probable"


# ---- ranking


def reread(
    runner: Runner, results: Sequence[Infilled], own: Sequence[float], batch: int
) -> list[Infilled]:
    """Return fills of one text, ranked by both estimates of their log-probability.

    Args:
        runner: Runs the model.
        results: The fills.
        own: The first estimate of each, in nats.
        batch: Number of sequences per pass.
    """
    again = left_to_right(runner, [result.token_ids for result in results], batch)
    # the first estimate in mode `ar` is part of the second
    both = [
        second if result.mode == "ar" else first + second
        for result, first, second in zip(results, own, again, strict=True)
    ]
    order = sorted(range(len(results)), key=lambda i: -both[i])
    note = (
        f"of {len(results)} candidates, ranked also by the whole text: log p %.3f from left to "
        "right"
    )
    return [replace(results[i], note=joined(results[i].note, note % again[i])) for i in order]


@torch.no_grad()
def left_to_right(runner: Runner, sequences: Sequence[Sequence[int]], batch: int) -> list[float]:
    """Return the log-probability of each whole sequence in mode `ar`."""
    values: list[float] = []
    for start in range(0, len(sequences), batch):
        some = [
            BlankLayout(list(sequence), [False] * len(sequence), (0,), (len(sequence),))
            for sequence in sequences[start : start + batch]
        ]
        asked = to_batch(some, runner.model.head.device)
        found = runner.call(partial(runner.model.log_prob, asked, "ar"))
        values += found.double().sum(1).tolist()
    return values


def _distinct(results: Sequence[Infilled]) -> list[Infilled]:
    """Return the first result of each text."""
    first: dict[str, Infilled] = {}
    for result in results:
        first.setdefault(result.text, result)
    return list(first.values())
