"""What a command reads: the model it is told to use, and texts from its arguments, a file or standard input."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tracformer import bundled

if TYPE_CHECKING:
    from tracformer.generation.language import LanguageModel


A = TypeVar("A")


class Line(NamedTuple):
    text: str
    where: str  # for complaints; empty where there is only one text


def default_model() -> str:
    """The model of a command that names none, whatever is called so in the working directory."""
    return str(bundled.folder(bundled.DEFAULT))


def add_model(parser: argparse.ArgumentParser) -> None:
    bundle = ", ".join(bundled.names())
    wanted = f"a model's folder, a run's, or the name of a bundled model: {bundle} (default: {bundled.DEFAULT})"
    parser.add_argument("-m", "--model", metavar="MODEL", help=wanted)


def add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", default="float32", metavar="KIND", help="float32, or rounded for speed to bfloat16 or int8 (default: float32)"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="cpu, cuda, or auto: a GPU where there is one (default: cpu)")


def open_model(folder: str, weights: str = "float32", device: str = "cpu") -> "LanguageModel":
    from tracformer.generation.language import load
    from tracformer.runtime import keep_freed_memory

    keep_freed_memory()
    return load(folder, weights=weights, device=device)


def add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", metavar="TEXT", help="each argument is a text (default: standard input, each line a text)")
    parser.add_argument("--file", metavar="FILE", help="each line of FILE is a text; - is standard input")
    parser.add_argument("--whole-file", action="store_true", help="the file, or standard input, is one text")


def read_texts(arguments: argparse.Namespace) -> list[Line]:
    """The texts in their order. A line's end belongs to the file, not to the text; so does a whole file's last one."""
    if arguments.text:
        if arguments.file is not None or arguments.whole_file:
            raise ValueError("texts are given as arguments, so --file and --whole-file have nothing to read; leave one or the other out")
        texts = [argument_text(text, f"argument {number}") for number, text in enumerate(arguments.text, 1)]
        if not any(texts):
            raise ValueError("the text is empty; write one with [[blanks]] in it")
        return [Line(text, f"argument {number}: " if len(texts) > 1 else "") for number, text in enumerate(texts, 1)]
    if arguments.file is None or arguments.file == "-":
        name, raw = "standard input", _standard_input()
    else:
        name, raw = arguments.file, _read(Path(arguments.file))
    text = _decode(raw, name).removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
    if arguments.whole_file and text:
        return [Line(text, "")]
    lines = [line.removesuffix("\r") for line in text.split("\n")] if text else []
    if not any(lines):
        raise ValueError(f"{name} holds no text")
    return [Line(line, f"{name}, line {number}: " if len(lines) > 1 else "") for number, line in enumerate(lines, 1)]


def check(lines: Iterable[Line], ask: Callable[[str], object]) -> None:
    """`ask` about each text that is not empty; a complaint names its line."""
    for line in lines:
        if line.text:
            try:
                ask(line.text)
            except ValueError as mistake:
                raise ValueError(f"{line.where}{mistake}") from mistake


def answer(lines: Sequence[Line], ask: Callable[[list[str]], Sequence[A]]) -> Iterable[A]:
    """`ask` about all texts at once. Where that fails the answers come one by one, up to the line that is to blame."""
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
            f"{name} is not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start} (line {line}); "
            "convert it to UTF-8 first, for instance with iconv"
        ) from None
