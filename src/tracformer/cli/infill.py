"""Fill the blanks of texts and report how probable each fill is.

    tracformer infill 'Mia carried the [[5]] to the market.'
    tracformer infill -n 3 --top-p 0.9 'Mia carried the [[]] to the market.'
    tracformer infill --quality raw --seed 7 'Mia carried the [[5]] to the market.'
    tracformer infill --order entropy --stream 'Mia carried the [[5]] home.'
    tracformer infill --file blanks.txt --json > filled.jsonl
    tracformer infill --file many.parquet --field story --out filled --workers 4

A blank is [[]] (any length), [[5]] (5 tokens) or [[3-8]] (3 to 8 tokens). In a text without any of
these, [MASK], <mask> or ____ is a blank of any length.

How a fill is made is the model's setting unless --quality says: best compares candidates of a beam
search and of samples, fast draws one sample from the nucleus, raw one from the whole distribution.
Options of the sampler or of the search replace best; --stream uses fast.

On a terminal, fills are shaded by probability and followed by a line of numbers. Elsewhere only the
completed text is printed; --marks keeps the brackets and --json prints every number. Texts are
filled in batches, each as it would be alone, and all are checked before the first is filled. An
empty line gives an empty line, and each other line gives as many lines as -n asks for; --json
prints objects that name their line.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracformer.cli import Command, output
from tracformer.cli import arguments as shared
from tracformer.generation.request_options import InfillOptions, SampleOptions, ScoreOptions
from tracformer.options import add_arguments as add_options
from tracformer.options import from_arguments
from tracformer.progress import ProgressBar

if TYPE_CHECKING:
    from tracformer.generation.infill import InfillRequest
    from tracformer.generation.language_model import LanguageModel
    from tracformer.generation.results import Infilled, Sampled, Scored, Span
    from tracformer.generation.token_text import Spelling

SCORE_DESCRIPTION = """Score the [[marked]] parts of texts, given the rest, or whole texts.

    tracformer score 'Mia carried the [[blue lamp]] to the market.'
    tracformer score 'Mia carried the blue lamp to the market.'
    tracformer score --mode ac --file marked.txt --json > scores.jsonl
    tracformer score --file many.jsonl --out scores --workers 4

Prints the natural log-probability of each marked token, their sum, the perplexity per token and the
bits per byte of the marked text; and whether the sum is the exact joint log-probability, a sum of
marginals or a bound. All texts are checked before the first is scored. Empty lines of a file are
skipped; --json prints objects that name their line.
"""

SAMPLE_DESCRIPTION = """Write texts from nothing, or continue a prompt.

    tracformer sample -n 3
    tracformer sample --prompt 'Mia carried' --max-tokens 40 --stream

