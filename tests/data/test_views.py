from pathlib import Path

import numpy as np
import pytest

from tracformer.data.preparation import prepare
from tracformer.data.rows import Examples, PackedBlocks, Records, examples
from tracformer.data.shards import Split
from tracformer.data.sources import TextSource

TEXTS = ["abcdefgh", "ij", "klmno", "p"]
EOT = 256


@pytest.fixture
def split(tmp_path: Path) -> Split:
    return prepare(
        tmp_path / "out", TextSource(TEXTS), "byte", validation=0.0, shard_tokens=7, quiet=True
    ).split("train")


def rows(view: Examples) -> list[str]:
    """Every row up to its length, end of text shown as a dot; padding is end of text."""
    tokens, lengths = view.get(np.arange(len(view)))
    assert tokens.shape == (len(view), view.length)
    assert tokens.dtype == lengths.dtype == np.int64
    assert all((row[length:] == EOT).all() for row, length in zip(tokens, lengths, strict=True))
    return [
        "".join("." if i == EOT else chr(i) for i in row[:length])
        for row, length in zip(tokens, lengths, strict=True)
    ]


def test_packed_blocks(split: Split) -> None:
    assert rows(PackedBlocks(split, 6)) == ["abcdef", "gh.ij.", "klmno."]
    assert rows(PackedBlocks(split, 6, keep_remainder=True)) == ["abcdef", "gh.ij.", "klmno.", "p."]
    assert (
        rows(PackedBlocks(split, 5, keep_remainder=True))
        == rows(PackedBlocks(split, 5))
        == ["abcde", "fgh.i", "j.klm", "no.p."]
    )
    assert rows(PackedBlocks(split, 99, keep_remainder=True)) == ["abcdefgh.ij.klmno.p."]


def test_text_shorter_than_one_block(split: Split) -> None:
    with pytest.raises(ValueError, match="split 'train' has 20 tokens, fewer than one block of 21"):
        PackedBlocks(split, 21)


def test_records(split: Split) -> None:
    assert rows(Records(split, 9)) == ["abcdefgh.", "ij.", "klmno.", "p."]
    # no row holds an end of text alone
    assert rows(Records(split, 4)) == ["abcd", "efgh", "ij.", "klmn", "o.", "p."]
    assert rows(Records(split, 5)) == ["abcde", "fgh.", "ij.", "klmno", "p."]
    assert rows(Records(split, 4, long="cut")) == ["abcd", "ij.", "klmn", "p."]
    assert rows(Records(split, 4, keep_eot=False)) == ["abcd", "efgh", "ij", "klmn", "o", "p"]
    assert rows(Records(split, 1, keep_eot=False)) == list("abcdefghijklmnop")


def test_rows_in_any_order(split: Split) -> None:
    view = Records(split, 4)
    tokens, lengths = view.get(np.array([5, 0, 5]))
    everything = view.get(np.arange(6))
    assert np.array_equal(tokens, everything[0][[5, 0, 5]])
    assert lengths.tolist() == [2, 4, 2]


def test_the_switch_between_documents(split: Split) -> None:
    assert isinstance(examples(split, 6), PackedBlocks)
    assert rows(examples(split, 6, cross_documents=False)) == [
        "abcdef",
        "gh.",
        "ij.",
        "klmno.",
        "p.",
    ]
    assert rows(examples(split, 5, cross_documents=False)) == [
        "abcde",
        "fgh.",
        "ij.",
        "klmno",
        "p.",
    ]
    assert isinstance(examples(split, 6, rows="records"), Records)
    with pytest.raises(ValueError, match="rows is 'blocks'; allowed: packed, records"):
        examples(split, 6, rows="blocks")


def test_bad_arguments(split: Split) -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        PackedBlocks(split, 0)
    with pytest.raises(ValueError, match="max_length is -1"):
        Records(split, -1)
    with pytest.raises(ValueError, match="long is 'drop'; allowed: window, cut"):
        Records(split, 4, long="drop")
    with pytest.raises(ValueError, match=r"from 2 to 4 were asked for; rows are 0\.\.3"):
        PackedBlocks(split, 5).get(np.array([2, 4]))
    assert PackedBlocks(split, 5).get(np.array([], np.int64))[0].shape == (0, 5)
