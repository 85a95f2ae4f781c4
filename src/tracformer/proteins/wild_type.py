"""A wild-type sequence as the row of tokens that a model reads.

A model of unaligned sequences reads the residues themselves. A model of an aligned family reads one
letter per column of the family, gaps included: the wild type is aligned to the columns by a profile
HMM of the family (`family.hmm` in the model's folder), or taken from the family's alignment by its
name. Residues that belong to no column are reported, never dropped in silence.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from tracformer.data import Examples, PreparedData, Records, Tokenizer, name_of
from tracformer.data.alignment import INSERTED, AlignedRecord, aligned_record, read_alignment
from tracformer.files import optional_package, write_atomically

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"  # in HMMER's order
HMM_FILE = "family.hmm"
RANGE = re.compile(r"/(\d+)-(\d+)$")  # Pfam's names end with the residues' numbers


@dataclass(frozen=True)
class WildType:
    """A wild-type sequence and its place in the row that a model reads.

    Args:
        sequence: The residues.
        row: The letters of the model's row: the family's columns, or the residues themselves.
        places: For each residue its index in the row, or INSERTED if it belongs to no column.
        first: Number of the first residue, as mutants count.

    Raises:
        ValueError: A letter is not one of the 20 amino acids, or `first` is below 1.

    Example:
        >>> wild = WildType("ACD", "A-CD", (0, 2, 3), first=10)
        >>> wild.residue(11), wild.place(11)
        ('C', 2)
    """

    sequence: str
    row: str
    places: tuple[int, ...]
    first: int = 1

    def __post_init__(self) -> None:
        if not self.sequence:
            raise ValueError("the wild type is empty; give its sequence of residues")
        for number, letter in enumerate(self.sequence, self.first):
            if letter not in RESIDUES:
                raise ValueError(
                    f"residue {number} of the wild type is {letter!r}; it must be one of {RESIDUES}"
                )
        if self.first < 0:
            raise ValueError(f"first is {self.first}; it must be 0 or more")

    @property
    def last(self) -> int:
        """Number of the last residue."""
        return self.first + len(self.sequence) - 1

    def residue(self, position: int) -> str:
        """Return the letter at a position, counted from `first`."""
        if not self.first <= position <= self.last:
            raise ValueError(
                f"position {position} is outside of the wild type, whose residues have the numbers "
                f"{self.first} to {self.last}"
            )
        return self.sequence[position - self.first]

    def place(self, position: int) -> int:
        """Return the index of a position in the row, or INSERTED."""
        self.residue(position)
        return self.places[position - self.first]

    @cached_property
    def outside(self) -> tuple[int, ...]:
        """Positions of residues that belong to no column."""
        return tuple(i for i, at in enumerate(self.places, self.first) if at == INSERTED)


def find_wild_type(
    given: str,
    aligned: bool,
    first: int | None = None,
    family: str | PathLike[str] | None = None,
    folder: str | PathLike[str] | None = None,
) -> WildType:
    """Return the wild type that a user names.

    Args:
        given: Residues, a FASTA file with one record, or the name of a record of `family`.
        aligned: Whether the model reads the columns of a family.
        first: Number of the first residue; None: that in the record's name, else 1.
        family: Alignment whose columns the model reads, or a folder of prepared data.
        folder: The model's folder, whose `family.hmm` is used without `family`.

    Raises:
        ValueError: There is no such wild type, or a letter is not one of the 20 amino acids.
        FileNotFoundError: The wild type must be aligned, and there is no profile of the family.
    """
    if Path(given).is_file():
        records = read_alignment(given).records
        if len(records) != 1:
            raise ValueError(f"{given} has {len(records)} records; the wild type must be one")
        numbers = RANGE.search(records[0].name)
        first = first or (int(numbers[1]) if numbers else 1)
        sequence = records[0].sequence
    elif given and set(given.upper()) <= set(RESIDUES):
        sequence, first = given, 1 if first is None else first
    elif family:
        found = from_family(given, family, first)
        if aligned:
            return found
        sequence, first = found.sequence, found.first
    else:
        wrong = next((letter for letter in given.upper() if letter not in RESIDUES), "")
        raise ValueError(
            f"the wild type is {given!r}, which is neither a sequence of the 20 amino acids nor a "
            f"file: {wrong!r} is none of them; a record's name also needs the family (--family)"
        )
    if not aligned:
        return unaligned(sequence, first)
    hmm = family_hmm(family_columns(family)) if family else load_hmm(folder or "")
    return align(sequence, hmm, first)


def unaligned(sequence: str, first: int = 1) -> WildType:
    """Return the wild type for a model of unaligned sequences."""
    sequence = sequence.upper()
    return WildType(sequence, sequence, tuple(range(len(sequence))), first)


def from_family(name: str, path: str | PathLike[str], first: int | None = None) -> WildType:
    """Return the wild type of this name in a family's alignment.

    Args:
        name: Name of the record; `ID/10-90` may be written as `ID` if it is the only one.
        path: The alignment.
        first: Number of its first residue; by default that in the name, else 1.

    Raises:
        ValueError: No record, or more than one, has the name.
    """
    found = [
        record
        for record in read_alignment(path).records
        if record.name == name or record.name.split("/")[0] == name
    ]
    exact = [record for record in found if record.name == name] or found
    if not exact:
        raise ValueError(f"{path} has no record named {name!r}")
    if len({record.name for record in exact}) > 1:
        names = ", ".join(record.name for record in exact[:5])
        raise ValueError(
            f"{name!r} names {len(exact)} records of {path}: {names}; give one of them"
        )
    return _from_record(exact[0], first)


def align(sequence: str, hmm: Any, first: int = 1) -> WildType:
    """Return a wild type aligned to the columns of a family.

    Args:
        sequence: The residues.
        hmm: A `pyhmmer.plan7.HMM` with one node per column, from `family_hmm` or `load_hmm`.
        first: Number of the first residue.
    """
    sequence = sequence.upper()
    unaligned(sequence, first)  # checks the letters
    pyhmmer = optional_package("pyhmmer", "aligning a wild type to a family", "proteins")
    alphabet = pyhmmer.easel.Alphabet.amino()
    one = pyhmmer.easel.TextSequence(name=b"wild type", sequence=sequence).digitize(alphabet)
    block = pyhmmer.easel.DigitalSequenceBlock(alphabet, [one])
    msa = pyhmmer.hmmalign(hmm, block, all_consensus_cols=True)
    return _from_record(aligned_record("wild type", msa.alignment[0]), first)


def family_columns(family: str | PathLike[str], split: str = "train") -> list[str]:
    """Return the rows of an alignment, or those of a split of prepared aligned data."""
    if not Path(family).is_dir():
        return [record.columns for record in read_alignment(family).records]
    data = PreparedData.open(family)
    if not data.tokenizer.has_gaps:
        raise ValueError(f"{family} was prepared without gaps; give an alignment")
    part = data.split(split)
    return rows_as_text(Records(part, Records(part, 1).columns), data.tokenizer)


def rows_as_text(rows: Examples, tokenizer: Tokenizer) -> list[str]:
    """Return each row as a text of one letter per column."""
    letters = np.array(tokenizer.tokens()[:-1])
    return ["".join(row) for row in letters[rows.get(np.arange(len(rows)))[0]]]


def build_hmm(columns: Sequence[str], name: str = "family", **options: Any) -> Any:
    """Return HMMER's model (`pyhmmer.plan7.HMM`) of the rows of an alignment.

    `options` go to `pyhmmer.plan7.Builder`.
    """
    pyhmmer = optional_package("pyhmmer", "building a profile HMM", "proteins")
    alphabet = pyhmmer.easel.Alphabet.amino()
    rows = [
        pyhmmer.easel.TextSequence(name=str(number).encode(), sequence=row)
        for number, row in enumerate(columns)
    ]
    msa = pyhmmer.easel.TextMSA(name=name.encode(), sequences=rows).digitize(alphabet)
    # the builder's calibration draws sequences
    builder = pyhmmer.plan7.Builder(alphabet, **{"seed": 42, **options})
    return builder.build_msa(msa, pyhmmer.plan7.Background(alphabet))[0]


def family_hmm(columns: Sequence[str], name: str = "family") -> Any:
    """Return HMMER's profile HMM of a family with one node per column of its alignment."""
    hmm = build_hmm(columns, name, symfrac=0.0)
    if hmm.M != len(columns[0]):
        raise ValueError(
            f"{name} has {len(columns[0]) - hmm.M} columns without a residue; remove them"
        )
    return hmm


