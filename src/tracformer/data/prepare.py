"""Turn documents into a folder of token shards.

prepare             tokenize, write, count and hash; the finished folder is renamed into place
is_made_from        whether a folder was prepared from given sources
require_tokenizer   stop if a folder was prepared with another tokenizer than the wanted one
"""

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tracformer.data.documents import TextPiece
from tracformer.data.make_tokenizer import ALPHABETS, build_tokenizer, choose_tokenizer
from tracformer.data.shards import (
    DTYPES,
    INDEX_DTYPE,
    MANIFEST_FILE,
    Manifest,
    PreparedData,
    SplitCounts,
    dtype_name,
    index_file,
    shard_file,
)
from tracformer.data.sources import DataSource, Where, file_hashes, open_sources, with_gaps_of
from tracformer.data.split import SplitRule, WholeSource, choose_rule, identity_rule
from tracformer.data.tokenizer import (
    CONFIG_FILE,
    FOREIGN,
    TOKENIZER_FILE,
    AlphabetError,
    Ids,
    Tokenizer,
)
from tracformer.files import flush, sha256_of, write_atomically
from tracformer.progress import ProgressBar

SHARD_TOKENS = 1 << 28
# documents are tokenized in batches large enough for all cores
BATCH_CHARACTERS, BATCH_PIECES = 1 << 21, 4096
SPLIT_NAME = re.compile(r"[a-z][a-z0-9_]*")


