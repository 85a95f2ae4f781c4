"""Tokenizers: text comes back, ids are stable, errors name the character."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from tracformer.data import tokenizer as module
from tracformer.data.make_tokenizer import (
    ALPHABETS,
    byte_symbols,
    byte_tokenizer,
    char_tokenizer,
    name_of,
    read_alphabet,
    train_bpe,
)
from tracformer.data.tokenizer import EOT, MASK, AlphabetError, Tokenizer, require_same_tokenizer

CORPUS = [
    "The cat sat on the mat, and the cat slept.\n",
    "A dog, a cat and a bird — naïve ones.\n",
    "1984 was 40 years ago.\n",
] * 3
BYTE, BPE, DNA = byte_tokenizer(), train_bpe(CORPUS, 300), char_tokenizer("ACGTN")
ALL = [BYTE, BPE, DNA]


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    for tokenizer in (BYTE, BPE):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None)
@given(st.text())
def test_fast_encoders_agree_with_the_saved_file(text: str) -> None:
    backend = Backend.from_str(BYTE.document)
    backend.encode_special_tokens = True
    assert BYTE.encode(text) == backend.encode(text, add_special_tokens=False).ids
    letters = char_tokenizer(read_alphabet([text, "a"]))
    backend = Backend.from_str(letters.document)
    backend.encode_special_tokens = True
    assert letters.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert letters.decode(letters.encode(text)) == text


@pytest.mark.parametrize("tokenizer", ALL, ids=lambda tokenizer: tokenizer.kind)
def test_ids_are_contiguous_and_the_mask_comes_last(tokenizer: Tokenizer) -> None:
    ids = sorted(Backend.from_str(tokenizer.document).get_vocab().values())
    assert ids == list(range(tokenizer.vocab_size + 1))
    assert tokenizer.mask_id == tokenizer.vocab_size
    assert tokenizer.eot_id == tokenizer.vocab_size - 1
    assert tokenizer.decode([tokenizer.eot_id, tokenizer.mask_id]) == EOT + MASK
    assert tokenizer.decode(
        [0, tokenizer.eot_id, tokenizer.mask_id], skip_special=True
    ) == tokenizer.decode([0])


@pytest.mark.parametrize("text", [EOT, MASK, f"a {MASK} b{EOT}", f"{EOT}{EOT}\n"])
def test_text_that_spells_a_special_token_is_text(text: str) -> None:
    for tokenizer in (BYTE, BPE, char_tokenizer(read_alphabet([text]))):
        ids = tokenizer.encode(text)
        assert not {tokenizer.eot_id, tokenizer.mask_id} & set(ids)
        assert tokenizer.decode(ids) == text


def test_bpe_never_makes_one_token_of_a_special_string() -> None:
    tokenizer = train_bpe([f"{EOT} {MASK} " * 200], 1000)
    assert tokenizer.eot_id == tokenizer.vocab_size - 1
    assert len(tokenizer.encode(EOT)) > 1


def test_byte_ids_are_bytes() -> None:
    assert BYTE.encode("aé") == [0x61, 0xC3, 0xA9]
    assert BYTE.vocab_size == 257
    assert len(set(byte_symbols())) == 256
    assert BYTE.decode([0xC3]) == "\ufffd"


def test_alphabets() -> None:
    assert DNA.encode("GATTACA") == [2, 0, 3, 3, 0, 1, 0]
    assert len(ALPHABETS["protein"]) == 25
    assert ALPHABETS["protein-aligned"] == ALPHABETS["protein"] + "-"
    for name, letters in ALPHABETS.items():
        tokenizer = char_tokenizer(letters)
        assert name_of(tokenizer) == name
        assert tokenizer.has_gaps == name.endswith("-aligned")
    assert [name_of(each) for each in (char_tokenizer("abc"), byte_tokenizer())] == ["char", "byte"]
    assert read_alphabet(["ba", "", "ab\n", "é\U0001d538"]) == "\nabé\U0001d538"


@pytest.mark.parametrize(
    ("text", "character", "offset"),
    [("ACGU", "U", 3), ("acgt", "a", 0), ("AC\U0001d538", "\U0001d538", 2), ("AC-", "-", 2)],
)
def test_a_character_outside_the_alphabet_is_named(text: str, character: str, offset: int) -> None:
    with pytest.raises(
        AlphabetError,
        match=(
            f"character '{character}' at offset {offset} is outside the tokenizer's alphabet "
            "'ACGTN'"
        ),
    ):
        DNA.encode(text)


def test_a_gap_outside_the_alphabet_comes_with_advice() -> None:
    with pytest.raises(ValueError, match="'dna-aligned'"):
        DNA.encode("AC-")


def test_bpe_is_deterministic_and_shortens_text() -> None:
    assert train_bpe(iter(CORPUS), 300).document == BPE.document
    assert BPE.vocab_size == 300
    assert len(BPE.encode(CORPUS[0])) < len(CORPUS[0]) / 2


def test_little_text_may_give_fewer_tokens() -> None:
    tokenizer = train_bpe(["ab"], 5000)
    assert tokenizer.vocab_size == 258
    assert tokenizer.mask_id == 258


@pytest.mark.parametrize("tokenizer", ALL, ids=lambda tokenizer: tokenizer.kind)
def test_a_saved_tokenizer_comes_back_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "model")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    loaded = Tokenizer.load(tmp_path / "model")
    assert (loaded.kind, loaded.fingerprint, loaded.vocab_size, loaded.eot_id) == (
        tokenizer.kind,
        tokenizer.fingerprint,
        tokenizer.vocab_size,
        tokenizer.eot_id,
    )
    assert loaded.encode("ACGT") == tokenizer.encode("ACGT")


def test_fingerprint_ignores_layout_and_nothing_else() -> None:
    document = json.loads(DNA.document)
    assert Tokenizer(json.dumps(document, indent=4), "char").fingerprint == DNA.fingerprint
    assert char_tokenizer("ACGNT").fingerprint != DNA.fingerprint
    assert len({tokenizer.fingerprint for tokenizer in ALL}) == 3


def test_another_tokenizer_than_the_models_is_an_error() -> None:
    require_same_tokenizer(DNA, char_tokenizer("ACGTN"))
    with pytest.raises(
        ValueError,
        match=r"data's tokenizer \(byte, 257 tokens.*is not the model's \(char, 6 tokens",
    ):
        require_same_tokenizer(BYTE, DNA)


def test_a_failed_save_leaves_the_old_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DNA.save(tmp_path)

    def full_disk(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tracformer.files.os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        BYTE.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == DNA.fingerprint
    assert len(list(tmp_path.iterdir())) == 2


def test_a_batch_is_one_array_per_text() -> None:
    batch = BPE.encode_batch(["The cat", "", "sat"])
    assert [ids.dtype for ids in batch] == [np.uint32] * 3
    assert [ids.tolist() for ids in batch] == [BPE.encode("The cat"), [], BPE.encode("sat")]


def test_wrong_arguments_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="token id 7 is out of range"):
        DNA.decode([0, 7])
    with pytest.raises(ValueError, match="256 bytes and end of text"):
        train_bpe(["a"], 256)
    with pytest.raises(ValueError, match="alphabet is empty"):
        char_tokenizer("")
    with pytest.raises(ValueError, match="'AB', which is not one character"):
        char_tokenizer(["AB"])
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        BYTE.encode("\ud800")
    with pytest.raises(ValueError, match="not a tokenizer"):
        Tokenizer("{}", "byte")
    (tmp_path / module.TOKENIZER_FILE).write_text(DNA.document)
    (tmp_path / module.CONFIG_FILE).write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        Tokenizer.load(tmp_path)
