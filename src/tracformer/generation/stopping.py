"""Stop strings: a text ends where one of them appears, and is cut before it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence


class StopStrings:
    """A `stop` of the filling loop (see `job.Stop`), for rows written from left to right. End of
    text ends a row too.

    read: the text of tokens from the first on. skip: so many characters at the start belong to the
    prompt, which has nothing to stop.
    required: strings count only behind the last of these tokens to come.
    """

    def __init__(
        self,
        strings: Sequence[str],
        read: Callable[[Sequence[int]], str],
        end: int,
        skip: int = 0,
        required: Iterable[int] = (),
    ) -> None:
        if isinstance(strings, str):
            raise ValueError(
                f"stop is {strings!r}; it must be a list of strings, for instance [{strings!r}]"
            )
        if "" in strings:
            raise ValueError("a stop string is empty; each needs at least one character")
        self.strings, self.read, self.end, self.skip, self.required = (
            tuple(strings),
            read,
            end,
            skip,
            frozenset(required),
        )
        self.written: dict[int, list[int]] = defaultdict(list)  # of each row
        # A token may hold as little as one byte, so a string that ends with the newest token began
        # within so many tokens; a few more, since at the edge of what is decoded a character may be
        # cut.
        self.reach = max((len(string.encode()) for string in self.strings), default=0) + 4

    def __call__(self, row: int, position: int, token: int) -> bool:
        if token == self.end:
            return True
        ids = self.written[row]
        ids.append(token)
        recent = self.read(ids[-self.reach :])
        return any(string in recent for string in self.strings) and self.cut(ids)[1] is not None

    def cut(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """The text of all tokens, end of text left out, before the first string that stops it; and
        which that is.
        """
        text = self.read(ids)
        if not self.required <= set(ids):
            return text, None
        done = max((ids.index(token) + 1 for token in self.required), default=0)
        return cut(text, self.strings, max(self.skip, len(self.read(ids[:done]))))


def cut(text: str, strings: Sequence[str], skip: int) -> tuple[str, str | None]:
    """The text before the first stop string in it, and which that is; of several in one place, the
    first that was named.
    """
    found = [
        (at, number)
        for number, string in enumerate(strings)
        if (at := text.find(string, skip)) >= 0
    ]
    if not found:
        return text, None
    at, number = min(found)
    return text[:at], strings[number]
