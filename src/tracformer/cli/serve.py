"""Answer over HTTP: our own protocol, OpenAI's completions, llama.cpp's infill, Mistral's FIM, and
a page to try it on.

    tracformer serve runs/stories
    TRACFORMER_API_KEY=secret tracformer serve runs/stories --host 0.0.0.0 --port 8080

Without --host it listens on this machine alone. SIGTERM lets running requests finish first. Logs
are JSON lines on standard error, about requests and never about what is in them.
"""

import argparse
import os
from pathlib import Path

from tracformer.cli import arguments as texts
from tracformer.files import optional_package

KEY = "TRACFORMER_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model's folder, or a run's")
    texts.add_weights(parser)
    parser.add_argument("--name", help="what clients call the model (default: its folder's name)")
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        metavar="NAME",
        help="another name for it, or * for any; repeatable",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1, this machine alone)",
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="(default: 8000; 0: any that is free)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what clients must send; better given as {KEY}, which other users cannot see",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages from there may call, or * for all; repeatable",
    )
    texts.add_device(parser)
    parser.add_argument(
        "--rows",
        type=int,
        default=64,
        metavar="N",
        help="sequences, and requests, at once (default: 64)",
    )
    parser.add_argument(
        "--queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait; more are refused (default: 64)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60,
        metavar="SECONDS",
        help="most time of a request (default: 60)",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=30,
        metavar="SECONDS",
        help="most time to finish after SIGTERM (default: 30)",
    )
    parser.add_argument(
        "--max-body",
        type=int,
        default=2**20,
        metavar="BYTES",
        help="largest request (default: 1048576)",
    )
    parser.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error")
    )


def run(arguments: argparse.Namespace) -> int:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        optional_package(package, "tracformer serve", "serve")
    from tracformer.devices import pick_device
    from tracformer.loading import find_folder
    from tracformer.model.fast_step import check_kind
    from tracformer.server.app import Server
    from tracformer.server.observability import configure_logging
    from tracformer.server.schema import Limits, Settings

    folder = arguments.model or texts.default_model()
    settings = Settings(
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key or os.environ.get(KEY) or None,
        origins=tuple(arguments.allow_origin),
        aliases=tuple(arguments.alias),
        rows=arguments.rows,
        queue=arguments.queue,
        timeout=arguments.timeout,
        drain=arguments.drain,
        limits=Limits(body=arguments.max_body),
    )
    # What can be told of a slip is told at once, not after the server has begun to listen.
    find_folder(folder)
    check_kind(arguments.weights)
    device = pick_device(arguments.device)
    configure_logging(arguments.log_level)
    name = arguments.name or Path(folder).resolve().name
    server = Server(lambda: texts.open_model(folder, arguments.weights, device), name, settings)
    server.run()
    return 1 if server.failed or not server.started else 0
