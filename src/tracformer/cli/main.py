"""`tracformer VERB ...`: finds the verb's file, and turns a user's mistake into one paragraph and exit code 2."""

import argparse
import importlib
import sys
from collections.abc import Sequence

VERBS = {
    "prepare": "turn text, JSONL, FASTA or a hub data set into token shards",
    "train": "train a model, or go on with an interrupted run",
    "plot": "draw the curves of a run",
}
MISTAKES = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError, ImportError)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="tracformer",
        description="Fill holes in sequences, and say exactly how probable the filling is.",
        epilog="verbs:\n" + "\n".join(f"  {verb:<10} {what}" for verb, what in VERBS.items()) + "\n\n`tracformer VERB --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument("verb", nargs="?", choices=VERBS, metavar="VERB", help=", ".join(VERBS))
    split = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words) - 1)
    chosen = parser.parse_args(words[: split + 1])
    if chosen.version:
        from tracformer import __version__

        print(__version__)
        return 0
    if chosen.verb is None:
        parser.print_help()
        return 0
    module = importlib.import_module(f"tracformer.cli.{chosen.verb}")
    verb_parser = argparse.ArgumentParser(
        prog=f"tracformer {chosen.verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(verb_parser)
    try:
        code: int = module.run(verb_parser.parse_args(words[split + 1 :]))
    except MISTAKES as mistake:
        print(f"tracformer {chosen.verb}: {mistake}", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
