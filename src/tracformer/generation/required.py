"""Tokens that must come somewhere: is there a place left for each?"""

from collections.abc import Collection, Sequence


def fit(tokens: Collection[int], free: int, limited: Sequence[Collection[int]]) -> bool:
    """A place for each token, among `free` ones that hold any and `limited` ones that hold only those named: a matching of both."""
    if len(tokens) <= free:
        return True
    taken: dict[int, int] = {}  # which limited place a token has

    def seat(place: int, tried: set[int]) -> bool:
        for token in limited[place]:
            if token in tokens and token not in tried:
                tried.add(token)
                if token not in taken or seat(taken[token], tried):
                    taken[token] = place
                    return True
        return False

    return free + sum(seat(place, set()) for place in range(len(limited))) >= len(tokens)
