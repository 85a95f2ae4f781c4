"""Turn documents into a folder of token shards.

prepare             tokenize, write, count and hash; the finished folder is renamed into place
is_made_from        whether a folder was prepared from given sources
require_tokenizer   stop if a folder was prepared with another tokenizer than the wanted one
"""

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from tracformer.data.input_files import BadRecordError, ReadMonitor, version_of
from tracformer.data.make_tokenizer import ALPHABETS, build_tokenizer, choose_tokenizer
from tracformer.data.shards import (
    DTYPES,
    MANIFEST_FILE,
    Manifest,
    PreparedData,
    SplitWriter,
    dtype_name,
)
from tracformer.data.sources import (
    DataSource,
    Where,
    file_hashes,
    files_of,
    open_sources,
    stored_size,
    with_gaps_of,
    with_monitor,
)
from tracformer.data.split import SplitRule, WholeSource, choose_rule, identity_rule
from tracformer.data.token_batches import Routed, batches_of, encode
from tracformer.data.tokenizer import CONFIG_FILE, FOREIGN, TOKENIZER_FILE, Tokenizer
from tracformer.files import flush, lock_folder, sha256_of, write_atomically
from tracformer.progress import ProgressBar
from tracformer.workers import check_workers

SHARD_TOKENS = 1 << 28
RECORD_EVERY = 16  # batches between two records of the progress, from which a killed run continues
PROGRESS_FILE = "progress.json"
SPLIT_NAME = re.compile(r"[a-z][a-z0-9_]*")


