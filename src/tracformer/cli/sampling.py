"""How tokens are picked, as options of a command: everything a `Sampler` knows, in the user's words."""

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tracformer.cli.texts import argument_text

if TYPE_CHECKING:
    from tracformer.data import Tokenizer
    from tracformer.generation.samplers import Sampler


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how tokens are picked (reported probabilities are the model's own, before any of these)")
    group.add_argument("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    group.add_argument("--greedy", action="store_true", help="always the likeliest token")
    group.add_argument("--temperature", type=float, metavar="T", help="below 1 plays safe, above 1 dares (default: 1)")
    group.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens that reach probability P together")
    group.add_argument("--min-p", type=float, metavar="P", help="only tokens at least P times as likely as the likeliest")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1: tokens that the text has already become less likely")
    group.add_argument("--no-repeat-ngram", type=int, metavar="N", help="no N tokens in a row twice")
    group.add_argument(
        "--ban", action="append", default=[], metavar="TEXT", help="never this token, nor with a space before it; repeatable"
    )
    group.add_argument("--require", action="append", default=[], metavar="TEXT", help="this token at least once, as written; repeatable")


TRUNCATIONS = ("temperature", "top_k", "top_p", "min_p")
CHANGES = (*TRUNCATIONS, "repetition_penalty", "no_repeat_ngram")


def check_sampling(arguments: argparse.Namespace) -> None:
    """What contradicts itself, before a model is loaded."""
    if arguments.greedy and (name := first_given(arguments, TRUNCATIONS)):
        raise ValueError(f"--greedy always takes the likeliest token, so {option(name)} has no effect; leave one of them out")


def build_sampler(arguments: argparse.Namespace, tokenizer: "Tokenizer") -> "Sampler":
    from tracformer.generation.samplers import Sampler

    changes = {name: getattr(arguments, name) for name in CHANGES if getattr(arguments, name) is not None}
    if arguments.greedy:
        changes["temperature"] = 0.0
    banned = tuple(i for text in arguments.ban for i in banned_tokens(argument_text(text, "--ban"), tokenizer))
    required = tuple(required_token(argument_text(text, "--require"), tokenizer) for text in arguments.require)
    return Sampler(**changes, banned=banned, required=required)


def banned_tokens(text: str, tokenizer: "Tokenizer") -> list[int]:
    """The tokens that spell `text`, bare or with the space that most tokenisers put before a word."""
    if not text:
        raise ValueError("--ban is empty; write the token that shall not come")
    spelt = [token for token in (single_token(text, tokenizer), single_token(f" {text}", tokenizer)) if token is not None]
    if not spelt:
        raise ValueError(f"--ban {text!r}: this model has no single token for it; only whole tokens can be banned")
    return spelt


def required_token(text: str, tokenizer: "Tokenizer") -> int:
    token = single_token(text, tokenizer)
    if token is None:
        spaced = text and single_token(f" {text}", tokenizer) is not None
        hint = f"; --require ' {text}', with the space before it, is one" if spaced else ""
        raise ValueError(f"--require {text!r}: this model has no single token for it; only whole tokens can be required{hint}")
    return token


def option(name: str) -> str:
    """The option as it is typed: top_k is --top-k."""
    return f"--{name.replace('_', '-')}"


def first_given(arguments: argparse.Namespace, names: Iterable[str]) -> str | None:
    return next((name for name in names if getattr(arguments, name) is not None), None)


def require_positive(arguments: argparse.Namespace, name: str) -> None:
    value = getattr(arguments, name)
    if value is not None and value < 1:
        raise ValueError(f"{'-n' if name == 'n' else option(name)} is {value}; it must be at least 1")


def single_token(text: str, tokenizer: "Tokenizer") -> int | None:
    """The token that is this text inside a text, or at its beginning; None where there is none."""
    from tracformer.data import AlphabetError

    for inside in (True, False):
        try:
            ids = tokenizer.encode(text, inside)
        except AlphabetError:
            return None  # of no token at all
        if len(ids) == 1 and ids[0] != tokenizer.unknown_id:
            return ids[0]
    return None
