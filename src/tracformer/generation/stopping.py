"""Stop strings: a text ends where one of them appears, and is cut before it."""

from collections import defaultdict
from collections.abc import Sequence

from tracformer.data.tokenizer import Tokenizer


class StopStrings:
    """A `stop` of the filling loop (see `job.Stop`), for rows written from left to right. End of text ends a row too.

    skip: so many characters at the start belong to the prompt, which has nothing to stop.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer, end: int, skip: int = 0) -> None:
        if isinstance(strings, str):
            raise ValueError(f"stop is {strings!r}; it must be a list of strings, for instance [{strings!r}]")
        if "" in strings:
            raise ValueError("a stop string is empty; each needs at least one character")
        self.strings, self.tokenizer, self.end, self.skip = tuple(strings), tokenizer, end, skip
        self.written: dict[int, list[int]] = defaultdict(list)  # of each row
        # A token may hold as little as one byte, so a string that ends with the newest token began within so many tokens; a few more, since
        # at the edge of what is decoded a character may be cut.
        self.reach = max((len(string.encode()) for string in self.strings), default=0) + 4

    def __call__(self, row: int, position: int, token: int) -> bool:
        if token == self.end:
            return True
        ids = self.written[row]
        ids.append(token)
        recent = self.tokenizer.decode(ids[-self.reach :])
        return any(string in recent for string in self.strings) and self.cut(self.tokenizer.decode(ids))[1] is not None

    def cut(self, text: str) -> tuple[str, str | None]:
        return cut(text, self.strings, self.skip)


def cut(text: str, strings: Sequence[str], skip: int) -> tuple[str, str | None]:
    """The text before the first stop string in it, and which that is; of several in one place, the first that was named."""
    found = [(at, number) for number, string in enumerate(strings) if (at := text.find(string, skip)) >= 0]
    if not found:
        return text, None
    at, number = min(found)
    return text[:at], strings[number]
