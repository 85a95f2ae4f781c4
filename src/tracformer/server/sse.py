"""Server-sent events: the lines of one event, and the answer that streams them."""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second: proxies shall not hold events back


def event(data: Any, name: str | None = None) -> bytes:
    """JSON has no raw line breaks, so that one `data:` line holds it."""
    line = f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


def answer(events: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers=HEADERS)
