"""Answer over HTTP: our own protocol, OpenAI's completions, llama.cpp's infill, Mistral's FIM, and a page to try it on.

    tracformer serve runs/stories
    tracformer serve runs/stories --port 8080 --api-key-file key.txt

Listens on this machine alone unless --host says otherwise.
"""

import argparse

from tracformer.cli import texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="a model's folder, or a run's")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--port", type=int, default=8000, help="(default: 8000; 0: any that is free)")


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    import uvicorn

    from tracformer.server.app import build
    from tracformer.server.settings import Settings

    folder = arguments.model or texts.default_model()
    settings = Settings(arguments.host, arguments.port)
    app = build(lambda: texts.open_model(folder), Path(folder).name, settings)
    uvicorn.run(app, host=settings.host, port=settings.port, log_level="warning", ws="none")
    return 0
