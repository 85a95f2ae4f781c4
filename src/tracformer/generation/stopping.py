"""Stop strings: a text ends where one of them appears, and is cut before it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence


class StopStrings:
    """A `stop` function of `fill`, for rows written from left to right.

    Args:
        strings: Strings that end a row.
        read: Returns the text of a row's tokens from the first on.
        end: The token that ends a text; it ends a row too.
        skip: Number of characters at the start that belong to the prompt, where nothing stops.
        required: Strings count only after the last of these tokens.

    Raises:
        ValueError: A string is empty, or `strings` is itself a string.
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
        # A token holds at least one byte, so a string that ends with the newest token began within
        # this many tokens; 4 more, since a character may be cut where decoding begins.
        self.reach = max((len(string.encode()) for string in self.strings), default=0) + 4

    def __call__(self, row: int, position: int, token: int) -> bool:
        if token == self.end:
            return True
        ids = self.written[row]
        ids.append(token)
        recent = self.read(ids[-self.reach :])
        return any(string in recent for string in self.strings) and self.cut(ids)[1] is not None

    def cut(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """Return the text of tokens before the first stop string, and that string."""
        text = self.read(ids)
        if not self.required <= set(ids):
            return text, None
        done = max((ids.index(token) + 1 for token in self.required), default=0)
        return cut(text, self.strings, max(self.skip, len(self.read(ids[:done]))))


def cut(text: str, strings: Sequence[str], skip: int) -> tuple[str, str | None]:
    """Return the text before the first stop string in it, and that string or None.

    Args:
        text: The text.
        strings: Stop strings. Of several at one place the first one counts.
        skip: Number of characters at the start that are not searched.
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
