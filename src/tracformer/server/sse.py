"""Server-sent events: the lines of one event, and the answer that streams them."""

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

from tracformer.server.jobs import Job

TOGETHER = 16  # events, at most
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second: proxies shall not hold events back


def event(data: Any, name: str | None = None) -> bytes:
    """JSON has no raw line breaks, so that one `data:` line holds it."""
    line = f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


async def answer(job: Job[Any], events: AsyncIterator[bytes]) -> StreamingResponse:
    """Begins when the job has something to tell, so that a request that is refused gets a status that says so."""
    await job.begun()
    return StreamingResponse(_joined(job, events), media_type="text/event-stream", headers=HEADERS)


async def _joined(job: Job[Any], events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """What is ready goes out together, a few events at a time."""
    held: list[bytes] = []
    async for each in events:
        held.append(each)
        if not job.more or len(held) == TOGETHER:
            yield b"".join(held)
            held = []
    if held:
        yield b"".join(held)
