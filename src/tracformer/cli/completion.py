"""Print a script that lets your shell complete commands, flags and file names.

    eval "$(tracformer completion bash)"          # in ~/.bashrc
    eval "$(tracformer completion zsh)"           # in ~/.zshrc
    tracformer completion fish | source           # in ~/.config/fish/config.fish

Completions come from the parsers of the commands, so they are those of the installed version.
"""

import argparse
import os
from typing import NoReturn

import argcomplete
from argcomplete.shell_integration import shellcode

from tracformer.cli import COMMANDS, output, parser_of

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer completion`."""
    parser.add_argument("shell", choices=SHELLS, help="the shell: bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer completion`."""
    output.put(shellcode(["tracformer"], shell=arguments.shell))
    return 0


def answer_shell() -> NoReturn:
    """Print the completions of the line in the shell's variables, and exit."""
    words = os.environ.get("COMP_LINE", "").split()
    parser = argparse.ArgumentParser(prog="tracformer")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    for name, (_, summary) in COMMANDS.items():
        # Only the module of the command on the line is imported: this runs at every key press.
        wanted = len(words) > 1 and words[1] == name
        parents = [parser_of(name)] if wanted else []
        commands.add_parser(name, help=summary, parents=parents, add_help=not wanted)
    argcomplete.autocomplete(parser, always_complete_options="long")
    raise SystemExit(0)  # not reached: autocomplete exits
