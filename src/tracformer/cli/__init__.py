"""The command line: commands, errors and exit codes.

`main` finds the module of a command, parses its arguments and runs it. Modules are imported only
when their command is called, so that `tracformer --help` stays fast.

A module of a command has `add_arguments(parser)` and `run(arguments)`, which returns the exit code;
its docstring is the description that `--help` shows. A module with several commands holds a
`Command` for each further one.
"""

import argparse
import gc
import importlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import NamedTuple, NoReturn

from tracformer.options import did_you_mean

# name: (module, what it does)
COMMANDS = {
    "infill": ("infill", "fill the blanks of a text, with the probability of each fill"),
    "score": ("infill", "log-probability of marked parts of a text, given the rest"),
    "sample": ("infill", "generate text from nothing or from a prompt"),
    "mutants": ("proteins", "score mutants of a protein"),
    "design": ("proteins", "redesign regions of a protein"),
    "info": ("info", "show a model's system, size, modes, tokenizer and training"),
    "models": ("info", "list the systems that can be trained and evaluated"),
    "export": ("export", "write a model for transformers, to be used without tracformer"),
    "prepare": ("prepare", "turn text, JSONL, FASTA or a hub data set into token shards"),
    "train": ("train", "train a model, or continue an interrupted run"),
    "adapt": ("train", "teach a causal language model of Hugging Face to fill blanks"),
    "plot": ("train", "draw the training curves of runs"),
    "eval": ("eval", "evaluate models: perplexity, infilling quality, exact benchmark and more"),
    "serve": ("serve", "serve a model over HTTP, with a web page"),
    "report": ("eval", "write an HTML page with tables and pictures of results"),
    "reproduce": ("eval", "reproduce a table or figure of the paper"),
    "bench": ("bench", "measure speed and memory on this machine"),
    "completion": ("completion", "print a script that completes commands and flags in your shell"),
}
# Commands that compute with a model, whatever their arguments are.
COMPUTING = ["infill", "score", "sample", "mutants", "design", "adapt", "train", "eval", "serve"]
# Errors that the user can correct; everything else is a failure.
USAGE_ERRORS = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    ImportError,
)
FAILED, WRONG_USAGE = 1, 2
INTERRUPTED, BROKEN_PIPE = 130, 141  # as shells report SIGINT and SIGPIPE


class Command(NamedTuple):
    """A command that shares its module with another one.

    Args:
        description: Text that `--help` shows.
        add_arguments: Adds the command's arguments to a parser.
        run: Runs the command and returns the exit code.
    """

    description: str | None
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, like all errors of the command line."""

    def error(self, message: str) -> NoReturn:
        """Raise the message, with advice, as a ValueError instead of printing the usage."""
        if message.startswith("unrecognized arguments: "):
            word = message.removeprefix("unrecognized arguments: ").split("=")[0].split()[0]
            near = get_close_matches(word, self._option_string_actions, n=1, cutoff=0.75)
            message += f"; did you mean {near[0]}?" if near else f"; {self.prog} --help lists all"
        elif message.startswith("the following arguments are required: "):
            message += f"; {self.prog} --help describes them"
        raise ValueError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0: success; 1: the work failed; 2: wrong usage; 130: interrupted; 141: broken pipe.

    Args:
        arguments: Words after the program's name; those of the process if None.
    """
    _open_streams()
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may come next; this exits
        importlib.import_module("tracformer.cli.completion").answer_shell()
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words) - 1)
    before, rest = words[: split + 1], words[split + 1 :]
    debug = "--debug" in (words[: words.index("--")] if "--" in words else words)
    name = "tracformer"
    try:
        chosen = _parser().parse_args(before)
        if chosen.version:
            from tracformer import __version__

            print(__version__)
            return 0
        if chosen.command is None:
            _parser().print_help()
            return 0
        name = f"tracformer {chosen.command}"
        command = find_command(chosen.command)
        parser = parser_of(chosen.command)
        # parse_intermixed_args would drop the "--"
        parse = parser.parse_args if "--" in rest else parser.parse_intermixed_args
        chosen = parse(rest)
        if chosen.threads is not None:
            _set_threads(chosen.threads)
        if chosen.include:
            from tracformer.plugins import include

            for path in chosen.include:
                include(path)
        if name.split()[1] in COMPUTING and "torch" not in sys.modules:
            import_torch()
        code = command.run(chosen)
        sys.stdout.flush()  # notice a closed pipe here rather than when the interpreter exits
        return code
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        else:
            print(f"{name}: {_message(error)}", file=sys.stderr)
        return WRONG_USAGE if isinstance(error, USAGE_ERRORS) else FAILED


def _message(error: Exception) -> str:
    """Return one line about an error."""
    if isinstance(error, UnicodeEncodeError):
        character = error.object[error.start]
        return (
            f"{character!a} cannot be written as {error.encoding}; text is UTF-8: set "
            "PYTHONIOENCODING=utf-8"
        )
    # torch reports a lack of memory as a RuntimeError, on any device
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and "allocate" in str(error)
    ):
        return "out of memory; process fewer sequences at once (--batch, batch=, micro_batch=)"
    if isinstance(error, (*USAGE_ERRORS, OSError, FloatingPointError)):
        return str(error)
    text = str(error).split("\n")[0]
    return f"internal error: {type(error).__name__}: {text}; --debug shows the traceback"


def import_torch() -> None:
    """Import torch without collecting garbage, now and later, among the objects of its modules.

    They are many and stay. Searching them takes a tenth of the import, and as long again whenever
    the interpreter searches everything.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("torch")
        gc.freeze()
    finally:
        if collects:
            gc.enable()


def find_command(name: str) -> Command:
    """Return the command of this name; its module is imported.

    Raises:
        ValueError: There is no such command.
    """
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}{did_you_mean(name, COMMANDS)}")
    module = importlib.import_module(f"tracformer.cli.{COMMANDS[name][0]}")
    found = vars(module).get(name)
    if isinstance(found, Command):
        return found
    return Command(module.__doc__, module.add_arguments, module.run)


def parser_of(name: str) -> Parser:
    """Return the parser of a command's words."""
    command = find_command(name)
    parser = Parser(
        prog=f"tracformer {name}",
        description=command.description,
        formatter_class=_formatter,
    )
    command.add_arguments(parser)
    _add_debug(parser)
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="processor threads (default: the machine's cores, fewer if it is busy)",
    )
    parser.add_argument(
        "--include",
        action="append",
        metavar="FILE.py",
        help="run a file that registers your own models or tasks; repeatable",
    )
    return parser


def _parser() -> Parser:
    summaries = "\n".join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items())
    parser = Parser(
        prog="tracformer",
        usage="tracformer [--version] [--help] COMMAND ...",
        description="Fill blanks in sequences, with the exact probability of each fill.",
        epilog=f"commands:\n{summaries}\n\nRun `tracformer COMMAND --help` for details.",
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    _add_debug(parser)
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(100, shutil.get_terminal_size(fallback=(100, 24)).columns)
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=width)


def _add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _set_threads(threads: int) -> None:
    """Set the number of threads of this process and of those that it starts."""
    if threads < 1:
        raise ValueError(f"--threads is {threads}; it must be at least 1")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is imported
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def _open_streams() -> None:
    """Replace closed outputs (`>&-`), which Python represents by None, by the null device."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _discard_output() -> None:
    """Send buffered output to the null device, so that Python does not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
