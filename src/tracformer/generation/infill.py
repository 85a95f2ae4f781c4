"""From texts with blanks to ranked results.

What holds for every text that is filled or written: which tokens may come, and what its reader
must know.

A second opinion on fillings, from the same model: the whole text read from left to right.

    log p(filling | before, after) = log p(filling | before)
                                     + log p(after | before, filling) - log p(after | before)

Mode `car` answers the left side at once, knowing what follows from the start; mode `ar` answers the
right side, and notices where what follows no longer fits. The last term is the same for all
fillings of a text. Two estimates of one number err in different places: the sum of both makes up
for some of it.

From texts with blanks to texts without: lengths, then samples or a search, then text again.

Every sample of every text is one sequence with its own seed; sequences of like length go through
the filling loop together.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from tracformer.generation import length_posterior as unknown
from tracformer.generation.decode import check_reverse
from tracformer.generation.engine import Runner
from tracformer.generation.options import InfillOptions, parse_search
from tracformer.generation.orders import orders_in
from tracformer.generation.results import (
    Callback,
    Candidates,
    Infilled,
    LengthChoice,
    Token,
    TokenCallback,
    until_false,
)
from tracformer.generation.samplers import Sampler
from tracformer.generation.scheduler import Revealed, fit
from tracformer.generation.search import Found, require_exact, search
from tracformer.generation.template import (
    Frame,
    Laid,
    Template,
    frame,
    parse,
    parse_lengths,
    spans_of,
    stack,
)
from tracformer.generation.token_text import HALF, Spelling
from tracformer.model.base import BOUND, ConditionalModel
from tracformer.model.batch import Batch
from tracformer.rng import derived_seed


def text_rules(sampler: Sampler, spelling: Spelling, allowed: Sequence[int] = ()) -> Sampler:
    """The sampler, with every token banned that is not text and that it does not name itself."""
    named = {*sampler.allowed, *sampler.required, *allowed}
    return replace(
        sampler, banned=tuple(sorted({*sampler.banned, *(set(spelling.special) - named)}))
    )


def as_revealed(model: ConditionalModel, mode: str) -> str:
    """A note, where fillings in this mode have no probability of their own."""
    if model.answers[mode] != BOUND:
        return ""
    return (
        "log p is each token's when it was revealed, not that of the whole filling: score gives a "
        "bound on that"
    )


def not_utf8(what: str, text: str) -> str:
    """A note, where this is so."""
    return f"{what} holds bytes that are not UTF-8, shown as U+FFFD" if HALF in text else ""


def joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def word_start(of: Frame, laid: Laid, position: int, spelling: Spelling) -> tuple[int, ...] | None:
    """The tokens that may open a blank into which a space moved; None anywhere else."""
    starts = {start for start, moved in zip(laid.starts, of.spaced, strict=True) if moved}
    return spelling.word_starts if position in starts else None


def require_left_to_right(model: ConditionalModel) -> None:
    if "ar" not in model.config.modes:
        modes = ", ".join(model.config.modes)
        raise ValueError(
            "reread asks how texts read from left to right, in mode 'ar'; this model was trained "
            f"for: {modes}"
        )


def ranked(
    runner: Runner, results: Sequence[Infilled], own: Sequence[float], batch: int
) -> list[Infilled]:
    """Fillings of one text, the best by both opinions first.

    own: the first opinion on each, in nats.
    """
    again = left_to_right(runner, [result.token_ids for result in results], batch)
    # Asked in mode `ar`, the first opinion is a part of the second.
    both = [
        second if result.mode == "ar" else first + second
        for result, first, second in zip(results, own, again, strict=True)
    ]
    order = sorted(range(len(results)), key=lambda i: -both[i])
    said = (
        f"of {len(results)} candidates, ranked by how the whole text reads too: log p %.3f from "
        "left to right"
    )
    return [replace(results[i], note=joined(results[i].note, said % again[i])) for i in order]


@torch.no_grad()
def left_to_right(runner: Runner, sequences: Sequence[Sequence[int]], batch: int) -> list[float]:
    """log p of each whole sequence."""
    values: list[float] = []
    for start in range(0, len(sequences), batch):
        some = [
            Laid(list(sequence), [False] * len(sequence), (0,), (len(sequence),))
            for sequence in sequences[start : start + batch]
        ]
        asked = stack(some, runner.model.head.device)
        found = runner.call(partial(runner.model.log_prob, asked, "ar"))
        values += found.double().sum(1).tolist()
    return values


class Asked(NamedTuple):
    """One text: what is given, how many tokens each blank may have, and how many all of them."""

    frame: Frame
    ranges: list[tuple[int, int]]
    room: int


class Task(NamedTuple):
    """One text: what is given, and each sample's lengths."""

    frame: Frame
    lengths: list[tuple[int, ...]]
    choices: list[LengthChoice | None]
    note: str


