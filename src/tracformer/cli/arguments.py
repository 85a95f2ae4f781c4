"""Arguments that verbs share: the model, the texts and the sampler.

- `add_model`, `add_weights`, `add_no_verify`, `add_device`, `open_model`: the model.
- `add_texts`, `read_texts`, `by_batch`: texts from arguments, a file or standard input.
- `add_job`, `run_job`, `finish_job`, `check_no_job`: large files, with `--out`.
- `add_sampling`, `sampler_options`, `token_rules`: a `Sampler` from flags; tokens to ban and
  require are given as text.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tracformer.files import DEFAULT_MODEL, bundled_folder, bundled_models
from tracformer.generation.request_options import Sampler
from tracformer.options import add_arguments, flag_of, from_arguments

if TYPE_CHECKING:
    from tracformer.data import Tokenizer
    from tracformer.generation.batch_job import BatchJob
    from tracformer.generation.language_model import LanguageModel
    from tracformer.generation.request_options import InfillOptions, ScoreOptions

A = TypeVar("A")
R = TypeVar("R")


# ---- the model


def default_model() -> str:
    """Return the folder of the model that is used if none is named."""
    return str(bundled_folder(DEFAULT_MODEL))


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the model."""
    bundle = ", ".join(bundled_models())
    parser.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help=f"model, run or adapter folder, bundled model ({bundle}; default: {DEFAULT_MODEL}), "
        "smollm2, or hub id",
    )


def add_weights(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how weights are read."""
    parser.add_argument(
        "--weights",
        default="float32",
        metavar="KIND",
        help="precision of the weights: float32, bfloat16 or int8 (default: float32)",
    )
    add_no_verify(parser)


def add_no_verify(parser: argparse.ArgumentParser) -> None:
    """Add the flag that loads a model without checking its files."""
    parser.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not check the model's files against the folder's checksums.json",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the device."""
    parser.add_argument(
        "--device", default="cpu", help="cpu, cuda, or auto: a GPU if there is one (default: cpu)"
    )


def open_model(
    folder: str, weights: str = "float32", device: str = "cpu", verify: bool = True
) -> "LanguageModel":
    """Load a model with its tokenizer, and use fewer threads if the machine is busy."""
    from tracformer.devices import keep_freed_memory, use_threads
    from tracformer.generation.language_model import load

    keep_freed_memory()
    if device == "cpu":
        use_threads()
    return load(folder, weights=weights, device=device, verify=verify)


# ---- texts


def add_job(parser: argparse.ArgumentParser, field: str = "text") -> None:
    """Add the flags of a batch job, but for its files."""
    group = parser.add_argument_group(
        "large files",
        "With --out FOLDER, --file is JSONL, CSV, Parquet or text of any size, plain or packed.\n"
        "Output is JSON lines with the input's ids. Repeat a stopped command to continue.",
    )
    if field == "text":
        group.add_argument("--out", metavar="FOLDER", help="write the results to files in FOLDER")
    group.add_argument("--field", help=f"field or column that holds the {field} (default: {field})")
    group.add_argument(
        "--workers", type=int, metavar="N", help="processes, each with its own model (default: 1)"
    )
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run the workers on a Ray cluster; without ADDRESS, on one started on this machine",
    )
    group.add_argument(
        "--skip-bad",
        action="store_true",
        help="continue after rows that cannot be worked on; their output has the key error",
    )


JOB_FLAGS = ("field", "workers", "ray", "skip_bad")


def run_job(
    arguments: argparse.Namespace, verb: str, options: "InfillOptions | ScoreOptions"
) -> int:
    """Run a batch job on texts."""
    from tracformer.generation.batch_job import BatchJob

    if arguments.text or arguments.whole_file or arguments.file in (None, "-"):
        raise ValueError("--out is for the rows of a file: give it with --file FILE")
    job = BatchJob(
        verb,
        arguments.model or default_model(),
        Path(arguments.file),
        options,
        arguments.weights,
        arguments.device,
        arguments.field or "text",
        arguments.verify,
    )
    return finish_job(arguments, job)


def finish_job(arguments: argparse.Namespace, job: "BatchJob") -> int:
    """Run a batch job and print what it wrote."""
    from tracformer.generation.batch_job import run_job

    workers = 1 if arguments.workers is None else arguments.workers
    out = Path(arguments.out)
    counts = run_job(job, out, workers=workers, ray=arguments.ray, skip_bad=arguments.skip_bad)
    bad = f", {counts['bad']:,} of them bad" if counts["bad"] else ""
    print(f"{out}: {counts['rows']:,} rows{bad}, in {counts['parts']:,} files")
    return 0


def check_no_job(arguments: argparse.Namespace) -> None:
    """Raise ValueError if a flag of a batch job is given without --out."""
    if wrong := [name for name in JOB_FLAGS if getattr(arguments, name) not in (None, False)]:
        raise ValueError(f"{flag_of(wrong[0])} is for large files: give a folder with --out too")


