"""JSON logs and Prometheus metrics.

The log holds one JSON object per line. Neither logs nor metrics ever contain the texts of requests.
"""

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from tracformer.server.queue import Backend

LOGGER = logging.getLogger("tracformer.server")


class JsonFormatter(logging.Formatter):
    """Write a log record as one line of JSON.

    An exception appears by its type and traceback only: its message may quote a text.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
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


def configure_logging(level: str) -> None:
    """Send the logs of the server and of uvicorn to standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    # uvicorn's own info messages repeat what the server logs
    for name, least in (
        (LOGGER.name, level.upper()),
        ("tracformer", "WARNING"),
        ("uvicorn", "WARNING"),
        ("asyncio", "WARNING"),
    ):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def log_event(
    event: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any
) -> None:
    """Write one event to the log.

    Args:
        event: Name of the event.
        level: Level of the `logging` module.
        error: Exception to log with its traceback.
        fields: Further fields of the line: numbers and names, never texts of a request.
    """
    LOGGER.log(level, event, extra={"fields": fields}, exc_info=error)


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one server.

    Each server has its own registry, so that two servers in one process do not add up.

    Args:
        backend: Returns the loaded model's backend, or None while it is loading.
    """

    def __init__(self, backend: "Callable[[], Backend | None]") -> None:
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
            "Time in the queue.",
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
            "tracformer_gone",
            "Clients that disconnected before the end of their answer.",
            registry=self.registry,
        )
        self.registry.register(_LoadCollector(backend))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _LoadCollector(Collector):
    """Gauges that are read from the engine and the gate when Prometheus scrapes."""

    def __init__(self, backend: "Callable[[], Backend | None]") -> None:
        self.backend = backend

    def collect(self) -> Iterable[Metric]:
        backend = self.backend()
        yield GaugeMetricFamily(
            "tracformer_ready", "1 when the model is loaded.", float(backend is not None)
        )
        if backend is None:
            return
        load, gate = backend.engine.load, backend.gate
        for name, description, value in (
            ("requests_running", "Requests that run.", gate.running),
            ("requests_waiting", "Requests in the queue.", gate.waiting),
            ("rows_running", "Rows in flight.", load.rows),
            ("rows_waiting", "Rows that wait to be admitted.", load.waiting),
            ("rows_capacity", "Maximum number of rows in flight.", load.capacity),
        ):
            yield GaugeMetricFamily(f"tracformer_{name}", description, value)
        for name, description, value in (
            ("steps", "Steps of the engine.", load.steps),
            ("tokens", "Tokens generated, those for choosing lengths included.", load.tokens),
        ):
            yield CounterMetricFamily(f"tracformer_engine_{name}", description, value)