class Job(NamedTuple):
    """One sequence to be filled."""

    text: int
    sample: int
    laid: Laid
    seed: int


def infill_texts(
    runner: Runner,
    spelling: Spelling,
    texts: Sequence[str | Template],
    options: InfillOptions,
    callback: TokenCallback | None = None,
) -> list[list[Infilled]]:
    check_options(runner.model, options)
    rules = text_rules(options.sampler, spelling)
    seeds = [derived_seed(options.seed, i) for i in range(options.draws)]
    tasks = [_task(runner, spelling, text, options, rules, seeds) for text in texts]
    assert options.mode is not None
    if isinstance(callback, Callback):
        for number, task in enumerate(tasks):
            for sample, each in enumerate(task.lengths):
                callback.lengths(number, sample, each)
    if options.search is not None:
        return [_searched(runner, spelling, task, options, rules) for task in tasks]
    jobs = [
        Job(number, sample, task.frame.blank(task.lengths[sample]), seed)
        for number, task in enumerate(tasks)
        for sample, seed in enumerate(seeds)
    ]
    told = None if callback is None else until_false(callback)
    filled: dict[tuple[int, int], Infilled] = {}
    # stable: little padding, and the order of samples among equals
    by_length = sorted(jobs, key=lambda job: len(job.laid.tokens))
    for start in range(0, len(jobs), options.batch):
        some = by_length[start : start + options.batch]
        for job, result in zip(
            some,
            _filled(
                runner, spelling, some, tasks, options, rules, told, isinstance(callback, Callback)
            ),
            strict=True,
        ):
            filled[job.text, job.sample] = result
    results = [
        [filled[number, sample] for sample in range(len(seeds))] for number in range(len(tasks))
    ]
    return [_best(runner, each, options) for each in results] if options.best_of else results


def check_options(model: ConditionalModel, options: InfillOptions) -> None:
    """What this model cannot be asked, whatever the text."""
    assert options.mode is not None
    if options.reread:
        require_left_to_right(model)
    if options.search is not None:
        require_exact(model, options.mode)
    elif options.mode == "diffusion":
        check_reverse(model.config, [options.sampler], options.fill_order)
    else:
        orders_in(options.mode, options.fill_order, 1)


def ask(
    model: ConditionalModel, spelling: Spelling, text: str | Template, options: InfillOptions
) -> Asked:
    """The text as the model is asked about it; or a ValueError, where it cannot be."""
    template = parse(text)
    of = frame(template, spelling, options.whole)
    wanted = [parse_lengths(content) for content in template.contents]
    ranges, room = of.fitting(wanted, model.config.max_length, options.max_blank)
    if not _holds(of, min(sum(high for _, high in ranges), room), options.sampler, spelling):
        hint = (
            " (behind a space a blank begins with a token that has one)" if any(of.spaced) else ""
        )
        count = len(set(options.sampler.required))
        raise ValueError(
            f"{count} tokens are required, and the blanks have no place for all of them{hint}: "
            "make them larger"
        )
    return Asked(of, ranges, room)


