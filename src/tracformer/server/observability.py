"""JSON logs and Prometheus metrics.

One JSON object a line, about requests and never about what is in them.

Numbers for Prometheus: what was asked, how long it took, how full the engine is.
"""

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tracformer.server.queue import Desk

LOGGER = logging.getLogger("tracformer.server")


class Lines(logging.Formatter):
    """An exception is told by its type and where it was raised; its message may
    quote a text, so it stays out.
    """

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = type(error).__name__
            line["trace"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(error.__traceback__)
            ]
        return json.dumps(line)


def configure(level: str) -> None:
    """Everything that the server and uvicorn say goes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    # what uvicorn tells besides, we tell ourselves
    for name, least in ((LOGGER.name, level.upper()), ("uvicorn", "WARNING")):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def tell(
    event: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any
) -> None:
    LOGGER.log(level, event, extra={"fields": fields}, exc_info=error)


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """One registry a server, so that two in one process do not add up."""

    def __init__(self, desk: Callable[[], Desk | None]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "tracformer_requests", "Requests answered.", ["path", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "tracformer_request_seconds",
            "From arrival to the last byte.",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.queued = Histogram(
            "tracformer_queued_seconds",
            "Waiting for a turn.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.first = Histogram(
            "tracformer_first_token_seconds",
            "From arrival to the first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.tokens = Counter(
            "tracformer_tokens", "Tokens of finished requests.", ["kind"], registry=self.registry
        )
        self.gone = Counter(
            "tracformer_gone", "Clients that went away before their answer.", registry=self.registry
        )
        self.registry.register(_Load(desk))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Load(Collector):
    """Read when it is asked for."""

    def __init__(self, desk: Callable[[], Desk | None]) -> None:
        self.desk = desk

    def collect(self) -> Iterable[Metric]:
        desk = self.desk()
        yield GaugeMetricFamily(
            "tracformer_ready", "1 when the model is loaded.", float(desk is not None)
        )
        if desk is None:
            return
        load = desk.engine.load
        yield GaugeMetricFamily(
            "tracformer_requests_running", "Requests that run.", desk.gate.running
        )
        yield GaugeMetricFamily(
            "tracformer_requests_waiting", "Requests that wait for a turn.", desk.gate.waiting
        )
        yield GaugeMetricFamily(
            "tracformer_rows_running", "Sequences that step together.", load.rows
        )
        yield GaugeMetricFamily(
            "tracformer_rows_waiting", "Sequences that wait for a row.", load.waiting
        )
        yield GaugeMetricFamily(
            "tracformer_rows_capacity", "Sequences that can step together.", load.capacity
        )
        yield CounterMetricFamily("tracformer_engine_steps", "Steps of the engine.", load.steps)
        yield CounterMetricFamily(
            "tracformer_engine_tokens",
            "Tokens that steps have filled, those for lengths included.",
            load.tokens,
        )