def prepare(
    folder: str | PathLike[str],
    sources: Where | DataSource | Mapping[str, DataSource],
    tokenizer: Tokenizer | str | PathLike[str] = "auto",
    *,
    validation: float = 0.05,
    identity: float | None = None,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    quiet: bool = False,
) -> PreparedData:
    """Tokenize sources into a folder and open it.

    The folder appears only when everything is written.

    Args:
        folder: The folder to write.
        sources: A file, folder, glob or name (see `open_sources`), a source, or one source per
            split.
        tokenizer: A tokenizer, a text such as `bpe:4096` (see `build_tokenizer`), or `auto` to
            choose by the data (see `choose_tokenizer`).
        validation: Fraction of `train` to hold out if there is no source for `validation`.
        identity: For aligned FASTA files: hold out sequences with at most this identity to any
            training sequence, and as many again for `test` (see `split`).
        shard_tokens: Number of tokens per shard.
        overwrite: Replace a prepared folder.
        quiet: Show no progress.

    Returns:
        The prepared data.

    Raises:
        ValueError: An argument is wrong, the folder exists, or a text cannot be tokenized.
        FileNotFoundError: A source does not exist.

    Example:
        >>> import tempfile
        >>> from tracformer.data import TextSource
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     texts = TextSource(["one text", "another text"])
        ...     data = prepare(f"{folder}/data", texts, "byte", validation=0.0, quiet=True)
        ...     len(data.split("train").tokens)
        22
    """
    target = Path(folder)
    _check_arguments(target, validation, shard_tokens, overwrite)
    by_split = _by_split(sources)
    asked = "" if isinstance(tokenizer, Tokenizer) else str(tokenizer)
    if not isinstance(tokenizer, Tokenizer):
        spec = choose_tokenizer(by_split) if str(tokenizer) == "auto" else tokenizer
        # An alphabet must cover every split; merges are learned from training text only.
        learn_from = (
            list(by_split)
            if str(spec) == "char"
            else ["train"]
            if "train" in by_split
            else list(by_split)
        )
        tokenizer = build_tokenizer(
            spec, lambda: (piece.text for name in learn_from for piece in by_split[name].pieces())
        )
    by_split = {name: with_gaps_of(tokenizer, source) for name, source in by_split.items()}
    rules: dict[str, SplitRule] = {name: WholeSource(name) for name in by_split}
    if identity is not None:
        if set(by_split) != {"train"}:
            raise ValueError(
                "identity holds out records of one source, but there are sources for "
                f"{', '.join(by_split)}; give only train, or leave identity out"
            )
        rules["train"] = identity_rule(by_split["train"], identity, validation)
    elif "train" in by_split and "validation" not in by_split:
        rules["train"] = choose_rule(by_split["train"].pieces(), validation)
    _remove_abandoned(target)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        _write(part, by_split, rules, tokenizer, asked, shard_tokens, quiet)
        _put_in_place(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return PreparedData.open(target)


def is_made_from(
    data: PreparedData, sources: Mapping[str, DataSource], hashes: bool = True
) -> bool:
    """Return whether data was prepared from these sources.

    Files must have the same names and sizes and be read with the same options.

    Args:
        data: Prepared data.
        sources: One source per split.
        hashes: Compare the SHA-256 of the files too, if the manifest has them.
    """
    with_gaps = {name: with_gaps_of(data.tokenizer, source) for name, source in sources.items()}
    described = [
        {name: source.describe() for name, source in read.items()} for read in (sources, with_gaps)
    ]
    if data.manifest.sources not in described:
        return False
    known = data.manifest.contents if hashes else {}
    return all(file_hashes(sources[name]) == digests for name, digests in known.items())


def require_tokenizer(wanted: str, data: PreparedData, what: str) -> None:
    """Raise ValueError if data was prepared with another tokenizer than the wanted one.

    The check uses neither the source data nor the hub, so it may miss a difference.

    Args:
        wanted: The tokenizer, as `build_tokenizer` takes it, or `auto`.
        data: Prepared data.
        what: Name of the option, for the error message.
    """
    kind, _, argument = wanted.partition(":")
    found, asked = data.tokenizer, data.manifest.tokenizer.get("asked", "")
    if wanted == "auto":
        same = True
    # learned from the data, which may have given fewer tokens
    elif wanted == "char" or kind == "bpe":
        learned = found.kind == kind and not (
            argument.isdecimal() and found.vocab_size > int(argument)
        )
        same = asked == wanted if asked.startswith("bpe:") else learned
    elif wanted in ("byte", *ALPHABETS) or kind == "char" or Path(wanted).exists():
        same = build_tokenizer(wanted).fingerprint == found.fingerprint
    else:
        same = found.kind == FOREIGN
    if not same:
        shown = asked if asked.startswith("bpe:") else f"kind {found.kind}"
        raise ValueError(
            f"{what} is {wanted!r}, but {data.folder} was prepared with another tokenizer "
            f"({shown}, {found.vocab_size} tokens); prepare the data again in another folder, or "
            "use auto to take the folder as it is"
        )


class SplitWriter:
    """Write the shards and the index of one split, and hash them."""

    def __init__(
        self, folder: Path, split: str, dtype: np.dtype[Any], shard_tokens: int, files: ExitStack
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.documents = self.tokens = self.bytes = 0
        self.facts: dict[str, dict[str, Any]] = {}
        self._files = files
        self._index = self._open(index_file(split))
        self._shard: _HashedFile | None = None
        self._add_to_index()

    def add(self, ids: NDArray[np.unsignedinteger[Any]]) -> None:
        """Append ids to the current document."""
        data = ids.astype(self.dtype, copy=False)
        while len(data):
            number, filled = divmod(self.tokens, self.shard_tokens)
            if filled == 0 or self._shard is None:
                self._finish_shard()
                self._shard = self._open(shard_file(self.split, number))
            now, data = data[: self.shard_tokens - filled], data[self.shard_tokens - filled :]
            self._shard.write(now.tobytes())
            self.tokens += len(now)

    def end_document(self, eot: NDArray[np.unsignedinteger[Any]]) -> None:
        """Append end of text and note where the next document begins."""
        self.add(eot)
        self.documents += 1
        self._add_to_index()

    def finish(self) -> SplitCounts:
        """Close the files and return the split's sizes."""
        self._finish_shard()
        self.facts[index_file(self.split)] = self._index.finish()
        return SplitCounts(self.documents, self.tokens, self.bytes)

    def _open(self, name: str) -> "_HashedFile":
        return _HashedFile(self._files.enter_context(open(self.folder / name, "wb")))

    def _add_to_index(self) -> None:
        self._index.write(np.array(self.tokens, INDEX_DTYPE).tobytes())

    def _finish_shard(self) -> None:
        if self._shard is not None:
            self.facts[shard_file(self.split, len(self.facts))] = self._shard.finish()
            self._shard = None


class _HashedFile:
    """A file that hashes what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)
        self.bytes += len(data)

    def finish(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"bytes": self.bytes, "sha256": self.digest.hexdigest()}


def _write(
    folder: Path,
    sources: Mapping[str, DataSource],
    rules: Mapping[str, SplitRule],
    tokenizer: Tokenizer,
    asked: str,
    shard_tokens: int,
    quiet: bool,
) -> None:
    tokenizer.save(folder)
    name = dtype_name(tokenizer.vocab_size)
    eot = np.array([tokenizer.eot_id], DTYPES[name])
    writers: dict[str, SplitWriter] = {}
    sizes = [source.size() for source in sources.values()]
    total = sum(size for size in sizes if size is not None) if None not in sizes else None
    with (
        ExitStack() as files,
        ProgressBar(
            f"preparing {', '.join(sources)}", total, unit="bytes", enabled=not quiet
        ) as bar,
    ):
        for given, source in sources.items():
            for split, piece, ids in _encode(tokenizer, rules[given].route(source.pieces())):
                writer = writers.get(split)
                if writer is None:
                    writer = writers[split] = SplitWriter(
                        folder, split, DTYPES[name], shard_tokens, files
                    )
                size = len(piece.text) if piece.text.isascii() else len(piece.text.encode())
                writer.bytes += size
                writer.add(ids)
                if piece.end:
                    writer.end_document(eot)
                bar.update(size)
        counts = {split: writer.finish() for split, writer in writers.items()}
    for split in {split: None for rule in rules.values() for split in rule.splits}:
        if split not in counts:
            raise ValueError(
                f"split {split!r} is empty: there is no document for it, or all documents are "
                "equal; give more text, or a source for validation"
            )
    facts = {name: fact for writer in writers.values() for name, fact in writer.facts.items()}
    for file in (TOKENIZER_FILE, CONFIG_FILE):
        facts[file] = {"bytes": (folder / file).stat().st_size, "sha256": sha256_of(folder / file)}
    manifest = Manifest(
        dtype=name,
        shard_tokens=shard_tokens,
        tokenizer={
            "kind": tokenizer.kind,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eot_id": tokenizer.eot_id,
            "mask_id": tokenizer.mask_id,
            **({"asked": asked} if asked else {}),  # bpe:4096 may have given fewer tokens
        },
        splits=counts,
        sources={given: source.describe() for given, source in sources.items()},
        carving={given: rule.describe() for given, rule in rules.items()},
        files=dict(sorted(facts.items())),
        contents={given: file_hashes(source) for given, source in sources.items()},
    )
    write_atomically(folder / MANIFEST_FILE, manifest.to_json())
    flush(folder)


def _encode(
    tokenizer: Tokenizer, routed: Iterable[tuple[str, TextPiece]]
) -> Iterator[tuple[str, TextPiece, Ids]]:
    """Yield the pieces with their splits and ids."""
    batch: list[tuple[str, TextPiece]] = []
    characters = 0
    for item in routed:
        batch.append(item)
        characters += len(item[1].text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_PIECES:
            yield from _encode_batch(tokenizer, batch)
            batch, characters = [], 0
    yield from _encode_batch(tokenizer, batch)


def _encode_batch(
    tokenizer: Tokenizer, batch: list[tuple[str, TextPiece]]
) -> Iterator[tuple[str, TextPiece, Ids]]:
    try:
        encoded = tokenizer.encode_batch([piece.text for _, piece in batch])
    except AlphabetError as error:
        piece = batch[error.text_number][1]
        excerpt = piece.text[max(0, error.offset - 10) : error.offset + 10]
        raise ValueError(
            f"{piece.origin}: "
            f"{error.explain(f'at offset {piece.offset + error.offset} ({excerpt!r})')}"
        ) from error
    for (split, piece), ids in zip(batch, encoded, strict=True):
        if piece.offset and tokenizer.adds_prefix_space:  # not the beginning of a document
            ids = np.array(tokenizer.encode(piece.text, inside=True), np.uint32)
        yield split, piece, ids


def _by_split(sources: Where | DataSource | Mapping[str, DataSource]) -> dict[str, DataSource]:
    if isinstance(sources, str | PathLike):
        return open_sources(sources)
    by_split = dict(sources) if isinstance(sources, Mapping) else {"train": sources}
    if not by_split:
        raise ValueError("there are no sources; give at least one")
    if wrong := [name for name in by_split if not SPLIT_NAME.fullmatch(name)]:
        raise ValueError(
            f"split name {wrong[0]!r} is not allowed; use lower-case letters, digits and _, for "
            "example train, validation, test"
        )
    return by_split


def _check_arguments(target: Path, validation: float, shard_tokens: int, overwrite: bool) -> None:
    if not 0.0 <= validation <= 0.5:
        raise ValueError(
            f"validation is {validation!r}; it is the fraction of the data to hold out, from 0 to "
            "0.5"
        )
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens is {shard_tokens!r}; it must be a positive integer")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file; give a folder for the prepared data")
    if not overwrite:
        raise ValueError(
            f"{target} exists already; use another folder, or replace it with overwrite=True "
            "(--overwrite)"
        )
    if not (target / MANIFEST_FILE).is_file():
        raise ValueError(
            f"{target} is not a folder of prepared data (it has no {MANIFEST_FILE}), so it is not "
            "overwritten; use another folder"
        )


def _remove_abandoned(target: Path) -> None:
    """Remove the unfinished folders of processes that were killed."""
    for part in target.parent.glob(f"{glob.escape(f'.{target.name}.')}*.part"):
        process = part.name.split(".")[-2]
        if process.isdecimal() and not _is_alive(int(process)):
            shutil.rmtree(part, ignore_errors=True)


def _is_alive(process: int) -> bool:
    if os.name == "nt":  # there, signal 0 would be Ctrl-C
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _put_in_place(part: Path, target: Path) -> None:
    """Rename the finished folder; an old one is moved away first, and back if that fails."""
    aside = target.with_name(f".{target.name}.{os.getpid()}.old")
    replaced = target.exists()
    if replaced:
        os.rename(target, aside)
    try:
        os.rename(part, target)
    except OSError:
        if replaced:
            os.rename(aside, target)
        raise
    flush(target.parent)
    shutil.rmtree(aside, ignore_errors=True)