class InputLine(NamedTuple):
    """One text to work on."""

    text: str
    number: int  # from 1
    where: str  # put before error messages; empty where there is only one text


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that give texts."""
    parser.add_argument(
        "text",
        nargs="*",
        metavar="TEXT",
        help="text; several are worked on in batches (default: each line of standard input)",
    )
    parser.add_argument(
        "--file", metavar="FILE", help="read one text from each line of FILE; - is standard input"
    )
    parser.add_argument(
        "--whole-file", action="store_true", help="read the file or standard input as one text"
    )


def read_texts(arguments: argparse.Namespace) -> list[InputLine]:
    """Return the texts in order; the newline at the end of a line or file is not part of it.

    Raises:
        ValueError: There is no text, or it is not UTF-8.
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
        return _lines(texts, "argument")
    if arguments.file is None or arguments.file == "-":
        name, raw = "standard input", _standard_input()
    else:
        name, raw = arguments.file, _read(Path(arguments.file))
    text = _decode(raw, name).removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
    if not text.strip("\r\n"):
        raise ValueError(f"{name} holds no text")
    if arguments.whole_file:
        return _lines([text], name)
    return _lines([line.removesuffix("\r") for line in text.split("\n")], f"{name}, line")


def _lines(texts: Sequence[str], name: str) -> list[InputLine]:
    return [
        InputLine(text, number, f"{name} {number}: " if len(texts) > 1 else "")
        for number, text in enumerate(texts, 1)
    ]


def by_batch(
    requests: Sequence[R], batch: int, work: Callable[[list[R]], Sequence[A]]
) -> Iterator[A]:
    """Yield the results of requests, which are worked on in batches.

    If a batch fails, its requests are worked on one by one, so that the results before the one that
    fails are kept.
    """
    for start in range(0, len(requests), batch):
        some = list(requests[start : start + batch])
        try:
            results = work(some)
        except ValueError:
            if len(some) == 1:
                raise
            results = None
        if results is not None:
            yield from results
        else:
            yield from by_batch(some, 1, work)


def argument_text(argument: str, name: str) -> str:
    """Return an argument as text; bytes that are not UTF-8 come as lone surrogates."""
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
            f"(line {line}); convert it to UTF-8 first, for instance with iconv"
        ) from None


# ---- the sampler

TRUNCATIONS = ("temperature", "top_k", "top_p", "min_p")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a sampler."""
    group = parser.add_argument_group(
        "sampling", "Reported probabilities are the model's own, before any of these options."
    )
    add_arguments(group, Sampler)
    group.add_argument(
        "--greedy", action="store_true", help="always take the most likely token (temperature 0)"
    )
    group.add_argument(
        "--ban",
        action="append",
        default=[],
        metavar="TEXT",
        help="never use the token TEXT, with or without a space before it; repeatable",
    )
    group.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="TEXT",
        help="use the token TEXT at least once, exactly as written; repeatable",
    )


def sampler_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampler's options that were given, except tokens to ban and require."""
    given = from_arguments(Sampler, arguments)
    if arguments.greedy:
        if name := next((name for name in TRUNCATIONS if name in given), None):
            raise ValueError(
                f"--greedy always takes the most likely token, so {flag_of(name)} has no effect "
                f"(it is {given[name]}); leave one of them out"
            )
        given["temperature"] = 0.0
    return given


def token_rules(arguments: argparse.Namespace, tokenizer: "Tokenizer") -> dict[str, Any]:
    """Return the sampler's options `banned` and `required`, if tokens are given."""
    banned = [
        token
        for text in arguments.ban
        for token in banned_tokens(argument_text(text, "--ban"), tokenizer)
    ]
    required = [
        required_token(argument_text(text, "--require"), tokenizer) for text in arguments.require
    ]
    rules = {"banned": tuple(banned), "required": tuple(required)}
    return {name: tokens for name, tokens in rules.items() if tokens}


def banned_tokens(text: str, tokenizer: "Tokenizer") -> list[int]:
    """Return the tokens that spell a text, by itself or with a space before it."""
    if not text:
        raise ValueError("--ban is empty; write the token to ban")
    found = [
        token
        for token in (single_token(text, tokenizer), single_token(f" {text}", tokenizer))
        if token is not None
    ]
    if not found:
        raise ValueError(
            f"--ban {text!r}: this model has no single token for it; only whole tokens can be "
            "banned"
        )
    return found


def required_token(text: str, tokenizer: "Tokenizer") -> int:
    """Return the token that spells a text."""
    token = single_token(text, tokenizer)
    if token is None:
        spaced = text and single_token(f" {text}", tokenizer) is not None
        hint = f"; --require ' {text}', with the space before it, is one" if spaced else ""
        raise ValueError(
            f"--require {text!r}: this model has no single token for it; only whole tokens can be "
            f"required{hint}"
        )
    return token


def single_token(text: str, tokenizer: "Tokenizer") -> int | None:
    """Return the token that is this text, inside a text or at its beginning; None without one."""
    from tracformer.data import AlphabetError

    for inside in (True, False):
        try:
            ids = tokenizer.encode(text, inside)
        except AlphabetError:
            return None
        if len(ids) == 1 and ids[0] != tokenizer.unknown_id:
            return ids[0]
    return None
