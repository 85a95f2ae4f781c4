"""How long a reproduction has still to go, in words."""

import time


class Pace:
    """How long is left, by the pace so far: training by tokens, evaluation by the piece."""

    def __init__(self) -> None:
        self.tokens = self.pieces = 0.0  # to do
        self.token_time = self.piece_time = self.tokens_done = self.pieces_done = 0.0
        self.started, self._now = 0.0, (0.0, 0.0)

    def expect(self, tokens: float, pieces: float) -> None:
        self.tokens, self.pieces = tokens, pieces

    def training(self, tokens: float) -> "Pace":
        self._now = (tokens, 0.0)
        return self

    def evaluation(self) -> "Pace":
        self._now = (0.0, 1.0)
        return self

    def __enter__(self) -> None:
        self.started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        spent = time.monotonic() - self.started
        tokens, pieces = self._now
        self.tokens, self.pieces = self.tokens - tokens, self.pieces - pieces
        self.tokens_done, self.pieces_done = self.tokens_done + tokens, self.pieces_done + pieces
        self.token_time += spent if tokens else 0.0
        self.piece_time += spent if pieces else 0.0

    def left(self) -> str:
        """In words, once something is known about what is left."""
        trains, asks = self.tokens > 0, self.pieces > 0
        if not (trains and self.tokens_done) and not (asks and self.pieces_done and not trains):
            return ""
        seconds = self.tokens * self.token_time / self.tokens_done if trains else 0.0
        seconds += self.pieces * self.piece_time / self.pieces_done if self.pieces_done else 0.0
        return f"; about {duration(seconds)}{' of training' if trains and not self.pieces_done else ''} left"


def tokens(count: float) -> str:
    """
    >>> tokens(24.6e6), tokens(295e9), tokens(384)
    ('24.6M tokens', '295B tokens', '384 tokens')
    """
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter} tokens"
    return f"{count:.0f} tokens"


def duration(seconds: float) -> str:
    """
    >>> duration(40), duration(600), duration(9000)
    ('40 s', '10 min', '2 h 30 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
