"""Input files: packed, remote and Parquet files are prepared like plain local ones; broken records."""

import bz2
import functools
import gzip
import http.server
import importlib
import json
import lzma
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from tracformer.data import input_files
from tracformer.data.documents import ReadOptions, read_file
from tracformer.data.input_files import (
    ReadMonitor,
    RemoteFile,
    find_files,
    open_input,
    plain_name,
    read_text,
)
from tracformer.data.prepare import is_made_from, prepare
from tracformer.data.shards import PreparedData
from tracformer.data.sources import open_source, open_sources

prepare_module = importlib.import_module("tracformer.data.prepare")

TEXTS = [f"Text {i} — é, with some words." for i in range(300)]
JSONL = "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in TEXTS)


def zstandard(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(data)
    return bytes(sink.getvalue())


PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard,
}


def write_parquet(path: Path, texts: list[str | None]) -> Path:
    table = pyarrow.table({"n": range(len(texts)), "text": pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=70)
    return path


def tokens_of(folder: Path, where: Any, **options: Any) -> bytes:
    data = prepare(folder, open_sources(where), "byte", quiet=True, **options)
    assert is_made_from(data, open_sources(where))
    splits = [data.split(name).tokens for name in data.splits]
    return b"|".join(tokens.read(0, len(tokens)).tobytes() for tokens in splits)


@pytest.fixture
def expected(tmp_path: Path) -> bytes:
    (tmp_path / "plain.jsonl").write_text(JSONL, encoding="utf-8")
    return tokens_of(tmp_path / "expected", tmp_path / "plain.jsonl")


@pytest.mark.parametrize("ending", PACK)
def test_packed_files(tmp_path: Path, expected: bytes, ending: str) -> None:
    path = tmp_path / f"Rows.JSONL{ending}"
    path.write_bytes(PACK[ending](JSONL.encode()))
    assert plain_name(path.name) == "rows.jsonl"
    assert tokens_of(tmp_path / "out", path) == expected
    monitor = ReadMonitor()
    assert "".join(read_text(path, monitor)) == JSONL
    assert monitor.bytes == path.stat().st_size  # so that the progress bar ends at its end


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_several_streams_in_one_file(tmp_path: Path, ending: str) -> None:
    """As parallel compressors write them."""
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(PACK[ending](b"one ") + PACK[ending](b"two"))
    with open_input(path) as file:
        assert file.read() == b"one two"


@pytest.mark.parametrize(
    ("ending", "name"), [(".gz", "gzip"), (".bz2", "bzip2"), (".xz", "xz"), (".zst", "Zstandard")]
)
def test_damaged_archives(tmp_path: Path, ending: str, name: str) -> None:
    whole = PACK[ending](JSONL.encode())
    path = tmp_path / f"a.txt{ending}"
    for content in (whole[:-30], b"plain text, not packed"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"a\.txt{ending} is not a whole {name} file"):
            list(read_text(path))


def test_parquet(tmp_path: Path, expected: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracformer.data.documents.PARQUET_ROWS", 32)
    path = write_parquet(tmp_path / "rows.parquet", [*TEXTS])
    assert tokens_of(tmp_path / "out", path) == expected
    monitor = ReadMonitor()
    list(read_file(path, "parquet", ReadOptions(), monitor))
    assert monitor.bytes == path.stat().st_size
    with pytest.raises(ValueError, match=r"has no column 'body'; it has n, text"):
        list(open_source(path, field="body").pieces())
    with pytest.raises(ValueError, match=r"row 1 has no text under 'n': it holds a int"):
        list(open_source(path, field="n").pieces())
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(ValueError, match=r"bad\.parquet cannot be read as Parquet"):
        list(open_source(tmp_path / "bad.parquet").pieces())


@pytest.fixture
def memory() -> Iterator[Callable[[str, bytes], None]]:
    """Write files of fsspec's protocol `memory`."""
    system = fsspec.filesystem("memory")
    yield lambda path, content: system.pipe_file(path, content)
    system.rm("/corpus", recursive=True)


def test_addresses(tmp_path: Path, expected: bytes, memory: Callable[[str, bytes], None]) -> None:
    lines = JSONL.encode().splitlines(keepends=True)
    memory("/corpus/a/1.jsonl.gz", gzip.compress(b"".join(lines[:100])))
    memory("/corpus/a/2.jsonl.zst", zstandard(b"".join(lines[100:])))
    memory("/corpus/b.parquet", write_parquet(tmp_path / "b.parquet", [*TEXTS]).read_bytes())
    assert tokens_of(tmp_path / "glob", "memory://corpus/a/*") == expected
    assert tokens_of(tmp_path / "parquet", "memory://corpus/b.parquet") == expected
    assert tokens_of(tmp_path / "two", ["memory://corpus/a/1.jsonl.gz", "memory://corpus/a/2.*"])
    file_address = f"file://{tmp_path}/plain.jsonl"
    assert tokens_of(tmp_path / "local", file_address) == expected
    both = prepare(
        tmp_path / "held",
        open_sources("memory://corpus/a/1.jsonl.gz", validation="memory://corpus/a/2.jsonl.zst"),
        "byte",
        quiet=True,
    )
    assert both.manifest.splits["validation"].documents == 200
    with pytest.raises(ValueError, match="given both for training and for validation"):
        open_sources("memory://corpus/b.parquet", validation="memory://corpus/*.parquet")


def test_a_changed_remote_file_is_noticed(
    tmp_path: Path, memory: Callable[[str, bytes], None]
) -> None:
    address = "memory://corpus/a.txt"
    memory("/corpus/a.txt", b"one text")
    data = prepare(tmp_path / "out", open_sources(address), "byte", validation=0.0, quiet=True)
    memory("/corpus/a.txt", b"new text")
    assert not is_made_from(data, open_sources(address))


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder; those called `cut` end before their announced length."""

    def log_message(self, *args: Any) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        content = source.read()
        outputfile.write(content[: len(content) // 2] if "cut" in self.path else content)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path / "site"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def test_a_web_server(tmp_path: Path, expected: bytes, site: tuple[str, Path]) -> None:
    address, folder = site
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(JSONL.encode()))
    (folder / "cut.jsonl").write_text(JSONL, encoding="utf-8")
    assert tokens_of(tmp_path / "out", f"{address}/rows.jsonl.gz?version=1") == expected
    with pytest.raises(FileNotFoundError, match=f"there is no file {address}/none.jsonl"):
        open_source(f"{address}/none.jsonl")
    with pytest.raises(ValueError, match=r"cut\.jsonl cannot be read further"):
        prepare(tmp_path / "cut", open_sources(f"{address}/cut.jsonl"), "byte", quiet=True)
    assert not (tmp_path / "cut").exists()


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("nonsense://a/b.txt", ValueError, "nonsense://a/b.txt: Protocol not known: nonsense"),
        ("memory://corpus/none.txt", FileNotFoundError, "there is no file memory://corpus/none"),
        ("memory://corpus/*.txt", FileNotFoundError, r"no file matches 'memory://corpus/\*.txt'"),
        (
            "http://127.0.0.1:1/a.txt",
            FileNotFoundError,
            r"http://127\.0\.0\.1:1/a\.txt \(Cannot conn",
        ),
        ("memory://", ValueError, "is a folder; give its files"),
    ],
)
def test_bad_addresses(address: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_files(address, [".txt"])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *rest: Any) -> Any:
        raise ImportError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'tracformer\[remote\]'"):
        find_files("s3://bucket/a.txt", [".txt"])


def test_missing_packages_of_a_protocol_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(address: str) -> None:
        raise ImportError("HTTPFileSystem requires aiohttp")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    with pytest.raises(
        ImportError, match=r"requires aiohttp; .*pip install 'tracformer\[remote\]'"
    ):
        find_files("https://example.org/a.txt", [".txt"])


BROKEN = {
    "a.jsonl": (b'{"text": "one"}\n{"text": "t\n\xff\n{"body": 1}\n[1]\n{"text": "two"}\n', 4),
    "a.txt": (b"one\nt\xffwo\ntwo\n", 1),
    "a.txt.gz": (gzip.compress(b"one\nt\xffwo\ntwo\n"), 1),
    "a.fasta": (b"ACGT\n>x\nACGT\n>y\nAC\n", 1),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("chunk", [5, 1000])
def test_broken_records_are_left_out_and_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    chunk: int,
) -> None:
    monkeypatch.setattr(input_files, "CHUNK_BYTES", chunk)
    content, bad = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    source = open_sources(tmp_path / name, **({"documents": "line"} if ".txt" in name else {}))
    arguments: dict[str, Any] = {"sources": source, "tokenizer": "byte", "validation": 0.0}
    with pytest.raises(ValueError, match=r"line \d.*--skip-bad"):
        prepare(tmp_path / "out", quiet=True, **arguments)
    data = prepare(tmp_path / "out", skip_bad=True, **arguments)
    documents = [bytes(data.split("train").document(i)[:-1].tolist()) for i in range(2)]
    assert documents == ([b"ACGT", b"AC"] if name == "a.fasta" else [b"one", b"two"])
    assert data.manifest.left_out == bad
    reports = capsys.readouterr().err.splitlines()
    assert len(reports) == bad
    assert all(line.startswith(f"skipped: {tmp_path / name}") for line in reports)
    assert any("line 2" in line or name == "a.fasta" for line in reports)


def test_rows_without_text_and_foreign_letters_are_left_out(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["ACG", None, "AXG", "TTT"])
    with pytest.raises(ValueError, match="row 2 has no text under 'text': it holds a NoneType"):
        prepare(tmp_path / "out", path, "dna", validation=0.0, quiet=True)
    data = prepare(tmp_path / "out", path, "dna", validation=0.0, quiet=True, skip_bad=True)
    counts = data.manifest.splits["train"]
    assert (counts.documents, counts.tokens, counts.bytes) == (2, 8, 6)
    assert data.manifest.left_out == 2


def test_a_stop_at_a_broken_line_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracformer.data.token_batches.BATCH_CHARACTERS", 500)
    lines = JSONL.splitlines(keepends=True)
    lines[200] = '{"text": "broken\n'
    (tmp_path / "a.jsonl").write_text("".join(lines), encoding="utf-8")
    source = open_sources(tmp_path / "a.jsonl")
    options: dict[str, Any] = {"validation": 0.2, "workers": 1, "quiet": True}
    whole = prepare(tmp_path / "whole", source, "byte", skip_bad=True, **options)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 201 is not JSON"):
        prepare(tmp_path / "out", source, "byte", **options)
    progress = json.loads((tmp_path / ".out.part" / "progress.json").read_text())
    assert progress["pieces"] == 200
    read = []
    encoder = prepare_module.encode

    def count(tokenizer: Any, batches: Any, *rest: Any) -> Any:
        return encoder(tokenizer, (read.append(len(batch)) or batch for batch in batches), *rest)

    monkeypatch.setattr(prepare_module, "encode", count)
    prepare(tmp_path / "out", source, "byte", skip_bad=True, **options)
    assert sum(read) == 99
    for path in whole.folder.iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
    assert PreparedData.open(tmp_path / "out").manifest.left_out == 1


def test_remote_files_have_names(memory: Callable[[str, bytes], None]) -> None:
    file = RemoteFile("https://host/folder/a.jsonl.gz?token=1")
    assert (file.name, str(file)) == ("a.jsonl.gz", file.address)
    memory("/corpus/a.txt", b"text")
    assert RemoteFile("memory://corpus/a.txt").size() == 4
