"""Prepared folders: what is written, what is read back, what is refused."""

import contextlib
import gzip
import hashlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracformer.data import documents, input_files, shards, token_batches
from tracformer.data.make_tokenizer import byte_tokenizer, char_tokenizer, train_bpe
from tracformer.data.prepare import is_made_from, prepare
from tracformer.data.shards import PreparedData, dtype_name
from tracformer.data.sources import TextSource, open_source, open_sources
from tracformer.data.tokenizer import EOT, Tokenizer
from tracformer.files import lock_folder

# `tracformer.data.prepare` names the function
prepare_module = importlib.import_module("tracformer.data.prepare")

BYTE = byte_tokenizer()
BPE = train_bpe(["some words to learn from, and some more words\n"] * 4, 300)
STORIES = [f"Story {i}: some words, and é — more." for i in range(600)]


def expected(tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    return [i for text in texts for i in [*tokenizer.encode(text), tokenizer.eot_id]]


def stored(data: PreparedData, split: str) -> list[int]:
    tokens = data.split(split).tokens
    return tokens.read(0, len(tokens)).tolist()


texts_strategy = st.lists(
    st.text(min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=8
)


@settings(max_examples=30, deadline=None)
@given(texts_strategy, st.sampled_from([5, 16, 1000]), st.sampled_from([BYTE, BPE]))
def test_shards_are_the_encoded_documents_one_after_another(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    shard_tokens: int,
    tokenizer: Tokenizer,
) -> None:
    folder = tmp_path_factory.mktemp("data") / "out"
    data = prepare(
        folder, TextSource(texts), tokenizer, validation=0.0, shard_tokens=shard_tokens, quiet=True
    )
    assert stored(data, "train") == expected(tokenizer, texts)
    split = data.split("train")
    assert [split.document(i).tolist() for i in range(len(texts))] == [
        expected(tokenizer, [text]) for text in texts
    ]
    counts = data.manifest.splits["train"]
    assert (counts.documents, counts.tokens, counts.bytes) == (
        len(texts),
        len(expected(tokenizer, texts)),
        sum(len(text.encode()) for text in texts),
    )


def test_files_of_a_prepared_folder(tmp_path: Path) -> None:
    data = prepare(
        tmp_path / "out", TextSource(STORIES), BPE, validation=0.1, shard_tokens=5000, quiet=True
    )
    names = sorted(path.name for path in data.folder.iterdir())
    assert names == sorted([*data.manifest.files, "manifest.json"])
    assert {
        "train-00000.bin",
        "train-00001.bin",
        "train.index.bin",
        "validation.index.bin",
        "tokenizer.json",
    } <= set(names)
    for name, facts in data.manifest.files.items():
        content = (data.folder / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    first = np.frombuffer((data.folder / "train-00000.bin").read_bytes(), "<u2")
    assert len(first) == 5000
    assert stored(data, "train")[:5000] == first.tolist()
    manifest = json.loads((data.folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["dtype"]) == (
        "tracformer-data",
        1,
        "uint16",
    )
    size = BPE.vocab_size
    assert manifest["tokenizer"] == {
        "kind": "bpe",
        "fingerprint": BPE.fingerprint,
        "vocab_size": size,
        "eot_id": size - 1,
        "mask_id": size,
    }
    assert manifest["carving"]["train"]["rule"] == "hash of the document"
    assert (
        manifest["splits"]["train"]["documents"] + manifest["splits"]["validation"]["documents"]
        == 600
    )


def test_the_same_input_gives_the_same_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare(tmp_path / name, TextSource(STORIES), "bpe:300", quiet=True)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_large_vocabularies_use_wide_integers(tmp_path: Path) -> None:
    assert [dtype_name(size) for size in (257, 65536, 65537)] == ["uint16", "uint16", "uint32"]
    wide = char_tokenizer(chr(0x10000 + i) for i in range(70_000))
    data = prepare(
        tmp_path / "out",
        TextSource([chr(0x10000), chr(0x10000 + 69_999)]),
        wide,
        validation=0.0,
        quiet=True,
    )
    assert data.manifest.dtype == "uint32"
    assert stored(data, "train") == [0, 70_000, 69_999, 70_000]


def test_given_splits_stay_as_they_are(tmp_path: Path) -> None:
    sources = {
        "train": TextSource(["a b", "c"]),
        "validation": TextSource(["d"]),
        "test": TextSource(["é"]),
    }
    data = prepare(tmp_path / "out", sources, "char", quiet=True)
    assert data.splits == ("train", "validation", "test")
    assert data.tokenizer.vocab_size == 7  # the alphabet covers every split
    assert stored(data, "test") == expected(data.tokenizer, ["é"])
    only = prepare(tmp_path / "test", {"test": TextSource(["x"])}, "byte", quiet=True)
    assert only.splits == ("test",)


def test_a_giant_document_gives_the_same_tokens_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = "\n".join(STORIES[:50])
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 64)
    monkeypatch.setattr(input_files, "CHUNK_BYTES", 100)
    monkeypatch.setattr(token_batches, "BATCH_CHARACTERS", 200)
    (tmp_path / "book.txt").write_text(book, encoding="utf-8")
    data = prepare(tmp_path / "out", tmp_path / "book.txt", BPE, validation=0.0, quiet=True)
    assert stored(data, "train") == expected(BPE, [book])
    carved = prepare(tmp_path / "carved", tmp_path / "book.txt", BPE, validation=0.2, quiet=True)
    assert carved.manifest.carving["train"]["rule"] == "tail"
    both = carved.tokenizer.decode(stored(carved, "train")[:-1]) + carved.tokenizer.decode(
        stored(carved, "validation")[:-1]
    )
    assert both == book


def test_text_that_spells_end_of_text_stays_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"a {EOT} b")
    source = open_source(tmp_path / "a.txt", documents="file")
    data = prepare(tmp_path / "out", source, BPE, validation=0.0, quiet=True)
    assert stored(data, "train").count(BPE.eot_id) == 1


def test_a_foreign_character_is_named_with_its_record(tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">good\nACGT\n>bad one\nACG\nTUA\n")
    with pytest.raises(
        ValueError,
        match=r"a\.fasta, record bad: character 'U' at offset 4 \('ACGTUA'\) is outside .*'ACGTN'",
    ):
        prepare(tmp_path / "out", tmp_path / "a.fasta", "dna", validation=0.0, quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_offsets_count_from_the_documents_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validation: float
) -> None:
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 10)
    with pytest.raises(ValueError, match=r"document 1: character 'U' at offset 90 "):
        prepare(
            tmp_path / "out",
            TextSource(["ACGTA" * 18 + "UACGT"]),
            "dna",
            validation=validation,
            quiet=True,
        )


@pytest.mark.parametrize("gaps", ["", "remove"])
def test_an_aligned_alphabet_keeps_gaps_unless_they_are_removed(tmp_path: Path, gaps: str) -> None:
    (tmp_path / "a.fasta").write_text(">x\nMK-V\n>y\nM.KV\n")
    sources = open_sources(tmp_path / "a.fasta", gaps=gaps)
    data = prepare(tmp_path / "out", sources, "protein-aligned", validation=0.0, quiet=True)
    assert stored(data, "train") == expected(
        data.tokenizer, ["MKV", "MKV"] if gaps else ["MK-V", "M-KV"]
    )
    assert data.manifest.sources["train"]["gaps"] == (gaps or "keep")
    assert is_made_from(data, sources)


def test_changed_sources_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("first")
    data = prepare(tmp_path / "out", path, BYTE, validation=0.0, quiet=True)
    assert is_made_from(data, open_sources(path))
    assert not is_made_from(data, open_sources(path, documents="line"))
    path.write_text("other")
    assert not is_made_from(data, open_sources(path))
    assert is_made_from(data, open_sources(path), hashes=False)


def test_a_file_name_may_not_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text("text")
    data = prepare(tmp_path / "out", path, BYTE, validation=0.0, quiet=True)
    assert data.manifest.sources["train"]["files"][0]["name"] == path.name
    assert is_made_from(data, open_sources(path))


LINES = "".join(f"{story}\n" for story in STORIES)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments for a file of many small batches, shards and records."""
    monkeypatch.setattr(token_batches, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(prepare_module, "RECORD_EVERY", 2)
    (tmp_path / "lines.txt").write_text(LINES, encoding="utf-8")
    source = open_source(tmp_path / "lines.txt", documents="line")
    return {
        "sources": {"train": source},
        "tokenizer": "bpe:300",
        "validation": 0.1,
        "shard_tokens": 1500,
        "quiet": True,
    }


def test_any_number_of_workers_gives_the_same_files(tmp_path: Path, lines: dict[str, Any]) -> None:
    prepare(tmp_path / "plain", **lines)
    for workers in (1, 2):
        prepare(tmp_path / f"w{workers}", workers=workers, **lines)
        assert contents(tmp_path / f"w{workers}") == contents(tmp_path / "plain")
    assert len(list((tmp_path / "plain").glob("train-*.bin"))) > 3
    with pytest.raises(ValueError, match="workers is 0; it is the number of processes"):
        prepare(tmp_path / "none", workers=0, **lines)


class Killed(BaseException):
    """Stands for the end of the process: no code of ours catches it."""


def stop_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> list[int]:
    """Let the encoder stop after some batches; return the list that counts them."""
    seen: list[int] = []
    encode = token_batches.BatchEncoder.__call__

    def count(self: Any, batch: Any) -> Any:
        if len(seen) == batches:
            raise Killed
        seen.append(len(batch))
        return encode(self, batch)

    monkeypatch.setattr(token_batches.BatchEncoder, "__call__", count)
    return seen


@pytest.mark.parametrize("batches", [1, 2, 5, 8])
def test_a_stopped_run_continues_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: dict[str, Any], batches: int
) -> None:
    prepare(tmp_path / "whole", **lines)
    with monkeypatch.context() as patch:
        stop_after(patch, batches)
        with pytest.raises(Killed):
            prepare(tmp_path / "out", **lines)
    assert not (tmp_path / "out").exists()
    # bytes that were written after the last record, as a kill leaves them
    for pattern in (".out.part/*.index.bin", ".out.part/train-*.bin"):
        for file in sorted(tmp_path.glob(pattern))[-1:]:
            end = file.open("ab")
            end.write(b"more")
            end.close()
    repeated = stop_after(monkeypatch, 1000)
    prepare(tmp_path / "out", **lines)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    if batches >= 2:  # there was a record
        assert sum(repeated) < len(STORIES)
    assert not (tmp_path / ".out.part").exists()


def test_an_unfinished_run_is_not_mixed_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(Killed):
            prepare(tmp_path / "out", **lines)
    with pytest.raises(ValueError, match="with other tokenizer and validation; repeat that run"):
        prepare(tmp_path / "out", **{**lines, "tokenizer": "byte", "validation": 0.2})
    (tmp_path / "lines.txt").write_text(LINES.replace("Story", "Tales"), encoding="utf-8")
    with pytest.raises(ValueError, match="with other changed files"):
        prepare(tmp_path / "out", **lines)
    data = prepare(tmp_path / "out", overwrite=True, **lines)
    assert data.manifest.splits["train"].documents > 0


def test_two_processes_do_not_prepare_the_same_folder(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path / ".out.part"),
        pytest.raises(BlockingIOError, match="another process is preparing"),
    ):
        prepare(tmp_path / "out", TextSource(["text"]), BYTE, validation=0.0, quiet=True)


def test_memory_does_not_grow_with_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_batches, "BATCH_CHARACTERS", 1 << 18)
    peaks = []
    for buffers in (2, 20):

        class Stream(TextSource):
            def pieces(self, buffers: int = buffers) -> Any:
                for number in range(buffers * 64):
                    yield from documents.as_pieces(f"{number:04d}" * 1024, f"document {number}")

        tracemalloc.start()
        data = prepare(
            tmp_path / f"{buffers}", Stream([]), BYTE, validation=0.0, quiet=True, workers=1
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert data.manifest.splits["train"].bytes == buffers << 18
    assert peaks[1] < 1.5 * peaks[0]


PEAK = """
import resource, sys
from tracformer.data import open_sources
from tracformer.data.prepare import prepare
if __name__ == "__main__":
    source = open_sources(sys.argv[1], documents="line")
    prepare(sys.argv[2], source, "byte", validation=0.0, quiet=True, workers=2)
    assert "torch" not in sys.modules  # which would take 300 MB in every worker
    ours, workers = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    print(*(resource.getrusage(each).ru_maxrss for each in (ours, workers)))
"""


@pytest.mark.soak
def test_memory_of_all_processes_is_bounded(tmp_path: Path) -> None:
    """Two workers hold at most 8 MB of text; the larger file is 20 times that."""
    (tmp_path / "run.py").write_text(PEAK)
    line = b"A line of text that is repeated. " * 31
    peaks = []
    for megabytes in (16, 160):
        with open(tmp_path / "a.txt", "wb") as file:
            for _ in range(megabytes):
                file.write((line + b"\n") * 1024)
        words = [sys.executable, "run.py", "a.txt", f"out{megabytes}"]
        peaks.append(subprocess.check_output(words, cwd=tmp_path).split())
    for small, large in zip(*peaks, strict=True):  # kB of this process, of the largest worker
        assert int(large) < int(small) + 20_000


KILLED = """
import importlib, sys
from tracformer.data import open_sources, token_batches
from tracformer.data.prepare import prepare
if __name__ == "__main__":
    token_batches.BATCH_CHARACTERS = 1 << 14
    importlib.import_module("tracformer.data.prepare").RECORD_EVERY = 2
    source = open_sources("lines.jsonl.gz")
    prepare(sys.argv[1], source, "byte", shard_tokens=1 << 16, quiet=True, workers=2)
"""


def descendants(process: int) -> set[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return set(map(int, found))


@pytest.mark.soak
def test_ten_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    """All of the killed run's processes end, and the repeated run gives the same files."""
    (tmp_path / "run.py").write_text(KILLED)
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt", encoding="utf-8") as file:
        for number in range(120):
            for story in STORIES:
                file.write(json.dumps({"text": f"{number} {story}"}) + "\n")
    subprocess.run([sys.executable, "run.py", "whole"], cwd=tmp_path, check=True)
    out, progress = tmp_path / "out", tmp_path / ".out.part" / "progress.json"
    words, moments, children = [sys.executable, "run.py", "out"], random.Random(0), set[int]()
    kills = resumed = pieces = 0
    while kills < 10:
        process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL)
        records, wanted = set[int](), moments.randrange(12)
        while process.poll() is None and len(records) < wanted:
            with contextlib.suppress(FileNotFoundError):
                records.add(progress.stat().st_mtime_ns)
            time.sleep(0.005)
        time.sleep(moments.uniform(0.0, 0.1))
        if process.poll() is None:
            children |= descendants(process.pid)
            process.kill()
            kills += 1
        process.wait()
        if out.exists():  # before ten kills: begin again
            assert contents(out) == contents(tmp_path / "whole")
            shutil.rmtree(out)
            pieces = 0
        elif progress.exists():
            resumed += 1
            now = json.loads(progress.read_text())["pieces"]
            assert now >= pieces  # what was written is not written again
            pieces = now
    subprocess.run(words, cwd=tmp_path, check=True)
    assert resumed > 3
    assert contents(out) == contents(tmp_path / "whole")
    for child in children:
        while Path(f"/proc/{child}").exists():
            time.sleep(0.1)


