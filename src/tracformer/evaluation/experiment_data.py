"""The data sets of an experiment, prepared once under its folder: from the hub by name, or from files that the user has.

A set that models are trained on is prepared whole. One that they are only asked about is read as validation text alone; its tokeniser does
not matter then, for every model reads the text in its own tokens.
"""

from pathlib import Path

from tracformer.data import PreparedData, Source, is_made_from, named_sets, open_source, open_sources, prepare, require_tokenizer
from tracformer.data.hub import HUB_PREFIX
from tracformer.data.manifest import MANIFEST_FILE
from tracformer.data.shelf import reading_of, split_files
from tracformer.evaluation.exact.data import PREFIX as EXACT
from tracformer.evaluation.exact.data import parse_exact
from tracformer.evaluation.experiment import DataSet


def data_folder(root: Path, name: str, trained: bool) -> Path:
    """The last name is the data set's own: results name their data by it."""
    return root / ("data" if trained else "data/held-out") / name


def prepare_data(data: DataSet, root: Path, trained: bool) -> PreparedData:
    """The prepared folder, made if it is not there; one made from something else is refused."""
    folder = data_folder(root, data.name, trained)
    if data.source.startswith(EXACT):
        return _draw(folder, data)
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
        raise ValueError(f"{folder} was prepared from other data than {data.source}; use another out=FOLDER, or remove {folder}")
    require_tokenizer(tokenizer, prepared, f"the tokeniser of {data.name}")
    return prepared


def _draw(folder: Path, data: DataSet) -> PreparedData:
    """Return sequences of a source of the exact benchmark, drawn once."""
    drawn = parse_exact(data.source)
    if not (folder / MANIFEST_FILE).is_file():
        return prepare(folder, drawn.splits(), drawn.tokenizer)
    prepared = PreparedData.open(folder)
    sizes = {name: split.documents for name, split in prepared.manifest.splits.items()}
    if prepared.tokenizer.fingerprint != drawn.tokenizer.fingerprint or sizes != drawn.sizes:
        raise ValueError(f"{folder} holds other sequences than {data.source}; use another out=FOLDER, or remove {folder}")
    return prepared


def require_there(data: DataSet) -> None:
    """What the user named is there; what is to be fetched is not asked for."""
    if data.source.startswith(EXACT):
        return
    place = data.folder if _is_named(data) else data.source
    if place and not Path(place).exists():
        raise FileNotFoundError(f"data set {data.name!r}: there is no {place}")


def split_sources(data: DataSet, trained: bool) -> dict[str, Source]:
    """By split; only `validation` for a set that nothing is trained on."""
    if _is_named(data):
        splits = open_sources(data.source, folder=data.folder or None)
    else:
        options = reading_of(data.name, data.documents, data.detokenize)
        place = Path(data.source)
        files = split_files(place) if place.is_dir() else {}
        splits = {name: open_source(each, **options) for name, each in files.items()} or {"train": open_source(data.source, **options)}
    if trained:
        if "train" not in splits:
            raise FileNotFoundError(f"data set {data.name!r} is to be trained on, and {data.source} has no file called train")
        return splits
    return {"validation": next(splits[name] for name in ("validation", "test", "train") if name in splits)}


def _is_named(data: DataSet) -> bool:
    return bool(named_sets(data.source)) or data.source.startswith(HUB_PREFIX)


def _link(folder: Path, place: Path, name: str) -> PreparedData:
    """A folder that was prepared elsewhere, under the data set's own name."""
    if folder.is_symlink() or folder.exists():
        if folder.resolve() != place:
            raise ValueError(f"{folder} already holds other data for {name} than {place}; use another out=FOLDER, or remove {folder}")
    else:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(place, target_is_directory=True)
    return PreparedData.open(folder)


def _how_to_get(data: DataSet, folder: Path) -> str:
    fetched = data.source if _is_named(data) else data.name
    return (
        f"Data set {data.name!r} was looked for in {folder} and as {data.source!r}. Fetch it where there is a network, "
        f"`tracformer prepare {fetched} --out FOLDER`, and give data.{data.name}=FOLDER; or name text files: data.{data.name}=FILE, "
        "or a folder with files called train, valid and test; or data=FOLDER, in which all sets lie"
    )
