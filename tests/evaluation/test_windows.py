"""Windows of text: every model reads the same text, whatever its tokenizer."""

from pathlib import Path

import numpy as np
import pytest

from tests.toys import small_model
from tracformer.contexts import Prefix, parse
from tracformer.data import Tokenizer, byte_tokenizer, char_tokenizer, prepare, train_bpe
from tracformer.data.make_tokenizer import ALPHABETS
from tracformer.evaluation import Subject, make_task
from tracformer.evaluation.windows import Sequences
from tracformer.generation.token_text import spelled_bytes

TEXT = (
    "the grün cat… and the €5 hat. " * 30
    + "<|endoftext|>"
    + "a small ñandú sat on the mat, twice. " * 30
)


def read(
    tokenizer: Tokenizer,
    reference: Tokenizer | None = None,
    max_length: int = 256,
    **options: object,
) -> Sequences:
    model = small_model(vocab_size=tokenizer.vocab_size, max_length=max_length, n_layer=8)
    return make_task("prefixes", options).read(
        Subject(model, tokenizer, "model", "car", reference=reference)
    )  # type: ignore[attr-defined]


@pytest.fixture
def data(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    return train_bpe([TEXT], 330)


def test_windows_are_spread_over_the_text(data: str) -> None:
    whole = read(byte_tokenizer(), data=data, length=32, sequences=0)
    some = read(byte_tokenizer(), data=data, length=32, sequences=7)
    assert len(whole) == (len(TEXT.replace("<|endoftext|>", "").encode()) + 2) // 32
    assert whole.tokens.reshape(-1)[:10].tolist() == list(TEXT.encode()[:10])
    np.testing.assert_array_equal(some.tokens, whole.tokens[np.arange(7) * len(whole) // 7])
    assert whole.hash != some.hash


def test_a_prepared_folder_and_its_text_give_the_same(
    data: str, tmp_path: Path, pieces: Tokenizer
) -> None:
    prepare(tmp_path / "run" / "data", data, byte_tokenizer(), validation=0.0, quiet=True)
    from_text = read(byte_tokenizer(), data=data, length=16, sequences=9)
    for place in ("run", "run/data"):
        prepared = read(
            byte_tokenizer(), data=str(tmp_path / place), split="train", length=16, sequences=9
        )
        np.testing.assert_array_equal(prepared.tokens, from_text.tokens)
    # decoded, and cut by its own tokens
    other = read(pieces, data=str(tmp_path / "run"), split="train", length=16, sequences=9)
    np.testing.assert_array_equal(
        other.tokens, read(pieces, data=data, length=16, sequences=9).tokens
    )


def test_windows_are_beginnings_of_documents(data: str) -> None:
    found = read(byte_tokenizer(), data=data, length=20, sequences=2, rows="documents")
    assert [bytes(row.tolist()) for row in found.tokens] == [
        part.encode()[:20] for part in TEXT.split("<|endoftext|>")
    ]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"length": 5000}, "has 2222 tokens, fewer than a window of 5000"),
        (
            {"length": 900, "rows": "documents", "sequences": 3},
            "sequences is 3, but .* holds only 2 windows of 900 tokens",
        ),
        (
            {"length": 1200, "rows": "documents"},
            "the longest document of .* has 1170 tokens, fewer than a window of 1200",
        ),
        (
            {"length": 32, "sequences": 1000},
            "sequences is 1000, but .* holds only 69 windows of 32 tokens; 0 takes all",
        ),
        (
            {"length": 300, "sequences": 2},
            "have up to 300 tokens in model, which takes at most 256; choose a smaller length",
        ),
        ({"rows": "lines"}, "rows is 'lines'; it must be one of packed, documents"),
        ({"data": ""}, "no data given"),
    ],
)
def test_wrong_data_and_options_raise(
    data: str, options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(byte_tokenizer(), **{"data": data, **options})


def test_a_missing_data_set_raises(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"wikitext103.*Looked for at .*nowhere.*tracformer prepare"
    ):
        read(byte_tokenizer(), data=str(tmp_path / "nowhere"))


def test_another_tokenizer_reads_the_same_text(data: str, pieces: Tokenizer) -> None:
    """Windows of bytes may begin and end inside a character; such parts are left out."""
    base = read(byte_tokenizer(), data=data, length=50, sequences=0)
    other = read(pieces, byte_tokenizer(), data=data, length=50, sequences=0)
    assert other.hash == base.hash
    for row, length, window in zip(other.tokens, other.lengths, base.tokens, strict=True):
        whole = b"".join(b"|" if i == 256 else bytes([i]) for i in window)
        text = pieces.decode([i for i in row[:length] if i != pieces.eot_id])
        assert text == whole.decode(errors="ignore").replace("|", "")
    assert (other.tokens == pieces.eot_id)[
        np.arange(other.tokens.shape[1]) < other.lengths[:, None]
    ].sum() == 1  # the last end is after the last window


def test_targets_are_the_same_stretches_of_text(data: str, pieces: Tokenizer) -> None:
    base = read(byte_tokenizer(), data=data, length=50, sequences=0)
    other = read(pieces, byte_tokenizer(), data=data, length=50, sequences=0)
    table = spelled_bytes(pieces)
    assert table is not None
    for name in ("[0.2,0.3]&[0.5,1]", "span:p=0.5,mean=4"):
        expected, own = base.contexts(parse(name), seed=1), other.contexts(parse(name), seed=1)
        for row, (context, mine) in enumerate(zip(expected, own, strict=True)):
            at = 0
            window = [b"\xff" if i == 256 else bytes([i]) for i in base.tokens[row]]
            while window[at][0] & 0xC0 == 0x80:
                at += 1
            for token, given in zip(
                other.tokens[row, : other.lengths[row]].tolist(), mine, strict=False
            ):
                size = 1 if token == pieces.eot_id else len(table[token])
                assert given == context[at : at + size].all()
                at += size
        assert own[np.arange(own.shape[1]) >= other.lengths[:, None]].all()


def test_sizes_are_bytes_of_tokens(pieces: Tokenizer, data: str) -> None:
    found = read(pieces, data=data, length=40, sequences=5)
    assert found.sizes is not None
    texts = [pieces.decode(row) for row in found.tokens]
    assert found.sizes.sum(1).tolist() == [
        len(text.replace("<|endoftext|>", "").encode(errors="replace")) for text in texts
    ]
    letters = char_tokenizer("aé€")
    assert spelled_bytes(letters) == [b"a", "é".encode(), "€".encode(), b""]


def test_an_aligned_model_reads_the_gaps_of_fasta(tmp_path: Path) -> None:
    path = tmp_path / "family.fasta"
    path.write_text(">a\nAC-GT-N\n>b\nACGGT--\n")
    aligned, plain = char_tokenizer(ALPHABETS["dna-aligned"]), char_tokenizer(ALPHABETS["dna"])
    rows = read(aligned, data=str(path), length=7, sequences=0, rows="documents")
    assert [aligned.decode(row) for row in rows.tokens] == ["AC-GT-N", "ACGGT--"]
    rows = read(plain, data=str(path), length=5, sequences=0, rows="documents")
    assert [plain.decode(row) for row in rows.tokens] == ["ACGTN", "ACGGT"]
    # the first model's windows have none
    shared = read(aligned, plain, data=str(path), length=5, sequences=0, rows="documents")
    assert [aligned.decode(row) for row in shared.tokens] == ["ACGTN", "ACGGT"]
    with pytest.raises(ValueError, match=r"model cannot read .*'-'.*use an alphabet with gaps"):
        read(plain, aligned, data=str(path), length=7, sequences=0, rows="documents")


def test_an_end_of_text_is_given_unless_counted(data: str) -> None:
    found = read(byte_tokenizer(), data=data, length=32, sequences=0)
    ends = found.tokens == 256
    assert ends.sum() == 1  # the last one is after the last whole window
    assert found.contexts(Prefix(0.0), 0)[ends].all()
    assert not found.contexts(Prefix(0.0), 0, count_eos=True).any()
