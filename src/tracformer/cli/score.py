"""Score the [[marked]] parts of texts, given the rest; or whole texts, where nothing is marked.

    tracformer score 'Mia carried the [[blue lamp]] to the market.'
    tracformer score 'Mia carried the blue lamp to the market.'
    tracformer score --mode ac --file marked.txt --json > scores.jsonl
    tracformer score --file many.jsonl --out scores --workers 4

Prints the natural log-probability of each marked token, their sum, the perplexity per token and the
bits per byte of the marked text; and whether the sum is the exact joint log-probability, a sum of
marginals or a bound. All texts are checked before the first is scored. Empty lines of a file are
skipped; --json prints objects that name their line.
"""

import argparse
import math
import sys
from typing import TYPE_CHECKING

from tracformer.cli import arguments as shared
from tracformer.cli import output
from tracformer.generation.request_options import ScoreOptions
from tracformer.options import add_arguments as add_options
from tracformer.options import from_arguments
from tracformer.progress import ProgressBar

if TYPE_CHECKING:
    from tracformer.generation.results import Scored

KINDS = {
    "exact": "exact joint",
    "marginal": "sum of marginals, each token given the unmarked text alone",
    "bound": "lower bound on the joint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer score`."""
    shared.add_texts(parser)
    shared.add_model(parser)
    shared.add_weights(parser)
    shared.add_device(parser)
    add_options(parser, ScoreOptions)
    output.add_output(parser)
    shared.add_job(parser)


def run(arguments: argparse.Namespace) -> int:
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
                output.put(_report(scored, colour))
            bar.update()
    return 0


def _report(scored: "Scored", colour: bool) -> str:
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
