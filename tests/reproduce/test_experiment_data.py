"""The texts of an experiment: found, read as the data set of that name is, or asked for."""

import dataclasses
from pathlib import Path

import pytest

from tests.reproduce.helpers import work
from tracformer.data import HubSource, whole_documents
from tracformer.reproduce.experiment import DataSet, read_experiment
from tracformer.reproduce.experiment_data import data_folder, prepare_data, split_sources


def test_files_of_all_sets_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    (tmp_path / "wikitext-2" / "train.txt").write_text("\n = A = \n\n the cat , it sat . \n")
    (tmp_path / "wikitext-2" / "valid.txt").write_text("\n = B = \n\n it @-@ sat \n")
    (tmp_path / "wikipedia-2006.txt").write_text("not read before it is needed")
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.valid.txt").write_text(" it 's \n")
    experiment = read_experiment("table4", "mini", {"data": str(tmp_path)})
    assert set(split_sources(experiment.data["wikitext"], trained=True)) == {"train", "validation"}
    held = split_sources(experiment.data["ptb"], trained=False)
    assert list(whole_documents(held["validation"])) == ["it's"]
    with pytest.raises(FileNotFoundError, match="has no data set 1bw"):
        split_sources(experiment.data["1bw"], trained=False)


def test_files_are_read_as_the_named_set_is(tmp_path: Path) -> None:
    (tmp_path / "wiki.train.txt").write_text(
        "\n = A = \n\n the cat , it sat . \n\n = B = \n\n more \n"
    )
    (tmp_path / "wiki.valid.txt").write_text(" = C = \n\n a dog @-@ like cat . \n")
    data = DataSet("wikitext2", str(tmp_path), "byte")
    prepared = prepare_data(data, tmp_path / "out", trained=True)
    assert {name: split.documents for name, split in prepared.manifest.splits.items()} == {
        "train": 2,
        "validation": 1,
    }
    assert "a dog-like cat." in prepared.tokenizer.decode(prepared.split("validation").document(0))
    held = prepare_data(data, tmp_path / "out", trained=False)
    assert set(held.manifest.splits) == {"validation"}
    (tmp_path / "other.txt").write_text("something else")
    with pytest.raises(ValueError, match="was prepared from other data than"):
        prepare_data(
            DataSet("wikitext2", str(tmp_path / "other.txt"), "byte"),
            tmp_path / "out",
            trained=True,
        )


def test_a_single_file_that_nothing_is_trained_on_is_all_validation(text: Path) -> None:
    assert set(split_sources(DataSet("1bw", str(text), "byte"), trained=False)) == {"validation"}
    assert set(split_sources(DataSet("1bw", str(text), "byte"), trained=True)) == {"train"}


def test_a_prepared_folder_goes_under_the_name_of_its_data_set(tmp_path: Path, text: Path) -> None:
    """Results name their data by the folder's last name."""
    prepare_data(DataSet("mine", str(text), "byte"), tmp_path, trained=True)
    place = data_folder(tmp_path, "mine", trained=True)
    prepared = prepare_data(
        DataSet("wikitext103", str(place), "byte"), tmp_path / "out", trained=True
    )
    assert prepared.folder.name == "wikitext103"


def test_a_missing_data_set_says_where_it_was_looked_for_and_how_to_get_it(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"looked for in .*data/wikitext2 and as '/nowhere'.*tracformer prepare wikitext2 --out FOLDER",
    ):
        work(tmp_path, text, wikitext2="/nowhere").run()

    def no_network(self: HubSource) -> None:
        raise ValueError("no network")

    monkeypatch.setattr(HubSource, "_load", no_network)
    with pytest.raises(
        ValueError, match=r"no network\. Data set 'wikitext2' was looked for.*data\.wikitext2=FILE"
    ):
        work(tmp_path, text, wikitext2="wikitext2").run()
    assert not data_folder(tmp_path / "tiny", "wikitext2", trained=True).exists()


def test_another_tokeniser_than_the_folder_s_is_refused(tmp_path: Path, text: Path) -> None:
    wish = DataSet("my", str(text), tokenizer="bpe:300")
    made = prepare_data(wish, tmp_path, trained=True)
    assert (
        prepare_data(wish, tmp_path, trained=True).tokenizer.fingerprint
        == made.tokenizer.fingerprint
    )
    for other in ("bpe:400", "byte"):
        with pytest.raises(
            ValueError,
            match=f"the tokenizer of my is '{other}', but .* was prepared with another tokenizer .bpe:300",
        ):
            prepare_data(dataclasses.replace(wish, tokenizer=other), tmp_path, trained=True)