def _task(
    runner: Runner,
    spelling: Spelling,
    text: str | Template,
    options: InfillOptions,
    rules: Sampler,
    seeds: Sequence[int],
) -> Task:
    model = runner.model
    assert options.mode is not None
    of, ranges, room = ask(model, spelling, text, options)
    note = f"mode {options.mode} {limit}" if (limit := model.limits.get(options.mode)) else ""
    note = joined(note, as_revealed(model, options.mode))
    if all(low == high for low, high in ranges):
        return Task(of, [tuple(low for low, _ in ranges)] * len(seeds), [None] * len(seeds), note)
    if not unknown.can_weigh(model):
        missing = " and ".join(mode for mode in ("car", "ar") if mode not in model.config.modes)
        said = (
            f"lengths are the middle of their ranges: weighing them needs mode {missing}, which "
            "this model was not trained in"
        )
        return Task(
            of, [unknown.middle(ranges, room)] * len(seeds), [None] * len(seeds), joined(note, said)
        )
    choices = _choices(runner, spelling, of, ranges, room, options, rules, seeds)
    return Task(of, [choice.chosen for choice in choices], list(choices), note)


def _choices(
    runner: Runner,
    spelling: Spelling,
    of: Frame,
    ranges: Sequence[tuple[int, int]],
    room: int,
    options: InfillOptions,
    rules: Sampler,
    seeds: Sequence[int],
) -> list[LengthChoice]:
    found = unknown.candidates(ranges, room, options.prior, options.seed)
    enough = [_holds(of, sum(vector), options.sampler, spelling) for vector in found.vectors]
    if not any(enough):
        raise ValueError(
            f"{len(set(options.sampler.required))} tokens are required; the blanks' lengths do not "
            "reach that: write larger ranges"
        )
    found = unknown.Candidates(
        [vector for vector, kept in zip(found.vectors, enough, strict=True) if kept],
        found.log_prior[enough],
        found.log_share[enough],
    )
    layouts = [of.blank(vector) for vector in found.vectors]
    weighed = unknown.masses(
        runner.model,
        layouts,
        draws=options.length_draws,
        seed=options.seed,
        rules=Sampler(banned=rules.banned, allowed=rules.allowed),
        only=lambda layout, position: word_start(of, layouts[layout], position, spelling),
        batch=options.batch,
        runner=runner,
    )
    return unknown.choose(found, weighed, options.lengths, seeds)


def _holds(of: Frame, count: int, sampler: Sampler, spelling: Spelling) -> bool:
    """Do blanks of so many tokens together have a place for every required one?"""
    required, starts = set(sampler.required), sum(of.spaced)
    return len(required) <= count - starts or fit(
        required, count - starts, [required.intersection(spelling.word_starts)] * starts
    )


def _filled(
    runner: Runner,
    spelling: Spelling,
    jobs: Sequence[Job],
    tasks: Sequence[Task],
    options: InfillOptions,
    rules: Sampler,
    callback: TokenCallback | None,
    drafts: bool,
) -> list[Infilled]:
    assert options.mode is not None
    asked = stack([job.laid for job in jobs], runner.model.head.device)

    def told(revealed: list[Revealed]) -> object:
        assert callback is not None
        return callback(
            [
                _arrival(jobs[each.row], each, spelling, each.draft or options.best_of > 0)
                for each in revealed
            ]
        )

    result = runner.fill(
        asked,
        options.mode,
        sampler=rules,
        seed=[job.seed for job in jobs],
        order=options.fill_order,
        only=lambda row, position: word_start(
            tasks[jobs[row].text].frame, jobs[row].laid, position, spelling
        ),
        watch=None if callback is None else told,
        top=options.top,
        drafts=drafts,
    )
    candidates: list[Candidates] = (
        [()] * len(jobs) if result.top is None else spelling.candidates(*result.top)
    )
    rows = zip(jobs, result.tokens.tolist(), result.log_probs.tolist(), candidates, strict=True)
    return [
        _infilled(spelling, tasks[job.text], job, tokens, shares, likely, options.mode)
        for job, tokens, shares, likely in rows
    ]


