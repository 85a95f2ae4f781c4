"""Serve a model with several replicas behind one address, by Ray Serve.

    pip install 'tracformer[ray,serve]'
    python examples/ray_serve.py --model stories --replicas 2 --port 8000
    curl localhost:8000/v1/infill -d '{"text": "Once upon a time [[3-8]] lived.", "seed": 1}'

Every replica answers all protocols of `tracformer serve` (docs/serve.md). A replica keeps nothing
between requests, and an answer depends on the request and its seed alone, so it does not matter
which replica gives it. Ray replaces a replica that dies; requests that it was working on get status
500 and can be sent again. With --ray HOST:PORT, the replicas run on the nodes of a cluster.
"""

import argparse
from collections.abc import Callable
from typing import Any

import ray
import torch
from ray import serve

from tracformer import load
from tracformer.server import Settings
from tracformer.server.app import make_app

KEEP_LINES = argparse.RawDescriptionHelpFormatter


def builder(model: str) -> Callable[[], Any]:
    """Return the function that loads the model in a replica and returns its application."""

    def build() -> Any:
        torch.set_num_threads(1)  # one core per replica
        lm = load(model)
        return make_app(lambda: lm, model, Settings(hosts=("*",)))

    return build


def main() -> None:
    """Start the replicas and serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=KEEP_LINES)
    parser.add_argument("--model", default="stories", help="as for `tracformer serve`")
    parser.add_argument("--replicas", type=int, default=2, help="one core each (default: 2)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--ray", metavar="HOST:PORT", help="a cluster that runs already")
    given = parser.parse_args()
    here: dict[str, Any] = {"num_cpus": given.replicas, "object_store_memory": 2 * 10**8}
    ray.init(log_to_driver=False, **({"address": given.ray} if given.ray else here))
    serve.start(http_options={"host": given.host, "port": given.port})
    replica = serve.deployment(serve.ingress(builder(given.model))())
    application = replica.options(
        num_replicas=given.replicas, max_ongoing_requests=64, health_check_period_s=2
    ).bind()
    serve.run(application, name="tracformer", blocking=True)


if __name__ == "__main__":
    main()
