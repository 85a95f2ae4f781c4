"""Tokenizers by name, and tokenizers read from folders, files and the hub."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from tracformer.data.make_tokenizer import (
    _first,
    build_tokenizer,
    byte_tokenizer,
    char_tokenizer,
    load_tokenizer,
    train_bpe,
)
from tracformer.data.tokenizer import EOT, MASK, Tokenizer

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
