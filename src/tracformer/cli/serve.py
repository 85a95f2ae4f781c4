"""Serve a model over HTTP.

The server has its own protocol and those of OpenAI (completions), llama.cpp (infill) and Mistral
(FIM), and has a web page to try the model on.

    tracformer serve runs/stories
    TRACFORMER_API_KEY=secret tracformer serve runs/stories --host 0.0.0.0 --port 8080

By default the server listens on this machine only. On SIGTERM it finishes running requests and
exits. Logs are JSON lines on standard error; they never contain texts.
"""

import argparse
import gc
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tracformer.cli import FAILED
from tracformer.cli import arguments as shared
from tracformer.files import optional_package
from tracformer.options import add_arguments as add_options
from tracformer.options import did_you_mean, from_arguments
from tracformer.server import Limits, Settings

if TYPE_CHECKING:
    from tracformer.generation.language_model import LanguageModel

KEY = "TRACFORMER_API_KEY"
OPTIONS = (
    "host",
    "port",
    "no_key",
    "rows",
    "queue",
    "timeout",
    "connections",
    "header_timeout",
    "body_timeout",
    "drain",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer serve`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="model or run folder")
    shared.add_weights(parser)
    shared.add_device(parser)
    parser.add_argument("--name", help="name of the model for clients (default: its folder's name)")
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="another name of the model, or * for any name; repeatable",
    )
    add_options(parser, Settings, OPTIONS)
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"key that clients must send; safer as {KEY}, which other users cannot see",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin of web pages that may call this server, or * for all; repeatable",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="HOST",
        help="further name in the Host header by which this server may be called, or * for all; "
        "repeatable (default: localhost and the address of --host)",
    )
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=N",
        help="the most that one request may ask for; repeatable. Names: "
        + ", ".join(f"{name} ({value})" for name, value in asdict(Limits()).items()),
    )
    parser.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        metavar="LEVEL",
        help="debug, info, warning or error (default: info)",
    )


def read_limits(words: Sequence[str]) -> Limits:
    """Return the limits with changes of the form NAME=N."""
    changes = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in asdict(Limits()):
            raise ValueError(f"unknown limit {name!r}{did_you_mean(name, asdict(Limits()))}")
        if not number.isdecimal() or int(number) == 0:
            raise ValueError(f"--limit is {word!r}; write {name}=N with a number of at least 1")
        changes[name] = int(number)
    return Limits(**changes)


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer serve`."""
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        optional_package(package, "tracformer serve", "serve")
    from tracformer.devices import pick_device
    from tracformer.loading import find_folder
    from tracformer.model.fast_step import check_kind
    from tracformer.server.app import Server
    from tracformer.server.middleware import configure_logging

    folder = arguments.model or shared.default_model()
    settings = Settings(
        **from_arguments(Settings, arguments, OPTIONS),
        api_key=os.environ.get(KEY) if arguments.api_key is None else arguments.api_key,
        origins=tuple(arguments.allow_origin),
        hosts=tuple(arguments.allowed_host),
        aliases=tuple(arguments.alias),
        limits=read_limits(arguments.limit),
    )
    # Report wrong usage at once rather than after the server has begun to listen.
    find_folder(folder)
    check_kind(arguments.weights)
    device = pick_device(arguments.device)
    configure_logging(arguments.log_level)

    def load() -> "LanguageModel":
        lm = shared.open_model(folder, arguments.weights, device, arguments.verify)
        gc.collect()
        gc.freeze()  # a collection that goes through all of PyTorch stops every request for 0.4 s
        return lm

    name = arguments.name or Path(folder).resolve().name
    server = Server(load, name, settings)
    server.run()
    return FAILED if server.failed or not server.started else 0