def _searched(
    runner: Runner, spelling: Spelling, task: Task, options: InfillOptions, rules: Sampler
) -> list[Infilled]:
    assert options.search is not None
    assert options.mode is not None
    method, number = parse_search(options.search)
    laid = task.frame.blank(task.lengths[0])
    asked = stack([laid], runner.model.head.device)

    def only(row: int, position: int) -> Sequence[int] | None:
        starts = word_start(task.frame, laid, position, spelling)
        if not rules.allowed:
            return starts
        return rules.allowed if starts is None else sorted(set(rules.allowed) & set(starts))

    found = search(
        runner.model,
        asked,
        options.mode,
        method=method,
        width=number if method == "beam" else options.batch,
        budget=number,
        n=number if options.reread else options.n,
        banned=rules.banned,
        only=only,
        open_session=runner.session,
    )
    results = []
    for each, candidates in zip(
        found, _searched_candidates(runner, spelling, found, asked, options), strict=True
    ):
        if each.proven:
            said = (
                f"{method} search: proven; no filling of these lengths but those before it is more "
                "probable"
            )
        elif method == "beam":
            said = f"beam search of width {number}: approximate"
        else:
            said = (
                f"best-first search gave up after {each.expanded} nodes: not proven the most "
                "probable"
            )
        noted = task._replace(note=joined(task.note, said))
        job = Job(0, 0, laid, options.seed)
        results.append(
            _infilled(
                spelling,
                noted,
                job,
                each.tokens.tolist(),
                each.log_probs.tolist(),
                candidates,
                options.mode,
            )
        )
    results = _distinct(results)
    return (
        ranked(runner, results, [each.log_prob for each in results], options.batch)[: options.n]
        if options.reread
        else results
    )


def _searched_candidates(
    runner: Runner,
    spelling: Spelling,
    found: Sequence[Found],
    asked: Batch,
    options: InfillOptions,
) -> list[Candidates]:
    """Search keeps no candidates of what it passes by: whole passes over what it
    found give them.
    """
    if not options.top:
        return [()] * len(found)
    assert options.mode is not None
    candidates: list[Candidates] = []
    for start in range(0, len(found), options.batch):
        tokens = torch.stack([each.tokens for each in found[start : start + options.batch]])
        fills = Batch(tokens, asked.context.expand_as(tokens), asked.lengths.expand(len(tokens)))
        candidates += spelling.candidates(
            *runner.call(partial(runner.model.candidates, fills, options.mode, options.top))
        )
    return candidates


def _infilled(
    spelling: Spelling,
    task: Task,
    job: Job,
    tokens: list[int],
    log_probs: list[float],
    candidates: Candidates,
    mode: str,
) -> Infilled:
    length = len(job.laid.tokens)
    text, spans = spans_of(task.frame, job.laid, tokens, log_probs, spelling, candidates=candidates)
    note = joined(task.note, not_utf8("a filling", "".join(span.text for span in spans)))
    log_prob = sum(span.log_prob for span in spans)
    return Infilled(
        text,
        spans,
        log_prob,
        job.seed,
        mode,
        tuple(tokens[:length]),
        task.choices[job.sample],
        note,
    )


def _best(runner: Runner, results: list[Infilled], options: InfillOptions) -> list[Infilled]:
    """The most probable; where lengths differ, by the posterior of the length times the filling's
    probability given it.
    """

    def own(result: Infilled) -> float:
        choice = result.length_choice
        return result.log_prob + (
            choice.log_probabilities[choice.lengths.index(choice.chosen)]
            if choice is not None
            else 0.0
        )

    best = _distinct(sorted(results, key=own, reverse=True))
    return (
        ranked(runner, best, [own(each) for each in best], options.batch)
        if options.reread
        else best
    )[: options.n]


def _distinct(results: list[Infilled]) -> list[Infilled]:
    """The first of each text."""
    first: dict[str, Infilled] = {}
    for result in results:
        first.setdefault(result.text, result)
    return list(first.values())


def _arrival(job: Job, revealed: Revealed, spelling: Spelling, draft: bool) -> Token:
    return spelling.arrival(
        revealed, job.text, job.sample, *job.laid.place(revealed.position), draft
    )
