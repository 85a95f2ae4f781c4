"""Write from nothing, or go on from a prompt.

    tracformer sample -m runs/stories -n 3
    tracformer sample -m runs/stories --prompt 'Mia carried' --max-tokens 40 --stream

A text ends where the model ends it, or at --max-tokens. On a terminal what was written is shaded by
probability, with a line of numbers below; elsewhere each text is followed by a newline (--json
tells newlines inside a text from those between texts).
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracformer.cli import arguments as sampling
from tracformer.cli import arguments as texts
from tracformer.cli import output as show

if TYPE_CHECKING:
    from tracformer.generation.language_model import LanguageModel
    from tracformer.generation.results import Sampled, Span
    from tracformer.generation.token_text import Spelling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    texts.add_model(parser)
    texts.add_weights(parser)
    texts.add_device(parser)
    parser.add_argument("-n", type=int, default=1, metavar="N", help="texts (default: 1)")
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="what the text begins with (default: nothing)"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens to write (default: as many as the model can take)",
    )
    parser.add_argument(
        "--batch", type=int, default=16, metavar="N", help="texts at once (default: 16)"
    )
    show.add_output(parser, fills=False)
    parser.add_argument("--stream", action="store_true", help="show tokens as they come (one text)")
    sampling.add_sampling(parser)


def run(arguments: argparse.Namespace) -> int:
    sampling.check_sampling(arguments)
    for name in ("n", "batch", "max_tokens"):
        sampling.require_positive(arguments, name)
    if arguments.stream and (arguments.json or arguments.n > 1):
        raise ValueError(
            "--stream shows one text as it comes, so it does not go with "
            f"{'--json' if arguments.json else f'-n {arguments.n}'}"
        )
    lm = texts.open_model(
        arguments.model or texts.default_model(), arguments.weights, arguments.device
    )
    options: dict[str, Any] = {
        "prompt": texts.argument_text(arguments.prompt, "--prompt"),
        "max_tokens": arguments.max_tokens,
        "sampler": sampling.build_sampler(arguments, lm.tokenizer),
        "seed": arguments.seed,
        "batch": arguments.batch,
    }
    colour = show.wants_colour(arguments)
    if arguments.stream:
        _stream(lm, options, colour)
        return 0
    for result in lm.sample(arguments.n, **options):
        if arguments.json:
            show.put_json(result.to_dict())
        else:
            span = written(result, lm.spelling, options["prompt"])
            show.put(show.shaded(result.text, [span]) if colour else show.for_stdout(result.text))
            _put_numbers(result, colour)
    return 0


def _stream(lm: "LanguageModel", options: dict[str, Any], colour: bool) -> None:
    from tracformer.cli.output import Writer
    from tracformer.generation.continuation import prompted

    of = prompted(options["prompt"], lm.spelling)  # a space may belong to what comes

    def read(fills: Sequence[Sequence[int]]) -> str:
        return of.reader(lm.spelling)([[i for i in fills[0] if i not in lm.spelling.special]])

    writer = Writer(of.texts, read, colour)
    [result] = lm.sample(1, **options, callback=writer)
    writer.finish(result.text)
    _put_numbers(result, colour)


def written(result: "Sampled", spelling: "Spelling", prompt: str) -> "Span":
    """What came after the prompt, without the end of text."""
    from tracformer.generation.continuation import prompted
    from tracformer.generation.results import Span

    count = len(result.token_ids) - result.ended
    ids = result.token_ids[:count]
    of = prompted(prompt, spelling)
    text = of.reader(spelling)([ids])
    start = len(result.text) - len(text) if result.text.endswith(text) else 0
    tokens = tuple(
        spelling.token(token, first=i == 0 and not of.ids[0]) for i, token in enumerate(ids)
    )
    return Span(start, len(result.text), result.text[start:], ids, tokens, result.log_probs[:count])


def _put_numbers(result: "Sampled", colour: bool) -> None:
    if not show.is_terminal(sys.stdout):
        return
    tokens = len(result.token_ids)
    told = [
        f"log p {result.log_prob:.3f}",
        f"{show.per_token(result.log_prob, tokens):.3f} a token",
        f"{tokens} tokens, {'ended' if result.ended else 'cut off'}",
        result.mode,
        f"seed {result.seed}",
    ]
    show.put(
        show.quiet("  " + ", ".join(told) + (f" ({result.note})" if result.note else ""), colour)
    )
