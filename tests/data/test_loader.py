import json
from pathlib import Path

import pytest

from tracformer.data.make_tokenizer import char_tokenizer
from tracformer.data.preparation import prepare
from tracformer.data.shards import PreparedData
from tracformer.data.sources import TextSource


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
    with pytest.raises(ValueError, match=r"tokens 3\.\.13 were asked for; the split has 12"):
        tokens.read(3, 13)


def test_a_split_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ValueError, match="no split 'test'; it has: train"):
        PreparedData.open(folder).split("test")


def test_a_folder_without_data(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no manifest\.json"):
        PreparedData.open(tmp_path)


def test_damage_is_found_and_named(folder: Path) -> None:
    shard = folder / "train-00001.bin"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"train-00001\.bin has 9 bytes where 10 were written"):
        PreparedData.open(folder)
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    PreparedData.open(folder)  # the cheap checks cannot see it
    with pytest.raises(ValueError, match=r"train-00001\.bin does not match its SHA-256"):
        PreparedData.open(folder, verify=True)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.bin is missing"):
        PreparedData.open(folder)


def test_another_tokeniser_in_the_folder_is_found(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    char_tokenizer("helowrd").save(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        manifest["files"][name]["bytes"] = (folder / name).stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match="its tokeniser is not the one that its tokens were made with"
    ):
        PreparedData.open(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", "other", "its format is 'other'"),
        ("version", 2, "its version is 2, and this program reads version 1"),
        ("dtype", "float32", "its dtype is 'float32'"),
        ("splits", None, "manifest that can be used"),
        ("files", {}, "not of the length that the counts call for"),
        ("shard_tokens", 6, "not of the length that the counts call for"),
    ],
)
def test_bad_manifests(folder: Path, key: str, value: object, message: str) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ValueError, match=message):
        PreparedData.open(folder)


def test_half_a_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    del document["tokenizer"]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="'tokenizer' is missing"):
        PreparedData.open(folder)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a manifest that can be used"):
        PreparedData.open(folder)


def test_an_index_that_does_not_fit(folder: Path) -> None:
    path = folder / "train.index.bin"
    path.write_bytes(path.read_bytes()[:-8] + (11).to_bytes(8, "little"))
    with pytest.raises(ValueError, match="does not end where its tokens end"):
        PreparedData.open(folder).split("train")
