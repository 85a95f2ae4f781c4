"""The data sets of an experiment, prepared once under its folder.

They come from the hub by name, or from the user's files. A set that models are trained on is
prepared completely. A set that models are only evaluated on is read as validation text; its
tokenizer does not matter then, because every model reads the text in its own tokens.
"""

from functools import cache
from pathlib import Path

import torch

from tracformer import loading
from tracformer.data import (
    DataSource,
    PreparedData,
    Tokenizer,
    is_made_from,
    load_tokenizer,
    named_sets,
    open_source,
    open_sources,
    prepare,
    require_tokenizer,
)
from tracformer.data.hub_sources import HUB_PREFIX
from tracformer.data.shards import MANIFEST_FILE
from tracformer.data.sources import reading_of, split_files
from tracformer.evaluation.exact_sources import PREFIX as EXACT
from tracformer.evaluation.exact_sources import parse_exact
from tracformer.reproduce.experiment import DataSet


def data_folder(root: Path, name: str, trained: bool) -> Path:
    """Return the folder of a prepared set; its last name is the set's name in results."""
    return root / ("data" if trained else "data/held-out") / name


def prepare_data(data: DataSet, root: Path, trained: bool) -> PreparedData:
    """Return a prepared data set; it is prepared if its folder does not exist.

    Args:
        data: The data set.
        root: Folder of the scale.
        trained: Whether a model is trained on it.

    Raises:
        FileNotFoundError: The data is not there; the message says how to get it.
        ValueError: The folder was made from other data, or with another tokenizer.
    """
    folder = data_folder(root, data.name, trained)
    if data.source.startswith(EXACT):
        return _sample_source(folder, data)
    place = Path(data.source)
    tokenizer = "byte" if data.tokenizer.startswith("bpe:") and not trained else data.tokenizer
    if (place / MANIFEST_FILE).is_file():
        return _link(folder, place.resolve(), data.name)
    try:
        sources = split_sources(data, trained)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}. {_how_to_get(data, folder)}") from error
    if not (folder / MANIFEST_FILE).is_file():
        try:
            return prepare(folder, sources, tokenizer)
        except (ValueError, ImportError) as error:
            if _is_named(data):
                raise type(error)(f"{error}. {_how_to_get(data, folder)}") from error
            raise
    prepared = PreparedData.open(folder)
    if not is_made_from(prepared, sources):
        raise ValueError(
            f"{folder} was prepared from other data than {data.source}; use another out=FOLDER, or "
            f"remove {folder}"
        )
    require_tokenizer(tokenizer, prepared, f"the tokenizer of {data.name}")
    return prepared


def _sample_source(folder: Path, data: DataSet) -> PreparedData:
    """Return sequences sampled from a source of the exact benchmark."""
    drawn = parse_exact(data.source)
    if not (folder / MANIFEST_FILE).is_file():
        return prepare(folder, drawn.splits(), drawn.tokenizer)
    prepared = PreparedData.open(folder)
    sizes = {name: split.documents for name, split in prepared.manifest.splits.items()}
    if prepared.tokenizer.fingerprint != drawn.tokenizer.fingerprint or sizes != drawn.sizes:
        raise ValueError(
            f"{folder} contains other sequences than {data.source}; use another out=FOLDER, or "
            f"remove {folder}"
        )
    return prepared


def require_files(data: DataSet) -> None:
    """Raise FileNotFoundError if a place that the user named does not exist.

    Sets that would be downloaded are not looked up.
    """
    if data.source.startswith(EXACT):
        return
    place = data.folder if _is_named(data) else data.source
    if place and not Path(place).exists():
        raise FileNotFoundError(f"data set {data.name!r}: {place} does not exist")


def split_sources(data: DataSet, trained: bool) -> dict[str, DataSource]:
    """Return the texts of a data set by split; only `validation` unless it is trained on."""
    if _is_named(data):
        splits = open_sources(data.source, folder=data.folder or None)
    else:
        options = reading_of(data.name, data.documents, data.detokenize)
        place = Path(data.source)
        files = split_files(place) if place.is_dir() else {}
        splits = {name: open_source(each, **options) for name, each in files.items()} or {
            "train": open_source(data.source, **options)
        }
    if trained:
        if "train" not in splits:
            raise FileNotFoundError(
                f"data set {data.name!r} is needed for training, but {data.source} has no file "
                "called train"
            )
        return splits
    first = next(name for name in ("validation", "test", "train") if name in splits)
    return {"validation": splits[first]}


def _is_named(data: DataSet) -> bool:
    return bool(named_sets(data.source)) or data.source.startswith(HUB_PREFIX)


def _link(folder: Path, place: Path, name: str) -> PreparedData:
    """Link a folder that was prepared elsewhere to the data set's own name."""
    if folder.is_symlink() or folder.exists():
        if folder.resolve() != place:
            raise ValueError(
                f"{folder} already holds other data for {name} than {place}; use another "
                f"out=FOLDER, or remove {folder}"
            )
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(place, target_is_directory=True)
    return PreparedData.open(folder)


def _how_to_get(data: DataSet, folder: Path) -> str:
    fetched = data.source if _is_named(data) else data.name
    return (
        f"Data set {data.name!r} was looked for in {folder} and as {data.source!r}. Prepare it on "
        f"a machine with a network, `tracformer prepare {fetched} --out FOLDER`, and pass "
        f"data.{data.name}=FOLDER; or pass text files: data.{data.name}=FILE, or a folder with "
        "files called train, valid and test; or data=FOLDER with the files of all sets"
    )


@cache
def tokenizer_of_model(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model folder."""
    try:
        return load_tokenizer(folder)
    except (FileNotFoundError, ValueError):  # published weights without one in their folder
        return loading.read(folder, "cpu", torch.float32)[1]


@cache
def tokenizer_of_data(folder: Path) -> Tokenizer:
    """Return the tokenizer of a prepared folder."""
    return PreparedData.open(folder).tokenizer