A text ends where the model ends it, or at --max-tokens. On a terminal, what was written is shaded
by probability and followed by a line of numbers. Elsewhere each text is followed by a newline;
--json keeps newlines inside a text apart from those between texts.
"""

GENERAL = ("quality", "n", "seed", "mode", "whole", "top", "batch")
ORDER = ("order", "k", "threshold", "steps")
BEST = ("best_of", "search", "reread")
LENGTHS = ("lengths", "max_blank", "length_draws")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer infill`."""
    shared.add_texts(parser)
    shared.add_model(parser)
    shared.add_weights(parser)
    shared.add_device(parser)
    add_options(parser, InfillOptions, GENERAL)
    output.add_output(parser, fills=True)
    parser.add_argument(
        "--stream", action="store_true", help="print tokens as they arrive (one text, one fill)"
    )
    shared.add_sampling(parser)
    add_options(parser.add_argument_group("order of filling"), InfillOptions, ORDER)
    add_options(parser.add_argument_group("most probable fills"), InfillOptions, BEST)
    add_options(parser.add_argument_group("blanks without a fixed length"), InfillOptions, LENGTHS)
    shared.add_job(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer infill`."""
    from tracformer.generation.template import parse

    given = from_arguments(InfillOptions, arguments) | shared.sampler_options(arguments)
    options = InfillOptions.make(**given)
    _check_output(arguments, options)
    if arguments.out is not None:
        return _run_job(arguments, options)
    shared.check_no_job(arguments)
    lines = shared.read_texts(arguments)
    if arguments.stream and len(lines) > 1:
        raise ValueError(f"--stream shows one text as it is filled; there are {len(lines)}")
    templates = []
    for line in lines:
        if line.text:
            try:  # before the model is loaded
                template = parse(line.text)
                template.lengths  # noqa: B018 - checks them
            except ValueError as mistake:
                raise ValueError(f"{line.where}{mistake}") from mistake
            templates.append(template)
            if template.note and not (arguments.json or output.is_terminal(sys.stdout)):
                # elsewhere the note stands beside the result
                print(f"{line.where}{template.note}", file=sys.stderr)
    lm = shared.open_model(
        arguments.model or shared.default_model(),
        arguments.weights,
        arguments.device,
        arguments.verify,
    )
    options = InfillOptions.make(options, **shared.token_rules(arguments, lm.tokenizer))
    where = [line.where for line in lines if line.text]
    requests = lm.infill_requests(templates, options=options, where=where, stream=arguments.stream)
    if arguments.stream:
        _stream(lm, requests[0], arguments)
    else:
        _fill_all(lm, lines, requests, arguments)
    return 0


def _run_job(arguments: argparse.Namespace, options: InfillOptions) -> int:
    """Fill the rows of a large file."""
    if arguments.stream or arguments.marks:
        raise ValueError("--out writes JSON lines; leave --stream and --marks out")
    if arguments.ban or arguments.require:
        from tracformer.data import load_tokenizer
        from tracformer.loading import find_folder

        folder = find_folder(arguments.model or shared.default_model())
        rules = shared.token_rules(arguments, load_tokenizer(folder))
        options = InfillOptions.make(options, **rules)
    return shared.run_job(arguments, "infill", options)


def _check_output(arguments: argparse.Namespace, options: InfillOptions) -> None:
    """Raise a ValueError if output options contradict each other."""
    if arguments.marks and arguments.json:
        raise ValueError("--marks is for plain text; --json names every fill's place in `spans`")
    reasons = {
        "--json": arguments.json,
        f"-n {options.n}": options.n > 1,
        "--best-of": options.best_of > 0,
        "--search": options.search is not None,
        "--quality best": options.quality == "best",
    }
    for name, is_given in reasons.items():
        if arguments.stream and is_given:
            raise ValueError(
                f"--stream shows one fill as it arrives, which {name} does not give; "
                "leave one of them out (--stream takes --quality fast or raw)"
            )


def _fill_all(
    lm: "LanguageModel",
    lines: list[shared.InputLine],
    requests: list["InfillRequest"],
    arguments: argparse.Namespace,
) -> None:
    """Fill all texts and print their fills in order."""
    colour = output.wants_colour(arguments)
    results = shared.by_batch(requests, requests[0].options.batch, lm.infill)
    n = requests[0].options.n
    # on a terminal the results themselves show how far the work is
    apart = len(lines) == 1 or output.is_terminal(sys.stdout)
    with ProgressBar("filling", len(lines), enabled=not apart) as bar:
        for line in lines:
            with ProgressBar("filling", unit="seconds", delay=1.0, enabled=apart):
                filled = next(results) if line.text else []
            for result in filled:
                if arguments.json:
                    output.put_json({"line": line.number, **result.to_dict()})
                else:
                    output.put(_shown(result, arguments.marks, colour))
                    _put_numbers(result, colour)
            if len(filled) < n and not arguments.json:
                output.put("\n" * (n - len(filled) - 1))
            bar.update()


def _shown(result: "Infilled", marks: bool, colour: bool) -> str:
    """Return a result as it is printed: shaded, marked or plain."""
    if colour and not marks:
        return output.shaded(result.text, result.spans)
    return output.for_stdout(_plain(result, marks))


def _plain(result: "Infilled", marks: bool) -> str:
    """Return the completed text; with marks, a text that `tracformer score` reads."""
    if not marks:
        return result.text
    from tracformer.generation.template import write

    edges = [edge for span in result.spans for edge in (span.start, span.stop)]
    bounds = zip([0, *edges[1::2]], [*edges[0::2], len(result.text)], strict=True)
    try:
        return write(
            [result.text[start:stop] for start, stop in bounds],
            [span.text for span in result.spans],
        )
    except ValueError:  # a fill that ends with a bracket
        return output.marked(result.text, result.spans)


def _put_numbers(result: "Infilled", colour: bool) -> None:
    """Print a line of numbers about a fill, on a terminal."""
    tokens = sum(len(span.token_ids) for span in result.spans)
    facts = [
        f"log p {result.log_prob:.3f}",
        output.per_token(result.log_prob, tokens),
        f"{tokens} token{'s' if tokens != 1 else ''}",
        result.mode,
        f"seed {result.seed}",
    ]
    if result.score is not None:
        facts.insert(1, f"score {result.score:.3f}")
    if (choice := result.length_choice) is not None:
        chosen = ", ".join(map(str, choice.chosen))
        facts.append(f"length {chosen} of {len(choice.lengths)} weighed")
    output.put_facts(facts, result.note, colour)


def _stream(lm: "LanguageModel", request: "InfillRequest", arguments: argparse.Namespace) -> None:
    """Fill one text and print its tokens as they arrive."""
    from tracformer.generation.template import escaped

    given = request.text.texts  # as the model sees them: spaces may belong to blanks
    colour, marks = output.wants_colour(arguments), arguments.marks
    if request.options.fill_order is None:
        writer = output.StreamWriter(
            escaped(given) if marks else given, request.text.reader(lm.spelling), colour, marks
        )
        [result] = lm.infill(request, callback=writer)
        writer.finish(_plain(result, marks))
    elif output.is_terminal(sys.stdout):
        counts = [low if low == high else None for low, high in request.ranges]
        canvas = output.Canvas(given, counts, colour)
        [result] = lm.infill(request, callback=canvas)
        canvas.finish(_shown(result, marks, colour))
    else:
        [result] = lm.infill(request)
        output.put(_plain(result, marks))
    _put_numbers(result, colour)


# ---- score

KINDS = {
    "exact": "exact joint",
    "marginal": "sum of marginals, each token given the unmarked text alone",
    "bound": "lower bound on the joint",
}


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer score`."""
    shared.add_texts(parser)
    shared.add_model(parser)
    shared.add_weights(parser)
    shared.add_device(parser)
    add_options(parser, ScoreOptions)
    output.add_output(parser)
    shared.add_job(parser)


def run_score(arguments: argparse.Namespace) -> int:
    """Run `tracformer score`."""
    options = ScoreOptions.make(**from_arguments(ScoreOptions, arguments))
    if arguments.out is not None:
        return shared.run_job(arguments, "score", options)
    shared.check_no_job(arguments)
    lines = [line for line in shared.read_texts(arguments) if line.text]
    lm = shared.open_model(
        arguments.model or shared.default_model(),
        arguments.weights,
        arguments.device,
        arguments.verify,
    )
    requests = lm.score_requests(
        [line.text for line in lines], options=options, where=[line.where for line in lines]
    )
    colour = output.wants_colour(arguments)
    quiet = len(lines) == 1 or output.is_terminal(sys.stdout)
    scores = shared.by_batch(requests, options.batch, lm.score)
    with ProgressBar("scoring", len(lines), enabled=not quiet) as bar:
        for line, scored in zip(lines, scores, strict=True):
            if arguments.json:
                output.put_json({"line": line.number, **scored.to_dict()})
            else:
                output.put(_shown_score(scored, colour))
            bar.update()
    return 0


def _shown_score(scored: "Scored", colour: bool) -> str:
    """Return a score as lines of text."""
    if colour:
        text = output.shaded(scored.text, scored.spans)
    else:
        text = output.visible(output.marked(scored.text, scored.spans))
    rows = [("token", "log p", "p")]
    for span in scored.spans:
        rows += [
            (repr(token), f"{log_prob:.4f}", f"{math.exp(log_prob):.4f}")
            for token, log_prob in zip(span.tokens, span.log_probs, strict=True)
        ]
    count = f"{scored.tokens} token{'s' if scored.tokens != 1 else ''}"
    error = f" ± {scored.standard_error:.4f}" if scored.standard_error is not None else ""
    whole = [(span.start, span.stop) for span in scored.spans] == [(0, len(scored.text))]
    total = (
        f"{'whole text: ' if whole else ''}log p {scored.log_prob:.4f}{error} nats ({scored.mode}: "
        f"{KINDS.get(scored.kind, scored.kind)}), {count}, "
        f"perplexity {scored.perplexity:.4g}, {scored.bits_per_byte:.4g} bits per byte"
    )
    table = [f"  {line}" for line in output.table(rows)]
    return "\n".join([text, *table, total + (f" ({scored.note})" if scored.note else "")])


# ---- sample


def add_sample_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer sample`."""
    shared.add_model(parser)
    shared.add_weights(parser)
    shared.add_device(parser)
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="beginning of the text (default: none)"
    )
    add_options(parser, SampleOptions)
    output.add_output(parser)
    parser.add_argument(
        "--stream", action="store_true", help="print tokens as they arrive (one text)"
    )
    shared.add_sampling(parser)


