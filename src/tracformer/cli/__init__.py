"""The command line: verbs, errors and exit codes.

`tracformer VERB ...`: finds the verb's file, and turns a user's mistake into one paragraph and
exit code 2.

The command line: one file a verb, loaded only when its verb is called.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

VERBS = {
    "infill": "fill the [[blanks]] of a text, and say how probable the filling is",
    "score": "the log-probability of the [[marked]] parts of a text, given the rest",
    "sample": "write from nothing, or go on from a prompt",
    "info": "what a model is: system, size, modes, tokeniser, training",
    "models": "list the systems that can be trained, evaluated and asked",
    "prepare": "turn text, JSONL, FASTA or a hub data set into token shards",
    "train": "train a model, or go on with an interrupted run",
    "plot": "draw the curves of a run",
    "eval": "perplexity, infilling quality, exact benchmark and more, of one model or several",
    "serve": "answer over HTTP: native, OpenAI, llama.cpp and Mistral protocols, and a web page",
    "report": "one page from results: pictures, tables, intervals, fills",
    "reproduce": "a table or figure of the paper, from data to report",
    "bench": "speed and memory on this machine, against rivals, as ratios",
}
MISTAKES = (
    ValueError,
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    ImportError,
)
# exit codes; the last two as a shell names SIGINT and SIGPIPE
FAILED, MISTAKEN, INTERRUPTED, NO_READER = 1, 2, 130, 141


class Parser(argparse.ArgumentParser):
    """A wrong option is a mistake like any other: one sentence, not the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    _open_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words) - 1)
    speaker = "tracformer"
    try:
        chosen = _parser().parse_args(words[: split + 1])
        if chosen.version:
            from tracformer import __version__

            print(__version__)
            return 0
        if chosen.verb is None:
            _parser().print_help()
            return 0
        speaker = f"tracformer {chosen.verb}"
        module = importlib.import_module(f"tracformer.cli.{chosen.verb}")
        parser = Parser(
            prog=speaker,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(parser)
        rest = words[split + 1 :]
        # the latter would forget the "--"
        parse = parser.parse_args if "--" in rest else parser.parse_intermixed_args
        code: int = module.run(parse(rest))
        # a reader that has gone is found out here, not when the interpreter ends
        sys.stdout.flush()
        return code
    except UnicodeEncodeError as error:
        wrong = error.object[error.start]
        print(
            f"{speaker}: {wrong!a} cannot be written as {error.encoding}; text is UTF-8: set "
            "PYTHONIOENCODING=utf-8",
            file=sys.stderr,
        )
        return MISTAKEN
    except MISTAKES as mistake:
        print(f"{speaker}: {mistake}", file=sys.stderr)
        return MISTAKEN
    except BrokenPipeError:
        _forget_output()
        return NO_READER
    except OSError as error:
        print(f"{speaker}: {error}", file=sys.stderr)
        return FAILED
    except (MemoryError, RuntimeError) as error:
        # how torch names a lack of memory, on any device
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        print(
            f"{speaker}: out of memory; fewer sequences at once need less (--batch, batch=, "
            "micro_batch=)",
            file=sys.stderr,
        )
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> Parser:
    parser = Parser(
        prog="tracformer",
        description="Fill holes in sequences, and say exactly how probable the filling is.",
        epilog="verbs:\n"
        + "\n".join(f"  {verb:<10} {what}" for verb, what in VERBS.items())
        + "\n\n`tracformer VERB --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument("verb", nargs="?", choices=VERBS, metavar="VERB", help=", ".join(VERBS))
    return parser


def _open_streams() -> None:
    """Whoever closed an output (`>&-`) wants to hear nothing; Python has None there, which cannot
    be written to.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _forget_output() -> None:
    """What is still buffered goes nowhere: Python would try to write it when it
    ends, and complain.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
