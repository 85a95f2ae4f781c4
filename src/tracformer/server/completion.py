"""Completions of a prompt and suffix, shared by the protocols; server-sent events.

A text while it grows, token by token: what of it may be told already.

Half a character waits for its other bytes. What may be the beginning of a stop string waits until
it is clear that it is none.

Server-sent events: the lines of one event, and the answer that streams them.

What the protocols of other servers ask: write on from a prompt, or write what stands between a
prompt and a suffix.

Without a suffix: mode `ar`, until the end of text. With one: a blank of unknown length, and the
length rule of blanks chooses. Text is never read for blanks: brackets in it are brackets.
"""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from starlette.responses import StreamingResponse

from tracformer.generation.continuation import around, prompted
from tracformer.generation.language_model import LanguageModel
from tracformer.generation.results import Callback, Candidate, Candidates, Token
from tracformer.generation.samplers import PLAIN, Sampler
from tracformer.generation.stopping import cut
from tracformer.server.queue import Job

HALF = "\ufffd"  # at the end of a decoded text: a character whose other bytes are still to come


@dataclass(frozen=True)
class Piece:
    """One token.

    Its text begins at `start` of the filling; `special`: it has none (the end of text).
    """

    token_id: int
    log_prob: float
    candidates: tuple[Candidate, ...]
    start: int
    special: bool = False