def run_sample(arguments: argparse.Namespace) -> int:
    """Run `tracformer sample`."""
    given = from_arguments(SampleOptions, arguments) | shared.sampler_options(arguments)
    options = SampleOptions.make(**given)
    if arguments.stream and (arguments.json or options.n > 1):
        raise ValueError(
            "--stream shows one text as it is written, so it cannot be combined with "
            f"{'--json' if arguments.json else f'-n {options.n}'}"
        )
    prompt = shared.argument_text(arguments.prompt, "--prompt")
    lm = shared.open_model(
        arguments.model or shared.default_model(),
        arguments.weights,
        arguments.device,
        arguments.verify,
    )
    options = SampleOptions.make(options, **shared.token_rules(arguments, lm.tokenizer))
    colour = output.wants_colour(arguments)
    if arguments.stream:
        _stream_text(lm, prompt, options, colour)
        return 0
    for result in lm.sample(prompt=prompt, options=options):
        if arguments.json:
            output.put_json(result.to_dict())
        else:
            span = written(result, lm.spelling, prompt)
            text = output.shaded(result.text, [span]) if colour else output.for_stdout(result.text)
            output.put(text)
            _put_facts(result, colour)
    return 0


def _stream_text(lm: "LanguageModel", prompt: str, options: SampleOptions, colour: bool) -> None:
    """Write one text and print its tokens as they arrive."""
    from tracformer.generation.continuation import prompted

    given = prompted(prompt, lm.spelling)  # its last space may belong to what is written

    def read(fills: Sequence[Sequence[int]]) -> str:
        return given.reader(lm.spelling)([[i for i in fills[0] if i not in lm.spelling.special]])

    writer = output.StreamWriter(given.texts, read, colour)
    [result] = lm.sample(prompt=prompt, options=options, callback=writer)
    writer.finish(result.text)
    _put_facts(result, colour)


