"""Arguments that verbs share: models, texts and sampling options.

What a command reads: the model it is told to use, and texts from its arguments, a file or
standard input.

How tokens are picked, as options of a command: everything a `Sampler` knows, in the user's words.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tracformer import bundled

if TYPE_CHECKING:
    from tracformer.data import Tokenizer
    from tracformer.generation.language_model import LanguageModel
    from tracformer.generation.samplers import Sampler


A = TypeVar("A")


class InputLine(NamedTuple):
    text: str
    where: str  # for complaints; empty where there is only one text


def default_model() -> str:
    """The model of a command that names none, whatever is called so in the working directory."""
    return str(bundled.folder(bundled.DEFAULT))


def add_model(parser: argparse.ArgumentParser) -> None:
    bundle = ", ".join(bundled.names())
    wanted = (
        f"a model's folder, a run's, or the name of a bundled model: {bundle} (default: "
        f"{bundled.DEFAULT})"
    )
    parser.add_argument("-m", "--model", metavar="MODEL", help=wanted)


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights",
        default="float32",
        metavar="KIND",
        help="float32, or rounded for speed to bfloat16 or int8 (default: float32)",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="cpu",
        help="cpu, cuda, or auto: a GPU where there is one (default: cpu)",
    )


def open_model(folder: str, weights: str = "float32", device: str = "cpu") -> "LanguageModel":
    from tracformer.devices import keep_freed_memory
    from tracformer.generation.language_model import load

    keep_freed_memory()
    return load(folder, weights=weights, device=device)


def add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "text",
        nargs="*",
        metavar="TEXT",
        help="each argument is a text (default: standard input, each line a text)",
    )
    parser.add_argument(
        "--file", metavar="FILE", help="each line of FILE is a text; - is standard input"
    )
    parser.add_argument(
        "--whole-file", action="store_true", help="the file, or standard input, is one text"
    )


def read_texts(arguments: argparse.Namespace) -> list[InputLine]:
    """The texts in their order.

    A line's end belongs to the file, not to the text; so does a whole file's last one.
    """
    if arguments.text:
        if arguments.file is not None or arguments.whole_file:
            raise ValueError(
                "texts are given as arguments, so --file and --whole-file have nothing to read; "
                "leave one or the other out"
            )
        texts = [
            argument_text(text, f"argument {number}")
            for number, text in enumerate(arguments.text, 1)
        ]
        if not any(texts):
            raise ValueError("the text is empty; write one with [[blanks]] in it")
        return [
            InputLine(text, f"argument {number}: " if len(texts) > 1 else "")
            for number, text in enumerate(texts, 1)
        ]
    if arguments.file is None or arguments.file == "-":
        name, raw = "standard input", _standard_input()
    else:
        name, raw = arguments.file, _read(Path(arguments.file))
    text = _decode(raw, name).removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
    if arguments.whole_file and text:
        return [InputLine(text, "")]
    lines = [line.removesuffix("\r") for line in text.split("\n")] if text else []
    if not any(lines):
        raise ValueError(f"{name} holds no text")
    return [
        InputLine(line, f"{name}, line {number}: " if len(lines) > 1 else "")
        for number, line in enumerate(lines, 1)
    ]


def check(lines: Iterable[InputLine], ask: Callable[[str], object]) -> None:
    """`ask` about each text that is not empty; a complaint names its line."""
    for line in lines:
        if line.text:
            try:
                ask(line.text)
            except ValueError as mistake:
                raise ValueError(f"{line.where}{mistake}") from mistake


def answer(lines: Sequence[InputLine], ask: Callable[[list[str]], Sequence[A]]) -> Iterable[A]:
    """`ask` about all texts at once.

    Where that fails the answers come one by one, up to the line that is to blame.
    """
    if not lines:
        return []
    try:
        return ask([line.text for line in lines])
    except ValueError as mistake:
        if len(lines) == 1:
            raise ValueError(f"{lines[0].where}{mistake}") from mistake
        return (found for line in lines for found in answer([line], ask))


def argument_text(argument: str, name: str) -> str:
    """An argument of the command line, where bytes that are no text hide as lone surrogates."""
    return _decode(os.fsencode(argument), name)


def _standard_input() -> bytes:
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("no text: give it as an argument, with --file FILE, or on standard input")
    return sys.stdin.buffer.read()


def _read(path: Path) -> bytes:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; --file takes a text file")
    return path.read_bytes()


def _decode(raw: bytes, name: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start} "
            f"(line {line}); "
            "convert it to UTF-8 first, for instance with iconv"
        ) from None


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "how tokens are picked (reported probabilities are the model's own, before any of these)"
    )
    group.add_argument(
        "--seed", type=int, default=0, help="the same seed gives the same text (default: 0)"
    )
    group.add_argument("--greedy", action="store_true", help="always the likeliest token")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="below 1 plays safe, above 1 dares (default: 1)",
    )
    group.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    group.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="only the likeliest tokens that reach probability P together",
    )
    group.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help="only tokens at least P times as likely as the likeliest",
    )
    group.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="above 1: tokens that the text has already become less likely",
    )
    group.add_argument(
        "--no-repeat-ngram", type=int, metavar="N", help="no N tokens in a row twice"
    )
    group.add_argument(
        "--ban",
        action="append",
        default=[],
        metavar="TEXT",
        help="never this token, nor with a space before it; repeatable",
    )
    group.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="TEXT",
        help="this token at least once, as written; repeatable",
    )


TRUNCATIONS = ("temperature", "top_k", "top_p", "min_p")
CHANGES = (*TRUNCATIONS, "repetition_penalty", "no_repeat_ngram")


def check_sampling(arguments: argparse.Namespace) -> None:
    """What contradicts itself, before a model is loaded."""
    if arguments.greedy and (name := first_given(arguments, TRUNCATIONS)):
        raise ValueError(
            f"--greedy always takes the likeliest token, so {option(name)} has no effect; leave "
            "one of them out"
        )


def build_sampler(arguments: argparse.Namespace, tokenizer: "Tokenizer") -> "Sampler":
    from tracformer.generation.samplers import Sampler

    changes = {
        name: getattr(arguments, name) for name in CHANGES if getattr(arguments, name) is not None
    }
    if arguments.greedy:
        changes["temperature"] = 0.0
    banned = tuple(
        i for text in arguments.ban for i in banned_tokens(argument_text(text, "--ban"), tokenizer)
    )
    required = tuple(
        required_token(argument_text(text, "--require"), tokenizer) for text in arguments.require
    )
    return Sampler(**changes, banned=banned, required=required)


def banned_tokens(text: str, tokenizer: "Tokenizer") -> list[int]:
    """The tokens that spell `text`, bare or with the space that most tokenisers put
    before a word.
    """
    if not text:
        raise ValueError("--ban is empty; write the token that shall not come")
    spelt = [
        token
        for token in (single_token(text, tokenizer), single_token(f" {text}", tokenizer))
        if token is not None
    ]
    if not spelt:
        raise ValueError(
            f"--ban {text!r}: this model has no single token for it; only whole tokens can be "
            "banned"
        )
    return spelt


def required_token(text: str, tokenizer: "Tokenizer") -> int:
    token = single_token(text, tokenizer)
    if token is None:
        spaced = text and single_token(f" {text}", tokenizer) is not None
        hint = f"; --require ' {text}', with the space before it, is one" if spaced else ""
        raise ValueError(
            f"--require {text!r}: this model has no single token for it; only whole tokens can be "
            f"required{hint}"
        )
    return token


def option(name: str) -> str:
    """The option as it is typed: top_k is --top-k."""
    return f"--{name.replace('_', '-')}"


def first_given(arguments: argparse.Namespace, names: Iterable[str]) -> str | None:
    return next((name for name in names if getattr(arguments, name) is not None), None)


def require_positive(arguments: argparse.Namespace, name: str) -> None:
    value = getattr(arguments, name)
    if value is not None and value < 1:
        raise ValueError(
            f"{'-n' if name == 'n' else option(name)} is {value}; it must be at least 1"
        )


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
