from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracformer.data import split as carve
from tracformer.data.readers import Piece
from tracformer.data.split import ByHash, Tail, Whole, choose_rule

DOCUMENTS = [f"document number {i}" for i in range(3000)]


def pieces(texts: Iterable[str], size: int = 10**9) -> list[Piece]:
    return [
        Piece(text[i : i + size], i + size >= len(text), "here")
        for text in texts
        for i in range(0, max(len(text), 1), size)
    ]


def routed(rule: carve.Rule, given: list[Piece]) -> dict[str, list[str]]:
    """Whole documents by split; each split must end with a document's end."""
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    open_ = {"train": "", "validation": ""}
    for split, piece in rule.route(given):
        open_[split] += piece.text
        if piece.end:
            splits[split].append(open_[split])
            open_[split] = ""
    assert open_ == {"train": "", "validation": ""}
    return splits


def test_many_documents_are_drawn_by_hash() -> None:
    rule = choose_rule(pieces(DOCUMENTS), 0.1)
    assert rule == ByHash(0.1)
    splits = routed(rule, pieces(DOCUMENTS))
    assert sorted(splits["train"] + splits["validation"]) == sorted(DOCUMENTS)
    assert 230 < len(splits["validation"]) < 370
    assert routed(rule, pieces(DOCUMENTS[::-1]))["validation"] == splits["validation"][::-1]
    copies = routed(rule, pieces(DOCUMENTS[:50] * 3))
    assert not set(copies["train"]) & set(copies["validation"])


def test_counting_stops_when_there_are_enough() -> None:
    read = 0

    def counted() -> Iterable[Piece]:
        nonlocal read
        for read, piece in enumerate(pieces(DOCUMENTS), 1):  # noqa: B007
            yield piece

    choose_rule(counted(), 0.1)
    assert read == 200


def test_all_pieces_of_a_document_go_to_one_side() -> None:
    splits = routed(ByHash(0.5), pieces([f"{i} and some more words" for i in range(100)], size=5))
    assert sorted(splits["train"] + splits["validation"]) == sorted(
        f"{i} and some more words" for i in range(100)
    )
    assert 25 < len(splits["train"]) < 75


@settings(deadline=None)
@given(
    st.lists(st.text("ab \n", min_size=1, max_size=40), min_size=1, max_size=6),
    st.integers(1, 50),
    st.floats(0.01, 0.5),
)
def test_a_tail_loses_nothing_and_ends_every_document(
    texts: list[str], size: int, fraction: float
) -> None:
    total = sum(map(len, texts))
    if int(total * (1.0 - fraction)) < 1:
        return
    rule = choose_rule(pieces(texts, size), fraction)
    assert isinstance(rule, Tail)
    splits = routed(rule, pieces(texts, size))
    assert "".join(splits["train"] + splits["validation"]) == "".join(texts)
    assert splits["train"]
    assert splits["validation"]


def test_a_tail_begins_at_a_document_if_one_is_near() -> None:
    texts = ["a" * 500, "b" * 400, "c" * 60, "d" * 40]
    assert routed(choose_rule(pieces(texts), 0.1), pieces(texts))["validation"] == texts[2:]


def test_a_tail_begins_at_white_space_inside_a_book() -> None:
    book = "word " * 1000
    splits = routed(choose_rule(pieces([book]), 0.1), pieces([book]))
    assert len(splits["train"][0]) == 4499
    assert splits["validation"][0].startswith(" word")


def test_nothing_held_back_or_too_little_to_hold_back() -> None:
    assert choose_rule([], 0.0) == Whole("train")
    with pytest.raises(ValueError, match=r"1 characters long, too short to hold back 5\.0%"):
        choose_rule(pieces(["a"]), 0.05)
