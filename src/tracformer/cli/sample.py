"""Write texts from nothing, or continue a prompt.

    tracformer sample -n 3
    tracformer sample --prompt 'Mia carried' --max-tokens 40 --stream

A text ends where the model ends it, or at --max-tokens. On a terminal, what was written is shaded
by probability and followed by a line of numbers. Elsewhere each text is followed by a newline;
--json keeps newlines inside a text apart from those between texts.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracformer.cli import arguments as shared
from tracformer.cli import output
from tracformer.generation.request_options import SampleOptions
from tracformer.options import add_arguments as add_options
from tracformer.options import from_arguments

if TYPE_CHECKING:
    from tracformer.generation.language_model import LanguageModel
    from tracformer.generation.results import Sampled, Span
    from tracformer.generation.token_text import Spelling


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace) -> int:
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
        _stream(lm, prompt, options, colour)
        return 0
    for result in lm.sample(prompt=prompt, options=options):
        if arguments.json:
            output.put_json(result.to_dict())
        else:
            span = written(result, lm.spelling, prompt)
            text = output.shaded(result.text, [span]) if colour else output.for_stdout(result.text)
            output.put(text)
            _put_numbers(result, colour)
    return 0


def _stream(lm: "LanguageModel", prompt: str, options: SampleOptions, colour: bool) -> None:
    """Write one text and print its tokens as they arrive."""
    from tracformer.generation.continuation import prompted

    given = prompted(prompt, lm.spelling)  # its last space may belong to what is written

    def read(fills: Sequence[Sequence[int]]) -> str:
        return given.reader(lm.spelling)([[i for i in fills[0] if i not in lm.spelling.special]])

    writer = output.StreamWriter(given.texts, read, colour)
    [result] = lm.sample(prompt=prompt, options=options, callback=writer)
    writer.finish(result.text)
    _put_numbers(result, colour)


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


def _put_numbers(result: "Sampled", colour: bool) -> None:
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