def test_an_existing_folder_is_safe(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    prepare(folder, TextSource(["first"]), BYTE, validation=0.0, quiet=True)
    with pytest.raises(ValueError, match="exists already"):
        prepare(folder, TextSource(["second"]), BYTE, validation=0.0, quiet=True)
    data = prepare(folder, TextSource(["second"]), BYTE, validation=0.0, overwrite=True, quiet=True)
    assert stored(data, "train") == expected(BYTE, ["second"])
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="not a folder of prepared data"):
        prepare(mine, TextSource(["x"]), BYTE, validation=0.0, overwrite=True, quiet=True)
    with pytest.raises(ValueError, match="is a file"):
        prepare(
            mine / "thesis.txt", TextSource(["x"]), BYTE, validation=0.0, overwrite=True, quiet=True
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "out"]


def test_a_failure_leaves_nothing_and_the_old_folder_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    prepare(folder, TextSource(["first"]), BYTE, validation=0.0, quiet=True)

    def full_disk(self: Any, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards._HashedFile, "write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        prepare(folder, TextSource(["second"]), BYTE, validation=0.0, overwrite=True, quiet=True)
    assert stored(PreparedData.open(folder, verify=True), "train") == expected(BYTE, ["first"])
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failed_rename_brings_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    prepare(folder, TextSource(["first"]), BYTE, validation=0.0, quiet=True)
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name.endswith(".part"):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError):
        prepare(folder, TextSource(["second"]), BYTE, validation=0.0, overwrite=True, quiet=True)
    assert stored(PreparedData.open(folder), "train") == expected(BYTE, ["first"])


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (TextSource(["a"]), {"validation": 0.7}, "validation is 0.7; it is the fraction"),
        (TextSource(["a"]), {"shard_tokens": 0}, "shard_tokens is 0"),
        ({}, {}, "there are no sources"),
        ({"../up": TextSource(["a"])}, {}, r"split name '\.\./up' is not allowed"),
        (TextSource([]), {"validation": 0.0}, "split 'train' is empty"),
        (TextSource(["same"] * 900), {}, "is empty: .* all documents are equal"),
    ],
)
def test_bad_arguments(tmp_path: Path, sources: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path / "out", sources, BYTE, **{"quiet": True, **options})
    assert not list(tmp_path.iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(
        tmp_path / "out",
        TextSource(["hello", "world"]),
        "byte",
        validation=0.0,
        shard_tokens=5,
        quiet=True,
    )
    return tmp_path / "out"


def test_reading_across_shards(folder: Path) -> None:
    tokens = PreparedData.open(folder).split("train").tokens
    everything = [*b"hello", 256, *b"world", 256]
    assert len(tokens) == 12
    for start in range(13):
        for stop in range(start, 13):
            assert tokens.read(start, stop).tolist() == everything[start:stop]
    with pytest.raises(ValueError, match=r"cannot read tokens 3\.\.13; the split has 12"):
        tokens.read(3, 13)


def test_an_unknown_split_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match="no split 'test'; it has: train"):
        PreparedData.open(folder).split("test")


