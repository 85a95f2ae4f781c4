"""Data sets of the Hugging Face hub, and the paper's data sets by name."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tracformer.data.hub_sources import NAMED, PARQUET_BRANCH, HubSource, named_source
from tracformer.data.sources import open_sources, whole_documents

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows" / "train.jsonl"
    path.parent.mkdir()
    path.write_text(
        "".join(json.dumps({"text": f"row {i} , yes .", "n": i}) + "\n" for i in range(2500))
    )
    return path


@pytest.mark.parametrize("streaming", [False, True])
def test_json_files_through_the_library(jsonl: Path, tmp_path: Path, streaming: bool) -> None:
    source = HubSource(
        "json",
        data_files=str(jsonl),
        cache_dir=str(tmp_path / "cache"),
        streaming=streaming,
        detokenize="1bw",
    )
    assert list(whole_documents(source)) == [f"row {i}, yes." for i in range(2500)]
    assert list(whole_documents(source)) == [f"row {i}, yes." for i in range(2500)]  # and again
    assert next(source.pieces()).origin == "data set 'json' split 'train', row 1"


def test_a_local_folder_and_split_slices(jsonl: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    assert list(
        whole_documents(HubSource(str(jsonl.parent), split="train[-2:]", cache_dir=cache))
    ) == [
        "row 2498 , yes .",
        "row 2499 , yes .",
    ]
    assert (
        len(list(whole_documents(HubSource("json", data_dir=str(jsonl.parent), cache_dir=cache))))
        == 2500
    )
    (source,) = open_sources(f"hf:{jsonl.parent}", cache_dir=cache, split="train[:3]").values()
    assert len(list(whole_documents(source))) == 3


def test_rows_may_be_lines_of_articles(tmp_path: Path) -> None:
    path = tmp_path / "wiki.txt"
    path.write_text("\n = One = \n\n a @-@ b \n\n = Two = \n\n c \n")
    source = HubSource(
        "text",
        data_files=str(path),
        cache_dir=str(tmp_path / "cache"),
        documents="article",
        detokenize="wikitext",
    )
    assert list(whole_documents(source)) == ["= One =\n\na-b\n\n", "= Two =\n\nc\n"]


def test_errors_name_the_data_set(jsonl: Path, tmp_path: Path) -> None:
    def read(**changes: Any) -> list[str]:
        options: dict[str, Any] = {
            "path": "json",
            "data_files": str(jsonl),
            "cache_dir": str(tmp_path / "cache"),
            **changes,
        }
        return list(whole_documents(HubSource(**options)))

    with pytest.raises(
        ValueError, match="data set 'json' split 'train' has no column 'body'; it has text, n"
    ):
        read(field="body")
    with pytest.raises(ValueError, match="column 'n' holds a int, not text"):
        read(field="n")
    with pytest.raises(ValueError, match=r"split 'nope' could not be loaded: .*nope"):
        read(split="nope")
    with pytest.raises(
        ValueError, match="has 2,500 rows instead of 3,000: the copy on the hub is partial"
    ):
        read(rows=3000)
    with pytest.raises(ValueError, match="documents is 'page'; allowed: row, separator"):
        read(documents="page")
    with pytest.raises(ValueError, match="'/no/such/folder' split 'train' could not be loaded"):
        read(path="/no/such/folder", data_files=None)


class FakeHub:
    """Stand in for the library: record the calls, and refuse scripts as it does."""

    def __init__(self, script: bool) -> None:
        self.script, self.calls = script, list[tuple[Any, ...]]()

    def load_dataset(self, path: str, config: str | None = None, **options: Any) -> Any:
        self.calls.append(
            (path, config, options["split"], options["revision"], options["data_dir"])
        )
        if self.script and options["revision"] is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found x.py")
        rows = {"text": ["a , b"], "sentence": ["a 's b"]}
        chosen = SimpleNamespace(iter=lambda batch_size: iter([rows]))
        return SimpleNamespace(
            column_names=list(rows), select_columns=lambda names: chosen, __len__=lambda: 1
        )


@pytest.mark.parametrize("name", sorted(set(NAMED) - {"openwebtext"}))
def test_data_sets_of_the_paper_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(script=False)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    sources = open_sources(name)
    assert {"train", "validation"} <= set(sources)
    for source in sources.values():
        assert list(whole_documents(source)) in (["a, b"], ["a's b"], ["a, b\n"])
    assert [row[2] for row in hub.calls] == list(NAMED[name][1].values())


def test_openwebtext_is_divided_as_in_the_papers_compared_with() -> None:
    sources = named_source("openwebtext", streaming=False)
    assert (sources["train"].split, sources["train"].rows) == (
        "train[:-100000]",
        8_013_769 - 100_000,
    )
    assert (sources["validation"].split, sources["validation"].rows) == ("train[-100000:]", 100_000)


def test_a_data_set_that_is_still_a_script_is_read_from_its_parquet_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = FakeHub(script=True)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert list(whole_documents(named_source("ptb")["test"])) == ["a's b"]
    assert hub.calls == [
        ("ptb-text-only/ptb_text_only", "penn_treebank", "test", None, None),
        ("ptb-text-only/ptb_text_only", None, "test", PARQUET_BRANCH, "penn_treebank"),
    ]


def test_unknown_names_and_options_are_errors() -> None:
    with pytest.raises(ValueError, match="data set is 'wiki'; allowed: wikitext2"):
        named_source("wiki")
    with pytest.raises(ValueError, match=r"data set 'ptb': .*'colour'"):
        named_source("ptb", colour="red")


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"'cimec/lambada'.*pip install 'tracformer\[hub\]'"):
        list(whole_documents(named_source("lambada")["test"]))