def save_hmm(hmm: Any, folder: str | PathLike[str]) -> None:
    """Write `family.hmm` into a model's folder."""

    def write(path: Path) -> None:
        with open(path, "wb") as file:
            hmm.write(file)

    write_atomically(Path(folder) / HMM_FILE, write)


def save_profile(rows: Examples, tokenizer: Tokenizer, folders: Sequence[Path]) -> str:
    """Write `family.hmm`, made of the training rows, into model folders; return what to report.

    Nothing is written if the rows are no proteins, or without the package pyhmmer.
    """
    if name_of(tokenizer) != "protein-aligned":
        return "no family.hmm: the tokenizer is not protein-aligned"
    if find_spec("pyhmmer") is None:
        return "no family.hmm: pyhmmer is missing; `mutants` and `design` then need --family"
    try:
        hmm = family_hmm(list(dict.fromkeys(rows_as_text(rows, tokenizer))))
    except ValueError as error:
        return f"no family.hmm: {error}"
    for folder in folders:
        save_hmm(hmm, folder)
    return f"{HMM_FILE}: profile of {hmm.M} columns, to which a wild type is aligned"


def load_hmm(folder: str | PathLike[str]) -> Any:
    """Read `family.hmm` of a model's folder.

    Raises:
        FileNotFoundError: The folder has none.
    """
    pyhmmer = optional_package("pyhmmer", "aligning a wild type to a family", "proteins")
    path = Path(folder) / HMM_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: there is no such file, so a wild type cannot be aligned to the columns of "
            "this model; name the alignment that it was trained on with --family"
        )
    with pyhmmer.plan7.HMMFile(str(path)) as file:
        return file.read()


def _from_record(record: AlignedRecord, first: int | None) -> WildType:
    if first is None:
        numbers = RANGE.search(record.name)
        first = int(numbers[1]) if numbers else 1
        if numbers and int(numbers[2]) - first + 1 > len(record.sequence):
            raise ValueError(
                f"{record.name} has {len(record.sequence)} residues in the alignment and "
                f"{int(numbers[2]) - first + 1} by its name: insertions were removed, so positions "
                "are unknown; give the wild type's sequence and the number of its first residue"
            )
    return WildType(record.sequence, record.columns, record.places, first)