def test_a_folder_without_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json"):
        PreparedData.open(tmp_path)


def test_damage_is_found_and_named(folder: Path) -> None:
    shard = folder / "train-00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"train-00001\.bin has 9 bytes where 10 were written"):
        PreparedData.open(folder)
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    PreparedData.open(folder)  # sizes and names are right
    with pytest.raises(ValueError, match=r"train-00001\.bin does not match its SHA-256"):
        PreparedData.open(folder, verify=True)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.bin is missing"):
        PreparedData.open(folder)


def test_another_tokenizer_in_the_folder_is_found(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    char_tokenizer("helowrd").save(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        manifest["files"][name]["bytes"] = (folder / name).stat().st_size
    del manifest["sha256"]  # as in older folders
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="its tokens were made with another tokenizer"):
        PreparedData.open(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "other", "its format is 'other'"),
        ("version", 2, "its version is 2, but this program reads version 1"),
        ("dtype", "float32", "its dtype is 'float32'"),
        ("splits", None, "cannot be used as a manifest"),
        ("files", {}, "does not have the length that the counts require"),
        ("shard_tokens", 6, "does not have the length that the counts require"),
    ],
)
def test_wrong_manifests_are_refused(folder: Path, key: str, value: object, message: str) -> None:
    path = folder / "manifest.json"
    document = {**json.loads(path.read_text()), key: value}
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=f"{message}|does not match its SHA-256"):
        PreparedData.open(folder)
    del document["sha256"]  # as in older folders
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        PreparedData.open(folder)


def test_incomplete_manifests_are_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    del document["tokenizer"]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="'tokenizer' is missing"):
        PreparedData.open(folder)
    path.write_text("{")
    with pytest.raises(ValueError, match="cannot be used as a manifest"):
        PreparedData.open(folder)


def test_a_damaged_index_is_found(folder: Path) -> None:
    path = folder / "train.index.bin"
    path.write_bytes(path.read_bytes()[:-8] + (11).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="does not end where its tokens end"):
        PreparedData.open(folder).split("train")
