"""Tokenizers: made, chosen, loaded, and the text of their tokens."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from tracformer.data import tokenizer as module
from tracformer.data.make_tokenizer import (
    ALPHABETS,
    _first,
    build_tokenizer,
    byte_symbols,
    byte_tokenizer,
    char_tokenizer,
    load_tokenizer,
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
def test_any_text_survives_a_round_trip(text: str) -> None:
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


def test_the_error_for_a_gap_outside_the_alphabet_says_what_to_do() -> None:
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
def test_a_saved_tokenizer_loads_unchanged(tokenizer: Tokenizer, tmp_path: Path) -> None:
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


# ---- tokenizers by name, and from folders, files and the hub

transformers = pytest.importorskip("transformers")

TEXTS = ["the cat sat on the mat and the cat sat still "] * 5


def texts() -> Iterable[str]:
    return iter(TEXTS)


@pytest.fixture
def gpt2_layout(tmp_path: Path) -> Path:
    """A folder in GPT-2's layout: vocab.json and merges.txt, with end of text as the last id."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    model = json.loads(train_bpe(TEXTS, 280).document)["model"]
    vocab = {**model["vocab"], EOT: len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"])
    )
    return folder


@pytest.mark.parametrize(
    ("spec", "kind", "size"),
    [
        ("byte", "byte", 257),
        ("dna", "char", 6),
        ("protein-aligned", "char", 27),
        ("char:01", "char", 3),
        ("char", "char", 14),
        ("bpe:270", "bpe", 270),
    ],
)
def test_tokenizers_by_name(spec: str, kind: str, size: int) -> None:
    tokenizer = build_tokenizer(spec, texts)
    assert (tokenizer.kind, tokenizer.vocab_size) == (kind, size)


def test_unknown_names_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bpe:4096"):
        build_tokenizer("bpe", texts)
    with pytest.raises(ValueError, match="learned from text"):
        build_tokenizer("bpe:400")
    with pytest.raises(FileNotFoundError, match=r"no such file or folder.*byte, char"):
        build_tokenizer("./no/where")
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        build_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match="cannot be used as a tokenizer"):
        build_tokenizer(tmp_path)


def test_own_folders_keep_kind_and_fingerprint(tmp_path: Path) -> None:
    for made in (byte_tokenizer(), char_tokenizer("ACGT")):
        made.save(tmp_path)
        loaded = load_tokenizer(tmp_path)
        assert (loaded.kind, loaded.fingerprint) == (made.kind, made.fingerprint)
        assert load_tokenizer(tmp_path / "tokenizer.json").fingerprint == made.fingerprint


def test_the_file_alone_is_enough(tmp_path: Path) -> None:
    made = train_bpe(TEXTS, 280)
    (tmp_path / "tokenizer.json").write_text(made.document)
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.fingerprint == made.fingerprint
    assert loaded.encode(f"the cat{EOT}") == made.encode(f"the cat{EOT}")


def test_gpt2_layout_equals_transformers(gpt2_layout: Path) -> None:
    tokenizer = load_tokenizer(gpt2_layout)
    merges = [
        tuple(line.split()) for line in (gpt2_layout / "merges.txt").read_text().splitlines()[1:]
    ]
    theirs = transformers.GPT2TokenizerFast(
        vocab=json.loads((gpt2_layout / "vocab.json").read_text()), merges=merges
    )
    text = "the cat's  mat — 2 sat\n\n still"
    assert tokenizer.encode(text) == theirs(text)["input_ids"]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.eot_id, tokenizer.mask_id) == (
        len(theirs),
        theirs.eos_token_id,
        len(theirs),
    )
    assert tokenizer.eot_id not in tokenizer.encode(EOT)


def test_a_foreign_tokenizer_keeps_its_end_of_text_and_adds_no_tokens_of_its_own(
    tmp_path: Path,
) -> None:
    backend = Backend(
        models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "cat": 3}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, sep_token="[SEP]", unk_token="[UNK]", cls_token="[CLS]"
    )
    theirs.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eot, tokenizer.eot_id, tokenizer.vocab_size, tokenizer.mask_id) == (
        "[SEP]",
        2,
        4,
        4,
    )
    assert tokenizer.encode("cat dog cat") == [3, 0, 3]
    tokenizer.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    assert (again.eot_id, again.fingerprint) == (2, tokenizer.fingerprint)


def test_a_tokenizer_without_end_of_text_gets_one(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"[UNK]": 0, "cat": 1}, unk_token="[UNK]"))
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.eot, tokenizer.eot_id, tokenizer.mask_id) == (EOT, 2, 3)


@pytest.mark.parametrize("vocab", [{"[UNK]": 0, "cat": 9}, {"[UNK]": 0, "a": 1, "cat": 3}])
def test_ids_with_gaps_are_refused(tmp_path: Path, vocab: dict[str, int]) -> None:
    Backend(models.WordLevel(vocab, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="cannot be used as a tokenizer"):
        load_tokenizer(tmp_path)


def test_an_empty_tokenizer_is_refused(tmp_path: Path) -> None:
    Backend(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="vocabulary is empty"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "made",
    [byte_tokenizer(), char_tokenizer("abcehstu "), train_bpe(TEXTS, 280)],
    ids=lambda made: made.kind,
)
def test_hugging_face_reads_a_saved_folder(made: Tokenizer, tmp_path: Path) -> None:
    made.save(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "tracformer"}')  # as beside a model
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("the cat")["input_ids"] == made.encode("the cat")
    assert theirs.decode(made.encode("the cat")) == "the cat"
    assert (theirs.eos_token_id, theirs.mask_token_id, theirs.mask_token) == (
        made.eot_id,
        made.mask_id,
        MASK,
    )
    assert len(theirs) == made.vocab_size + 1


def test_the_mask_takes_the_space_before_it_if_tokens_contain_spaces(
    tmp_path: Path,
) -> None:
    """Training never has a space token right before a word token without its space."""
    for number, (made, moves) in enumerate(
        [
            (train_bpe(TEXTS, 280), True),
            (byte_tokenizer(), False),
            (char_tokenizer("abcehstu "), False),
        ]
    ):
        made.save(tmp_path / str(number))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / str(number))
        before, after = made.encode("the"), made.encode(" cat")
        assert theirs(f"the {MASK} cat")["input_ids"] == [
            *before,
            *([] if moves else made.encode(" ")),
            made.mask_id,
            *after,
        ]
        assert load_tokenizer(tmp_path / str(number)).fingerprint == made.fingerprint


def test_hub_ids_are_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = train_bpe(TEXTS, 280)
    made.save(tmp_path)
    real = transformers.AutoTokenizer.from_pretrained
    names = []

    def from_pretrained(name: str, **options: object) -> object:
        names.append(name)
        return real(tmp_path)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    assert load_tokenizer("owner/name").encode("the cat") == made.encode("the cat")
    assert names == ["owner/name"]


def test_an_unknown_hub_id_is_one_clear_paragraph(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(name: str, **options: object) -> object:
        raise OSError(f"{name} is not a valid model identifier\nmany more lines")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(
        ValueError, match=r"tokenizer is 'gtp2': not one of .*not a valid model identifier$"
    ):
        load_tokenizer("gtp2")


def test_without_transformers_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"'gpt2'.*pip install 'tracformer\[hub\]'"):
        load_tokenizer("gpt2")


def test_bpe_learns_from_a_bounded_sample() -> None:
    assert list(_first(["aaa", "bbb", "ccc"], 4)) == ["aaa", "bbb"]
