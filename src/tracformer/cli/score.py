"""How probable are the [[marked]] parts of a text, given the rest?

    tracformer score -m runs/stories 'Mia carried the [[blue lamp]] to the market.'
    tracformer score -m runs/stories --mode ac --file marked.txt --json > scores.jsonl

Each token's natural log-probability, their sum, perplexity a token and bits a byte of the marked
text; and what kind of number that is: the exact joint, the marginal of each token, or a bound. All
texts are checked before the first is scored. Empty lines of a file are passed over; under --json
every object names its `line`.
"""

import argparse
import math
from typing import TYPE_CHECKING

from tracformer.cli import arguments as sampling
from tracformer.cli import arguments as texts
from tracformer.cli import output as show

if TYPE_CHECKING:
    from tracformer.generation.results import Scored

KINDS = {
    "exact": "exact joint",
    "marginal": "sum of marginals, each token given the unmarked text alone",
    "bound": "lower bound on the joint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    texts.add_texts(parser)
    texts.add_model(parser)
    texts.add_weights(parser)
    texts.add_device(parser)
    parser.add_argument(
        "--mode",
        help=(
            "car: exact joint; ac: marginals; ar: sees only what comes before (default: the "
            "model's best)"
        ),
    )
    parser.add_argument(
        "--fragment",
        action="store_true",
        help="the text is cut from a longer one: it need not begin or end as a text does",
    )
    parser.add_argument(
        "--batch", type=int, default=16, metavar="N", help="sequences at once (default: 16)"
    )
    parser.add_argument(
        "--draws",
        type=int,
        metavar="N",
        help="where the number is a bound: random draws for its estimate",
    )
    parser.add_argument("--seed", type=int, default=0, help="of these draws (default: 0)")
    show.add_output(parser, fills=False)


def run(arguments: argparse.Namespace) -> int:
    for name in ("batch", "draws"):
        sampling.require_positive(arguments, name)
    folder = arguments.model or texts.default_model()
    lines = texts.read_texts(arguments)
    lm = texts.open_model(folder, arguments.weights, arguments.device)
    colour = show.wants_colour(arguments)
    question = {"mode": arguments.mode, "whole": not arguments.fragment}
    lm.check_score(**question)
    texts.check(lines, lambda text: lm.check_score(text, **question))
    options = {
        **question,
        "batch": arguments.batch,
        "draws": arguments.draws,
        "seed": arguments.seed,
    }
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.text]
    with show.progress(len(numbered), "texts") as bar:
        for start in range(0, len(numbered), arguments.batch):
            some = numbered[start : start + arguments.batch]
            scores = texts.answer(
                [line for _, line in some], lambda asked: lm.score(asked, **options)
            )
            bar.clear()
            for (number, _), scored in zip(some, scores, strict=True):
                if arguments.json:
                    show.put_json({"line": number, **scored.to_dict()})
                else:
                    show.put(_report(scored, colour))
            bar.update(len(some))
    return 0


def _report(scored: "Scored", colour: bool) -> str:
    text = (
        show.shaded(scored.text, scored.spans)
        if colour
        else show.visible(show.marked(scored.text, scored.spans))
    )
    rows = [("token", "log p", "p")]
    for span in scored.spans:
        rows += [
            (repr(token), f"{log_prob:.4f}", f"{math.exp(log_prob):.4f}")
            for token, log_prob in zip(span.tokens, span.log_probs, strict=True)
        ]
    count = f"{scored.tokens} token{'s' if scored.tokens != 1 else ''}"
    error = f" ± {scored.standard_error:.4f}" if scored.standard_error is not None else ""
    total = (
        f"log p {scored.log_prob:.4f}{error} nats ({scored.mode}: "
        f"{KINDS.get(scored.kind, scored.kind)}), {count}, "
        f"perplexity {scored.perplexity:.4g}, {scored.bits_per_byte:.4g} bits per byte"
    )
    return "\n".join(
        [
            text,
            *(f"  {line}" for line in show.table(rows)),
            total + (f" ({scored.note})" if scored.note else ""),
        ]
    )
