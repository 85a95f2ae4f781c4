"""One JSON object a line, about requests and never about what is in them."""

import json
import logging
import sys
import time
import traceback
from typing import Any

LOGGER = logging.getLogger("tracformer.server")


class Lines(logging.Formatter):
    """An exception is told by its type and where it was raised; its message may quote a text, so it stays out."""

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
            line["trace"] = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
        return json.dumps(line)


def configure(level: str) -> None:
    """Everything that the server and uvicorn say goes to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    for name, least in ((LOGGER.name, level.upper()), ("uvicorn", "WARNING")):  # what uvicorn tells besides, we tell ourselves
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(least)


def tell(event: str, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    LOGGER.log(level, event, extra={"fields": fields}, exc_info=error)