def prepare(
    folder: str | PathLike[str],
    sources: Where | DataSource | Mapping[str, DataSource],
    tokenizer: Tokenizer | str | PathLike[str] = "auto",
    *,
    validation: float = 0.05,
    identity: float | None = None,
    distinct: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    overwrite: bool = False,
    quiet: bool = False,
    workers: int | None = None,
    skip_bad: bool = False,
) -> PreparedData:
    """Tokenize sources into a folder and open it.

    The folder appears only when everything is written; until then, files are in a hidden folder
    beside it. The same call after a kill continues there, if all sources are files. Memory is
    bounded: at most two batches of text per worker, of about 2 MB each, and their tokens.

    Args:
        folder: The folder to write.
        sources: A file, folder, glob or name (see `open_sources`), a source, or one source per
            split.
        tokenizer: A tokenizer, a text such as `bpe:4096` (see `build_tokenizer`), or `auto` to
            choose by the data (see `choose_tokenizer`).
        validation: Fraction of `train` to hold out if there is no source for `validation`.
        identity: For aligned FASTA files: hold out sequences with at most this identity to any
            training sequence, and as many again for `test` (see `split`).
        distinct: With `identity`: keep only the first of equal sequences.
        shard_tokens: Number of tokens per shard.
        overwrite: Replace a prepared folder.
        quiet: Show no progress.
        workers: Number of processes that tokenize, with one thread each; the files are the same
            for any number. None tokenizes in this process, with the tokenizer library's threads.
        skip_bad: Leave out records that cannot be read (broken lines, rows without text) and
            documents with characters outside the tokenizer's alphabet; each is reported, and
            their number is in the manifest. False: the first stops the run, which keeps what is
            written; the same call with skip_bad=True continues.

    Returns:
        The prepared data.

    Raises:
        ValueError: An argument is wrong, the folder exists, an unfinished folder was begun with
            other arguments, or a text cannot be tokenized.
        FileNotFoundError: A source does not exist.
        BlockingIOError: Another process is preparing this folder.

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
    if workers is not None:
        check_workers(workers)
    by_split = _by_split(sources)
    if skip_bad and not any(map(files_of, by_split.values())):
        raise ValueError("skip_bad is for files; the data comes from elsewhere: leave it out")
    first_look = ReadMonitor(skip_bad)  # what is broken is reported when it is read to be written
    by_split = {name: with_monitor(source, first_look) for name, source in by_split.items()}
    asked = "" if isinstance(tokenizer, Tokenizer) else str(tokenizer)
    begun_with = {
        "tokenizer": asked or getattr(tokenizer, "fingerprint", ""),
        "validation": validation,
        "identity": identity,
        **({"distinct": True} if distinct else {}),
        "shard_tokens": shard_tokens,
        "sources": {name: source.describe() for name, source in by_split.items()},
        "changed files": [
            version_of(file) for source in by_split.values() for file in files_of(source)
        ],
    }
    part = target.with_name(f".{target.name}.part")
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(part))
            except BlockingIOError:
                raise BlockingIOError(
                    f"another process is preparing {target}; wait for it, or use another folder"
                ) from None
            try:
                progress = _progress(part, begun_with, overwrite)
                if progress is not None:
                    tokenizer = Tokenizer.load(part)
                elif not isinstance(tokenizer, Tokenizer):
                    tokenizer = _build_tokenizer(str(tokenizer), by_split)
                by_split = {
                    name: with_gaps_of(tokenizer, source) for name, source in by_split.items()
                }
                rules = _rules(by_split, identity, validation, distinct)
                if progress is None:
                    tokenizer.save(part)
                    progress = _Progress(begun_with)
                _write(part, by_split, rules, tokenizer, asked, progress, quiet, workers, skip_bad)
                (part / PROGRESS_FILE).unlink(missing_ok=True)
                _put_in_place(part, target)
            finally:
                if not (part / PROGRESS_FILE).exists():
                    shutil.rmtree(part, ignore_errors=True)
    except BadRecordError as error:
        raise BadRecordError(
            f"{error} (with `tracformer prepare --skip-bad` such records are left out; a run that "
            "stopped at one continues)"
        ) from error
    except RuntimeError as error:
        raise RuntimeError(f"{error}; then repeat the command, which continues") from error
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


@dataclass
class _Progress:
    """What is written already, as of the last record.

    Attributes:
        begun_with: Arguments of the run.
        source: Name of the source that is being read; empty before the first.
        pieces: Number of its pieces that are written.
        left_out: Number of pieces that could not be tokenized.
        splits: State of the writer of each split.
    """

    begun_with: dict[str, Any]
    source: str = ""
    pieces: int = 0
    left_out: int = 0
    splits: dict[str, dict[str, Any]] = field(default_factory=dict)

    def record(self, folder: Path, writers: Mapping[str, SplitWriter]) -> None:
        """Write the record, after the files that it speaks of."""
        self.splits = {split: writer.state() for split, writer in writers.items()}
        write_atomically(folder / PROGRESS_FILE, json.dumps(asdict(self)))


def _progress(part: Path, begun_with: dict[str, Any], overwrite: bool) -> _Progress | None:
    """Return how far an unfinished run came; without one, clear the folder and return None."""
    file = part / PROGRESS_FILE
    if file.is_file() and not overwrite:
        found = _Progress(**json.loads(file.read_text(encoding="utf-8")))
        now = json.loads(json.dumps(begun_with))
        if different := [name for name in now if now[name] != found.begun_with.get(name)]:
            raise ValueError(
                f"{part} holds the beginning of a run with other {' and '.join(different)}; repeat "
                "that run to finish it, or delete the folder or use overwrite=True (--overwrite) "
                "to begin again"
            )
        return found
    for entry in part.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return None


def _build_tokenizer(spec: str, by_split: Mapping[str, DataSource]) -> Tokenizer:
    spec = choose_tokenizer(by_split) if spec == "auto" else spec
    # An alphabet must cover every split; merges are learned from training text only.
    only_train = spec != "char" and "train" in by_split
    learn_from = ["train"] if only_train else list(by_split)
    return build_tokenizer(
        spec, lambda: (piece.text for name in learn_from for piece in by_split[name].pieces())
    )


def _rules(
    by_split: Mapping[str, DataSource],
    identity: float | None,
    validation: float,
    distinct: bool,
) -> dict[str, SplitRule]:
    rules: dict[str, SplitRule] = {name: WholeSource(name) for name in by_split}
    if distinct and identity is None:
        raise ValueError("distinct is for aligned sequences: give identity too (--identity 0.6)")
    if identity is not None:
        if set(by_split) != {"train"}:
            raise ValueError(
                "identity holds out records of one source, but there are sources for "
                f"{', '.join(by_split)}; give only train, or leave identity out"
            )
        rules["train"] = identity_rule(by_split["train"], identity, validation, distinct)
    elif "train" in by_split and "validation" not in by_split:
        rules["train"] = choose_rule(by_split["train"].pieces(), validation)
    return rules


def _write(
    folder: Path,
    sources: Mapping[str, DataSource],
    rules: Mapping[str, SplitRule],
    tokenizer: Tokenizer,
    asked: str,
    progress: _Progress,
    quiet: bool,
    workers: int | None,
    skip_bad: bool,
) -> None:
    shard_tokens = progress.begun_with["shard_tokens"]
    name = dtype_name(tokenizer.vocab_size)
    monitor = ReadMonitor(skip_bad, quiet, bad=progress.left_out)
    sizes = [stored_size(source) for source in sources.values()]
    total = sum(size for size in sizes if size is not None) if None not in sizes else None
    # documents in memory may differ from those of the killed run
    resumable = all(files_of(source) for source in sources.values())
    names = list(sources)
    done = names[: names.index(progress.source)] if progress.source else []
    with (
        ExitStack() as files,
        ProgressBar(
            f"preparing {', '.join(sources)}", total, unit="bytes", enabled=not quiet
        ) as bar,
    ):
        writers = {
            split: SplitWriter(folder, split, DTYPES[name], shard_tokens, files, state)
            for split, state in progress.splits.items()
        }
        shown = batches = 0
        try:
            for given, source in sources.items():
                if given in done:
                    monitor.bytes += stored_size(source) or 0
                    continue
                if given != progress.source:
                    progress.source, progress.pieces = given, 0
                pieces = with_monitor(source, monitor).pieces()
                routed = islice(rules[given].route(pieces), progress.pieces, None)
                errors: list[ValueError] = []
                read: deque[int] = deque()  # bytes read when each batch was complete
                noted = _noting(batches_of(routed, errors), monitor, read)
                for batch in encode(tokenizer, noted, workers, skip_bad):
                    for split, tokens in batch.splits.items():
                        if split not in writers:
                            writers[split] = SplitWriter(
                                folder, split, DTYPES[name], shard_tokens, files
                            )
                        writers[split].add(tokens)
                    for message in batch.left_out:
                        monitor.leave_out(message)
                        progress.left_out += 1
                    progress.pieces += batch.pieces
                    batches += 1
                    documents = sum(writer.documents for writer in writers.values())
                    now = sum(writer.bytes for writer in writers.values())
                    now = now if total is None else read.popleft()
                    bar.update(now - shown, note=f"{documents:,} documents")
                    shown = now
                    if resumable and batches % RECORD_EVERY == 0:
                        progress.record(folder, writers)
                if errors:
                    raise errors[0]
        except ValueError:  # the text or the network: what is written stays
            if resumable and batches:
                progress.record(folder, writers)
            raise
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
        left_out=monitor.bad,
    )
    write_atomically(folder / MANIFEST_FILE, manifest.to_json())
    flush(folder)


def _noting(
    batches: Iterable[list[Routed]], monitor: ReadMonitor, read: deque[int]
) -> Iterator[list[Routed]]:
    """Yield batches; note for each how many bytes were read."""
    for batch in batches:
        read.append(monitor.bytes)
        yield batch


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
