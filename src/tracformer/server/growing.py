"""A text while it grows, token by token: what of it may be told already.

Half a character waits for its other bytes. What may be the beginning of a stop string waits until it is clear that it is none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tracformer.generation.results import Candidate
from tracformer.generation.stopping import cut

HALF = "\ufffd"  # at the end of a decoded text: a character whose other bytes are still to come


@dataclass(frozen=True)
class Piece:
    """One token. Its text begins at `start` of the filling; `special`: it has none (the end of text)."""

    token_id: int
    log_prob: float
    candidates: tuple[Candidate, ...]
    start: int
    special: bool = False


class Growing:
    """`skip`: so many characters at the start of the filling are the prompt's (the space that moved into the blank)."""

    def __init__(self, decode: Callable[[Sequence[int]], str], eot: int, stops: Sequence[str] = (), skip: int = 0) -> None:
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
        apart = len(self._raw) > len(before) and self._raw.startswith(before)  # else it goes on with a character that began before it
        start = len(before) if apart or not self.pieces else self.pieces[-1].start
        self.pieces.append(Piece(token_id, log_prob, candidates, start))
        if not self._raw.endswith(HALF):
            self._grow(self._raw)

    def add_all(self, token_ids: Sequence[int], log_probs: Sequence[float], candidates: Sequence[tuple[Candidate, ...]] = ()) -> None:
        """All tokens from the first on; those that are here already are passed by."""
        for i in range(self._count, len(token_ids)):
            self.add(token_ids[i], log_probs[i], candidates[i] if candidates else ())

    def finish(self) -> None:
        """Nothing more will come: half a character stays half."""
        if self.stopped is None:
            self._grow(self._raw)

    def release(self, finished: bool = False) -> tuple[str, list[Piece]]:
        """What is certain and was not told yet."""
        safe = len(self.text) if finished or self.stopped is not None else len(self.text) - self._doubtful()
        safe = max(safe, self._told)
        text, self._told = self.text[self._told : safe], safe
        ready = [piece for piece in self.pieces if piece.start < safe or (finished and piece.special)]
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
        return next((len(tail) - i for i in range(len(tail)) if any(stop.startswith(tail[i:]) for stop in self.stops)), 0)