def written(result: "Sampled", spelling: "Spelling", prompt: str) -> "Span":
    """Return what was written after the prompt, without the end of text."""
    from tracformer.generation.continuation import prompted
    from tracformer.generation.results import Span

    count = len(result.token_ids) - result.ended
    ids = result.token_ids[:count]
    given = prompted(prompt, spelling)
    text = given.reader(spelling)([ids])
    start = len(result.text) - len(text) if result.text.endswith(text) else 0
    tokens = tuple(
        spelling.token(token, first=i == 0 and not given.ids[0]) for i, token in enumerate(ids)
    )
    return Span(start, len(result.text), result.text[start:], ids, tokens, result.log_probs[:count])


def _put_facts(result: "Sampled", colour: bool) -> None:
    """Print a line of numbers about a text, on a terminal."""
    tokens = len(result.token_ids)
    facts = [
        f"log p {result.log_prob:.3f}",
        output.per_token(result.log_prob, tokens),
        f"{tokens} tokens, {'ended' if result.ended else 'cut off'}",
        result.mode,
        f"seed {result.seed}",
    ]
    output.put_facts(facts, result.note, colour)


score = Command(SCORE_DESCRIPTION, add_score_arguments, run_score)
sample = Command(SAMPLE_DESCRIPTION, add_sample_arguments, run_sample)
