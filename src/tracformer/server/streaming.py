"""Text and tokens on their way to the client, as JSON answers and as server-sent events.

- `PartialText` decides which part of a growing text can be sent already.
- `TokenNames` gives the text of a token as OpenAI's and llama.cpp's protocols write it.
- `write_json` and `answer_json` write answers, `event` and `stream_events` server-sent events.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from starlette.responses import Response, StreamingResponse

from tracformer.generation.continuation import cut
from tracformer.generation.language_model import LanguageModel
from tracformer.generation.results import Candidate, require_finite
from tracformer.generation.token_text import bytes_of
from tracformer.server.queue import LARGE, QueuedRequest, off_the_loop

INCOMPLETE = "\ufffd"  # at the end of a decoded text: a character whose other bytes are to come
EVENTS_TOGETHER = 16  # events sent in one piece, at most
DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the second is for proxies


@dataclass(frozen=True)
class CompletionToken:
    """One token of a completion.

    Its text begins at `start` of the generated text. `special`: the end of text, which has none.
    """

    token_id: int
    log_prob: float
    candidates: tuple[Candidate, ...]
    start: int
    special: bool = False


class PartialText:
    """A text that grows token by token, and what of it can be sent.

    An incomplete UTF-8 character waits for its other bytes. The possible beginning of a stop string
    waits until it is clear that the string does not follow.

    Args:
        decode: Returns the text of token ids.
        eot: Id of the end-of-text token.
        stops: Stop strings; the text ends before the first of them.
        skip: Number of characters at the start that belong to the prompt (a space that moved into
            the blank).
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        eot: int,
        stops: Sequence[str] = (),
        skip: int = 0,
    ) -> None:
        self.decode, self.eot, self.stops, self.skip = decode, eot, stops, skip
        self.text = ""  # cut before a stop string
        self.stopped: str | None = None  # the stop string that was found
        self.tokens: list[CompletionToken] = []
        self._ids: list[int] = []
        self._decoded = ""  # text of the ids, with an incomplete character at its end
        self._sent = skip
        self._sent_tokens = 0
        self._count = 0  # tokens, those after a stop string included

    def add(self, token_id: int, log_prob: float, candidates: tuple[Candidate, ...] = ()) -> None:
        """Append a token; tokens after a stop string are only counted."""
        require_finite((log_prob,))
        self._count += 1
        if self.stopped is not None:
            return
        if token_id == self.eot:
            end = len(self._decoded)
            self.tokens.append(CompletionToken(token_id, log_prob, candidates, end, special=True))
            return
        before = self._decoded
        self._ids.append(token_id)
        self._decoded = self.decode(self._ids)
        # a token that completes a character begins where that character began
        separate = len(self._decoded) > len(before) and self._decoded.startswith(before)
        start = len(before) if separate or not self.tokens else self.tokens[-1].start
        self.tokens.append(CompletionToken(token_id, log_prob, candidates, start))
        if not self._decoded.endswith(INCOMPLETE):
            self._cut()

    def add_all(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        candidates: Sequence[tuple[Candidate, ...]] = (),
    ) -> None:
        """Append what is missing of a full sequence of tokens."""
        for i in range(self._count, len(token_ids)):
            self.add(token_ids[i], log_probs[i], candidates[i] if candidates else ())

    def finish(self) -> None:
        """Accept an incomplete character at the end: no more tokens will come."""
        if self.stopped is None:
            self._cut()

    def release(self, finished: bool = False) -> tuple[str, list[CompletionToken]]:
        """Return the text and tokens that are certain and were not returned before."""
        end = len(self.text)
        if not finished and self.stopped is None:
            end -= self._possible_stop()
        end = max(end, self._sent)
        text, self._sent = self.text[self._sent : end], end
        ready = [
            token for token in self.tokens if token.start < end or (finished and token.special)
        ]
        tokens, self._sent_tokens = ready[self._sent_tokens :], len(ready)
        return text, tokens

    def _cut(self) -> None:
        self.text, self.stopped = cut(self._decoded, self.stops, self.skip)
        if self.stopped is not None:
            self.tokens = [token for token in self.tokens if token.start < len(self.text)]

    def _possible_stop(self) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        tail = self.text[self.skip :][-longest:] if longest else ""
        for i in range(len(tail)):
            if any(stop.startswith(tail[i:]) for stop in self.stops):
                return len(tail) - i
        return 0


class TokenNames:
    """Token ids to text, as OpenAI writes tokens.

    Bytes that are not text by themselves are named by their codes, as in "bytes:" and two escaped
    bytes in hexadecimal.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm

    def __getitem__(self, token_id: int) -> str:
        text = self.lm.spelling.token(token_id)
        raw = self.raw(token_id) if INCOMPLETE in text else b""
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if raw else text

    def raw(self, token_id: int) -> bytes:
        """Return the token's bytes; none where only the tokenizer knows them."""
        text = self.lm.spelling.token(token_id)
        if INCOMPLETE not in text:
            return text.encode()
        if self.lm.tokenizer.kind == "byte":
            return bytes([token_id])
        byte = self.lm.tokenizer.bytes_of_ids.get(token_id)
        return self._all_bytes[token_id] if byte is None else bytes([byte])

    @cached_property
    def _all_bytes(self) -> list[bytes]:
        return bytes_of(self.lm.tokenizer.tokens())


ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def write_json(data: Any, size: int = 0) -> str:
    """Return JSON; other threads wait while it is written, so large data are written in pieces.

    Args:
        data: The data.
        size: Number of tokens and candidates in it.
    """
    return "".join(ENCODER.iterencode(data)) if size > LARGE else ENCODER.encode(data)


async def answer_json(render: Callable[[], Any], size: int) -> Response:
    """Return an answer as JSON.

    Args:
        render: Returns the answer; called in a thread if it is large.
        size: Number of tokens and candidates in it.
    """
    body = await off_the_loop(lambda: write_json(render(), size), size)
    return Response(body, media_type="application/json")


def event(data: Any, name: str | None = None, size: int = 0) -> bytes:
    """Return a server-sent event with JSON data; for `size` see `write_json`."""
    # JSON contains no raw line breaks, so one `data:` line holds it
    line = f"data: {write_json(data, size)}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


async def stream_events(
    request: QueuedRequest[Any], events: AsyncIterator[bytes]
) -> StreamingResponse:
    """Return a stream of events; it begins with the request's first item.

    A request that fails before raises, so that its status says so.
    """
    await request.begun()
    return StreamingResponse(
        _grouped(request, events), media_type="text/event-stream", headers=HEADERS
    )


async def _grouped(
    request: QueuedRequest[Any], events: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Send events that are ready together, a few at a time."""
    held: list[bytes] = []
    async for each in events:
        held.append(each)
        if not request.more or len(held) == EVENTS_TOGETHER:
            yield b"".join(held)
            held = []
    if held:
        yield b"".join(held)
