"""Fill the blanks of a text, and say how probable the filling is.

    tracformer infill -m runs/stories 'Mia carried the [[5]] to the market.'
    tracformer infill -m runs/stories -n 3 --top-p 0.9 'Mia carried the [[]] to the market.'
    tracformer infill -m runs/stories --order entropy --stream 'Mia carried the [[5]] home.'
    tracformer infill -m runs/stories --file holes.txt --json > filled.jsonl

On a terminal fills are shaded by probability, with a line of numbers below; elsewhere the completed
text is all there is (--marks keeps the brackets, --json gives every number). Many texts are filled
in batches, each as it would be alone; all are checked before the first is filled. Lines keep their
places: with -n N each text has N, empty ones for an empty text, and where --best-of or --search
found fewer fillings that differ; under --json there is nothing for these, and every object names
its `line`. A filling may itself hold a line's end, and then only --json tells where each text ends.
--stream shows tokens as they
come: from left to right, or with --order redrawn on a terminal with every step, and elsewhere
printed when all is filled.
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
    from tracformer.generation.orders import Order
    from tracformer.generation.results import Infilled

ORDER_OPTIONS = ("order", "per_step", "threshold", "steps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    texts.add_texts(parser)
    texts.add_model(parser)
    texts.add_weights(parser)
    texts.add_device(parser)
    parser.add_argument(
        "-n", type=int, default=1, metavar="N", help="fillings of each text (default: 1)"
    )
    parser.add_argument(
        "--mode",
        help="car: from left to right, exact joint probability; ac: any order; "
        "diffusion: by the model's reverse process (default: the "
        "first of car, ac, ar that the model has)",
    )
    parser.add_argument(
        "--fragment",
        action="store_true",
        help="the text is cut from a longer one: it need not begin or end as a text does",
    )
    parser.add_argument(
        "--batch", type=int, default=16, metavar="N", help="sequences at once (default: 16)"
    )
    show.add_output(parser)
    parser.add_argument(
        "--stream", action="store_true", help="show tokens as they come (one text, one filling)"
    )
    sampling.add_sampling(parser)
    order = parser.add_argument_group("the order of filling, in mode ac")
    order.add_argument(
        "--order",
        metavar="NAME",
        help="left-to-right, random, ancestral, probability, entropy or margin",
    )
    order.add_argument("--per-step", type=int, metavar="K", help="K tokens at once (default: 1)")
    order.add_argument(
        "--threshold",
        type=float,
        metavar="X",
        help="all tokens at least this sure at once (probability, entropy, margin)",
    )
    order.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="of the order ancestral (default: 64), and of --mode diffusion",
    )
    best = parser.add_argument_group("the best filling")
    best.add_argument(
        "--best-of",
        type=int,
        metavar="N",
        help="draw N fillings, give the most probable that differ",
    )
    best.add_argument(
        "--search",
        metavar="beam:K | best-first:N",
        help="search for the most probable: K at a time, or at most N opened nodes",
    )
    best.add_argument(
        "--reread",
        action="store_true",
        help="of what --best-of or a beam found, the best by how the whole text reads too",
    )
    lengths = parser.add_argument_group("blanks of unknown length")
    lengths.add_argument(
        "--lengths",
        choices=("sample", "rank"),
        help="draw the length, or take the most probable (default: sample)",
    )
    lengths.add_argument(
        "--max-blank",
        type=int,
        metavar="N",
        help="most tokens of a blank [[]], which names none (default: 32)",
    )


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    folder = arguments.model or texts.default_model()
    lines = texts.read_texts(arguments)
    if arguments.stream and len(lines) > 1:
        raise ValueError(f"--stream shows one text as it is filled; there are {len(lines)}")
    _check_blanks(lines)
    order = _order(arguments)
    lm = texts.open_model(folder, arguments.weights, arguments.device)
    options: dict[str, Any] = {
        "n": arguments.n,
        "mode": arguments.mode,
        "sampler": sampling.build_sampler(arguments, lm.tokenizer),
        "seed": arguments.seed,
        "order": order,
        "best_of": arguments.best_of or 0,
        "search": arguments.search,
        "reread": arguments.reread,
        "whole": not arguments.fragment,
        "batch": arguments.batch,
    }
    options |= {
        name: getattr(arguments, name)
        for name in ("lengths", "max_blank")
        if getattr(arguments, name) is not None
    }
    lm.check_infill(**options)
    texts.check(lines, lambda text: lm.check_infill(text, **options))
    if arguments.stream:
        _stream(lm, lines[0].text, options, arguments)
    else:
        _fill_all(lm, lines, options, arguments)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """What contradicts itself, before anything is read."""
    sampling.check_sampling(arguments)
    for name in ("n", "batch", "best_of", "max_blank"):
        sampling.require_positive(arguments, name)
    if arguments.mode not in (None, "ac", "diffusion") and (
        ordered := sampling.first_given(arguments, ORDER_OPTIONS)
    ):
        raise ValueError(
            f"{sampling.option(ordered)} is for --mode ac; {arguments.mode} goes from left to "
            "right, one token at a time"
        )
    if arguments.search is not None:
        if arguments.best_of is not None:
            raise ValueError(
                "--search and --best-of are two ways to the most probable filling; "
                "leave one of them out"
            )
        if (
            unused := "greedy"
            if arguments.greedy
            else sampling.first_given(arguments, sampling.CHANGES)
        ):
            raise ValueError(
                f"--search draws nothing, so {sampling.option(unused)} has no effect; "
                "leave one of them out"
            )
    if (
        arguments.reread
        and arguments.best_of is None
        and not (arguments.search or "").startswith("beam:")
    ):
        raise ValueError(
            "--reread ranks candidates: ask for several with --best-of N, or with --search beam:K"
        )
    if arguments.marks and arguments.json:
        raise ValueError("--marks is for plain text; --json names every fill's place in `spans`")
    if arguments.stream:
        _check_stream(arguments)


def _check_stream(arguments: argparse.Namespace) -> None:
    reasons = {
        "--json": arguments.json,
        f"-n {arguments.n}": arguments.n > 1,
        "--best-of": arguments.best_of is not None,
        "--search": arguments.search is not None,
    }
    for name, given in reasons.items():
        if given:
            raise ValueError(
                f"--stream shows one filling as it comes, which {name} does not give; "
                "leave one of them out"
            )


def _check_blanks(lines: Sequence[texts.InputLine]) -> None:
    """Every blank of every line, before a model is loaded."""
    from tracformer.generation.template import parse, parse_lengths

    texts.check(lines, lambda text: [parse_lengths(content) for content in parse(text).contents])


def _order(arguments: argparse.Namespace) -> "Order | None":
    if sampling.first_given(arguments, ORDER_OPTIONS) is None:
        return None
    from tracformer.generation.orders import parse_order

    if arguments.steps is not None:
        sampling.require_positive(arguments, "steps")
    per_step = 1 if arguments.per_step is None else arguments.per_step
    return parse_order(arguments.order, per_step, arguments.threshold, arguments.steps or 0)


def _fill_all(
    lm: "LanguageModel",
    lines: Sequence[texts.InputLine],
    options: dict[str, Any],
    arguments: argparse.Namespace,
) -> None:
    colour = show.wants_colour(arguments)
    with show.progress(len(lines), "texts") as bar:
        for start in range(0, len(lines), arguments.batch):
            some = lines[start : start + arguments.batch]
            results = iter(
                texts.answer(
                    [line for line in some if line.text],
                    lambda asked: lm.infill(asked, **options),
                )
            )
            bar.clear()
            for number, line in enumerate(some, start + 1):
                filled = next(results) if line.text else []
                for result in filled:
                    if arguments.json:
                        show.put_json({"line": number, **result.to_dict()})
                    else:
                        _put(result, arguments.marks, colour)
                if len(filled) < arguments.n and not arguments.json:
                    show.put("\n" * (arguments.n - len(filled) - 1))
            bar.update(len(some))
            bar.refresh()


def _put(result: "Infilled", marks: bool, colour: bool) -> None:
    show.put(_shown(result, marks, colour))
    _put_numbers(result, colour)


def _shown(result: "Infilled", marks: bool, colour: bool) -> str:
    return (
        show.shaded(result.text, result.spans)
        if colour and not marks
        else show.for_stdout(_plain(result, marks))
    )


def _plain(result: "Infilled", marks: bool) -> str:
    """With marks, a text that `tracformer score` reads again: brackets of the text's
    own are escaped.
    """
    if not marks:
        return result.text
    from tracformer.generation.template import write

    edges = [
        0,
        *(edge for span in result.spans for edge in (span.start, span.stop)),
        len(result.text),
    ]
    pieces = [result.text[start:stop] for start, stop in zip(edges[0::2], edges[1::2], strict=True)]
    try:
        return write(pieces, [span.text for span in result.spans])
    except ValueError:  # a filling that ends with a bracket
        return show.marked(result.text, result.spans)


def _put_numbers(result: "Infilled", colour: bool) -> None:
    if not show.is_terminal(sys.stdout):
        return
    tokens = sum(len(span.token_ids) for span in result.spans)
    told = [
        f"log p {result.log_prob:.3f}",
        f"{show.per_token(result.log_prob, tokens):.3f} a token",
        f"{tokens} token{'s' if tokens != 1 else ''}",
        result.mode,
        f"seed {result.seed}",
    ]
    if result.length_choice is not None:
        told.append(
            f"length {', '.join(map(str, result.length_choice.chosen))} "
            f"of {len(result.length_choice.lengths)} weighed"
        )
    show.put(
        show.quiet("  " + ", ".join(told) + (f" ({result.note})" if result.note else ""), colour)
    )


def _stream(
    lm: "LanguageModel", text: str, options: dict[str, Any], arguments: argparse.Namespace
) -> None:
    from tracformer.cli.output import Canvas, Writer
    from tracformer.generation.template import escaped, frame, parse, parse_lengths

    template = parse(text)
    of = frame(template, lm.spelling, options["whole"])
    given = of.texts  # as the model sees it: spaces may belong to blanks
    colour = show.wants_colour(arguments)
    if options["order"] is None:
        writer = Writer(
            escaped(given) if arguments.marks else given,
            of.reader(lm.spelling),
            colour,
            arguments.marks,
        )
        [result] = lm.infill(text, **options, callback=writer)
        writer.finish(_plain(result, arguments.marks))
    elif show.is_terminal(sys.stdout):
        wanted = [parse_lengths(content) for content in template.contents]
        canvas = Canvas(given, [low if low == high else None for low, high in wanted], colour)
        [result] = lm.infill(text, **options, callback=canvas)
        canvas.finish(_shown(result, arguments.marks, colour))
    else:
        [result] = lm.infill(text, **options)
        show.put(_plain(result, arguments.marks))
    _put_numbers(result, colour)