class Growing:
    """`skip`: so many characters at the start of the filling are the prompt's (the space that moved
    into the blank).
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        eot: int,
        stops: Sequence[str] = (),
        skip: int = 0,
    ) -> None:
        self.decode, self.eot, self.stops, self.skip = decode, eot, stops, skip
        self.text = ""  # all of it, cut before a stop string
        self.stopped: str | None = None
        self.pieces: list[Piece] = []
        self._ids: list[int] = []
        self._raw = ""  # their text, half a character at its end included
        self._told = skip
        self._count = 0  # of tokens, those behind a stop string included
        self._told_pieces = 0

    def add(self, token_id: int, log_prob: float, candidates: tuple[Candidate, ...] = ()) -> None:
        self._count += 1
        if self.stopped is not None:
            return
        if token_id == self.eot:
            self.pieces.append(Piece(token_id, log_prob, candidates, len(self._raw), special=True))
            return
        before = self._raw
        self._ids.append(token_id)
        self._raw = self.decode(self._ids)
        # else it goes on with a character that began before it
        apart = len(self._raw) > len(before) and self._raw.startswith(before)
        start = len(before) if apart or not self.pieces else self.pieces[-1].start
        self.pieces.append(Piece(token_id, log_prob, candidates, start))
        if not self._raw.endswith(HALF):
            self._grow(self._raw)

    def add_all(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float],
        candidates: Sequence[tuple[Candidate, ...]] = (),
    ) -> None:
        """All tokens from the first on; those that are here already are passed by."""
        for i in range(self._count, len(token_ids)):
            self.add(token_ids[i], log_probs[i], candidates[i] if candidates else ())

    def finish(self) -> None:
        """Nothing more will come: half a character stays half."""
        if self.stopped is None:
            self._grow(self._raw)

    def release(self, finished: bool = False) -> tuple[str, list[Piece]]:
        """What is certain and was not told yet."""
        safe = (
            len(self.text)
            if finished or self.stopped is not None
            else len(self.text) - self._doubtful()
        )
        safe = max(safe, self._told)
        text, self._told = self.text[self._told : safe], safe
        ready = [
            piece for piece in self.pieces if piece.start < safe or (finished and piece.special)
        ]
        pieces, self._told_pieces = ready[self._told_pieces :], len(ready)
        return text, pieces

    def _grow(self, text: str) -> None:
        self.text, self.stopped = cut(text, self.stops, self.skip)
        if self.stopped is not None:
            self.pieces = [piece for piece in self.pieces if piece.start < len(self.text)]

    def _doubtful(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        most = max(map(len, self.stops), default=1) - 1
        tail = self.text[self.skip :][-most:] if most else ""
        return next(
            (
                len(tail) - i
                for i in range(len(tail))
                if any(stop.startswith(tail[i:]) for stop in self.stops)
            ),
            0,
        )


TOGETHER = 16  # events, at most
DONE = b"data: [DONE]\n\n"
# the second: proxies shall not hold events back
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: Any, name: str | None = None) -> bytes:
    """JSON has no raw line breaks, so that one `data:` line holds it."""
    line = f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
    return (line if name is None else f"event: {name}\n{line}").encode()


async def answer(job: Job[Any], events: AsyncIterator[bytes]) -> StreamingResponse:
    """Begins when the job has something to tell, so that a request that is refused
    gets a status that says so.
    """
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


LENGTHS = 12  # lengths of a blank that are weighed
LENGTH_DRAWS = 4  # fillings for the weight of each


@dataclass(frozen=True)
class Wish:
    prompt: str | tuple[int, ...]
    suffix: str = ""
    least: int = 1  # tokens; only with a suffix
    most: int = 16
    n: int = 1
    sampler: Sampler = PLAIN
    seed: int = 0
    stop: tuple[str, ...] = ()
    top: int = 0
    whole: bool = False  # the suffix ends the document


@dataclass(frozen=True)
class Written:
    """`text` follows the prompt and stands before the suffix and before the stop string.

    `pieces` begin at `base` of the whole text.
    """

    text: str
    pieces: tuple[Piece, ...]
    base: int
    generated: int  # tokens, those behind a stop string included
    finish: str  # stop: the text or the blank came to its end; length: there was no more room
    stopped: str | None = None

    @property
    def mean_log_prob(self) -> float:
        return sum(piece.log_prob for piece in self.pieces) / max(1, len(self.pieces))


@dataclass(frozen=True)
class Prompt:
    """What a prompt is to the model."""

    text: str
    ids: tuple[int, ...]
    base: int  # where what is written begins: before the prompt's last space, if that moved into it

    @property
    def skip(self) -> int:
        return len(self.text) - self.base


def read_prompt(lm: LanguageModel, prompt: str | tuple[int, ...]) -> Prompt:
    if isinstance(prompt, str):
        of = prompted(prompt, lm.spelling)
        return Prompt(prompt, of.ids[0], len(of.texts[0]))
    if wrong := next((i for i in prompt if i >= lm.tokenizer.vocab_size), None):
        raise ValueError(
            f"token id {wrong} is out of range; this model's ids are "
            f"0..{lm.tokenizer.vocab_size - 1}"
        )
    text = lm.tokenizer.decode(prompt)
    return Prompt(text, prompt, len(text))


def write_on(
    lm: LanguageModel, wish: Wish, tell: Callable[[int, str, list[Piece]], object]
) -> list[Written]:
    """`wish.n` samples. `tell(sample, text, pieces)` hears what is certain as it comes, and nothing
    where there is nothing new. When it returns False it hears no more.
    """
    prompt = read_prompt(lm, wish.prompt)
    room = lm.model.config.max_length - len(prompt.ids)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(prompt.ids)} tokens; this model takes "
            f"{lm.model.config.max_length}, with what is to be written"
        )

    def read(ids: Sequence[int]) -> str:
        return lm.spelling.behind(
            prompt.text[: prompt.base], prompt.ids, ids, moved=prompt.skip > 0
        )[1]

    lines = [Growing(read, lm.tokenizer.eot_id, wish.stop, prompt.skip) for _ in range(wish.n)]
    callback = _Listener(lines, tell)
    drawn = (
        _between(lm, wish, callback)
        if wish.suffix
        else _after(lm, wish, min(wish.most, room), callback)
    )
    results = []
    for sample, (line, each) in enumerate(zip(lines, drawn, strict=True)):
        # tokens that the callback did not receive
        line.add_all(each.token_ids, each.log_probs, each.candidates)
        line.finish()
        if callback.wanted and any(rest := line.release(finished=True)):
            tell(sample, *rest)
        reason = "stop" if each.ended or line.stopped is not None else "length"
        results.append(
            Written(
                line.text[line.skip :],
                tuple(line.pieces),
                prompt.base,
                len(each.token_ids),
                reason,
                line.stopped,
            )
        )
    return results


def score_prompt(lm: LanguageModel, ids: Sequence[int], top: int) -> list[Piece]:
    """The chain rule of mode `ar`, from the first token on."""
    nothing = [False] * len(ids)
    log_probs = lm.score_tokens(ids, nothing, "ar")
    candidates = lm.top_tokens(ids, nothing, top, "ar") if top else ((),) * len(ids)
    line = Growing(lm.tokenizer.decode, -1)
    for token, log_prob, likeliest in zip(ids, log_probs, candidates, strict=True):
        line.add(token, log_prob, likeliest)
    return line.pieces


def length_prior(low: int, high: int) -> dict[int, float]:
    """At most LENGTHS of the lengths low..high, closer together where they are short, each with the
    number of lengths it stands for.
    """
    count = high - low + 1
    if count <= LENGTHS:
        return dict.fromkeys(range(low, high + 1), 1.0)
    steps = [count ** (i / (LENGTHS - 1)) - 1 for i in range(LENGTHS)]
    grid = sorted({low + round(step) for step in steps})
    edges = [low - 0.5, *((a + b) / 2 for a, b in pairwise(grid)), high + 0.5]
    return {
        length: after - before
        for length, (before, after) in zip(grid, pairwise(edges), strict=True)
    }


class _Drawn(NamedTuple):
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    candidates: Candidates
    ended: bool


def _after(lm: LanguageModel, wish: Wish, most: int, callback: Callback) -> list[_Drawn]:
    sampled = lm.sample(
        wish.n,
        prompt=wish.prompt,
        max_tokens=most,
        sampler=wish.sampler,
        seed=wish.seed,
        stop=wish.stop,
        top=wish.top,
        callback=callback,
    )
    return [_Drawn(each.token_ids, each.log_probs, each.candidates, each.ended) for each in sampled]


def _between(lm: LanguageModel, wish: Wish, callback: Callback) -> list[_Drawn]:
    if wish.least > wish.most:
        raise ValueError(
            f"at least {wish.least} tokens are asked for, and at most {wish.most}; the first must "
            "not be larger"
        )
    filled = lm.infill(
        around(wish.prompt, wish.suffix, lm.spelling, blank=f"{wish.least}-{wish.most}"),
        wish.n,
        sampler=wish.sampler,
        seed=wish.seed,
        whole=wish.whole,
        prior=length_prior(wish.least, wish.most),
        length_draws=LENGTH_DRAWS,
        lengths="rank" if wish.sampler.temperature == 0 and wish.n == 1 else "sample",
        top=wish.top,
        callback=callback,
    )
    return [
        _Drawn(span.token_ids, span.log_probs, span.candidates, ended=True)
        for result in filled
        for span in result.spans
    ]


class _Listener(Callback):
    def __init__(
        self, lines: Sequence[Growing], tell: Callable[[int, str, list[Piece]], object]
    ) -> None:
        self.lines, self.tell, self.wanted = lines, tell, True

    def __call__(self, arrivals: list[Token]) -> bool:
        for arrival in arrivals:
            if arrival.draft:
                continue
            line = self.lines[arrival.sample]
            line.add(arrival.token_id, arrival.log_prob, arrival.candidates)
            if any(certain := line.release()) and self.tell(arrival.sample, *certain) is False:
                self.wanted = False
        return self.wanted
