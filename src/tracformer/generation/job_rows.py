"""The rows of a large file, part by part, for batch jobs.

    for part in parts_of(file, 1000):
        for row, name, text in rows_of(file, "text", part):
            ...

A file is JSONL, CSV with a header, Parquet or text with one row per line; all but Parquet may be
packed. A row of lines is one line: a quoted newline in CSV is an error. At most one part is in
memory, or one row group of a Parquet file.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tracformer.data.documents import SUFFIXES
from tracformer.data.input_files import open_input, packing_of, plain_name
from tracformer.files import optional_package

PARQUET, CSV = ".parquet", ".csv"
ID = "id"  # field with the name of a row


class InputPart(NamedTuple):
    """Consecutive rows of the input.

    Args:
        number: Number of the part, from 0.
        first: Number of its first row; a file's first line has number 0, also if it is a header.
        rows: Number of rows.
        offset: Where the rows begin in an uncompressed file of lines.
        size: Their size in bytes, for progress.
        lines: The rows themselves, of a compressed file, which cannot be read from the middle.
    """

    number: int
    first: int
    rows: int
    offset: int = 0
    size: int = 0
    lines: Sequence[bytes] | None = None


def parts_of(file: Path, rows: int) -> Iterator[InputPart]:
    """Yield the parts of a file, of this many rows each."""
    if file.suffix == PARQUET:
        total = _parquet(file).metadata.num_rows
        share = file.stat().st_size / max(1, total)
        for number, first in enumerate(range(0, total, rows)):
            count = min(rows, total - first)
            yield InputPart(number, first, count, size=int(count * share))
        return
    packed = bool(packing_of(file.name))
    number = offset = header = 0
    with open_input(file) as lines:
        if plain_name(file.name).endswith(CSV):
            header, offset = 1, len(lines.readline())
        while some := list(islice(lines, rows)):
            size = sum(map(len, some))
            first = header + number * rows
            yield InputPart(number, first, len(some), offset, size, some if packed else None)
            number, offset = number + 1, offset + size


def rows_of(file: Path, field: str, part: InputPart) -> Iterator[tuple[int, Any, str | ValueError]]:
    """Yield number, name and text of each row that is not blank; or what is wrong with it.

    The name is the field `id`, or the number of the row counted from 1.
    """
    if file.suffix == PARQUET:
        for row, (found, text) in enumerate(_parquet_rows(file, field, part), part.first):
            known = row + 1 if found is None else found
            wrong = f"{file}, line {row + 1}: {field!r} holds {text!r}, not a text"
            yield row, known, text if isinstance(text, str) else ValueError(wrong)
        return
    if part.lines is None:
        with open(file, "rb") as opened:
            opened.seek(part.offset)
            lines: Sequence[bytes] = opened.read(part.size).split(b"\n")
    else:
        lines = part.lines
    plain = plain_name(file.name)
    columns = _columns(file, field) if plain.endswith(CSV) else None
    for row, line in enumerate(lines[: part.rows], part.first):
        if not line.strip():
            continue
        name: Any = row + 1
        where = f"{file}, line {row + 1}"
        try:
            text = line.decode("utf-8-sig" if row == 0 else "utf-8").rstrip("\r\n")
            if columns:
                name, text = _from_csv(text, columns, field, name)
            elif plain.endswith(SUFFIXES["jsonl"]):
                name, text = _from_json(text, field, name)
            yield row, name, text
        except UnicodeDecodeError as error:
            wrong = f"{where} is not UTF-8: byte 0x{error.object[error.start]:02x}"
            yield row, name, ValueError(wrong)
        except ValueError as error:
            yield row, name, ValueError(f"{where}: {error}")


def _from_json(line: str, field: str, number: int) -> tuple[Any, str]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"no text under {field!r}; name the field with --field")
    return record.get(ID, number), text


@lru_cache(maxsize=1)
def _columns(file: Path, field: str) -> list[str]:
    """Return the columns of a CSV file, one of which is the field."""
    with open_input(file) as opened:
        [names] = csv.reader([opened.readline().decode("utf-8-sig", "replace")]) or [[]]
    if field not in names:
        raise ValueError(
            f"{file} has no column {field!r}; it has: {', '.join(names)}; name it with --field"
        )
    return names


def _from_csv(line: str, columns: Sequence[str], field: str, number: int) -> tuple[Any, str]:
    try:
        [cells] = csv.reader([line], strict=True)
    except csv.Error as error:
        raise ValueError(f"not CSV: {error}") from error
    if len(cells) != len(columns):
        raise ValueError(f"{len(cells)} values for {len(columns)} columns")
    record = dict(zip(columns, cells, strict=True))
    return record.get(ID, number), record[field]


def _parquet(file: Path) -> Any:
    module = optional_package("pyarrow.parquet", "reading Parquet", "parquet")
    try:
        return module.ParquetFile(file)
    except Exception as error:  # pyarrow's own classes; ArrowInvalid is a ValueError
        raise ValueError(f"{file} cannot be read as Parquet: {error}") from error


def _parquet_rows(file: Path, field: str, part: InputPart) -> Iterator[tuple[Any, Any]]:
    metadata = _parquet(file).metadata
    begin, stop = 0, part.first + part.rows
    for group in range(metadata.num_row_groups):
        end = begin + metadata.row_group(group).num_rows
        if begin < stop and end > part.first:
            yield from _row_group(file, group, field)[max(0, part.first - begin) : stop - begin]
        begin = end


@lru_cache(maxsize=1)  # several parts may lie in one group
def _row_group(file: Path, group: int, field: str) -> list[tuple[Any, Any]]:
    source = _parquet(file)
    names = source.schema_arrow.names
    if field not in names:
        raise ValueError(f"{file} has no column {field!r}; it has: {', '.join(names)}")
    table = source.read_row_group(group, columns=[field] + [ID] * (ID in names))
    texts = table.column(field).to_pylist()
    ids = table.column(ID).to_pylist() if ID in names else [None] * len(texts)
    return list(zip(ids, texts, strict=True))
