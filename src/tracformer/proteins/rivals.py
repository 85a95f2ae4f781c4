"""What else scores mutants of a family: a profile, a profile HMM, and arDCA.

All are fitted to the distinct sequences of an alignment, weighted by 1/neighbours at 80% identity
(HMMER weights them in its own way). `profile` and `hmm` treat positions as independent.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tracformer.data.alignment import GAP, INSERTED, Alignment, as_rows, sequence_weights
from tracformer.proteins import ardca
from tracformer.proteins.mutants import Mutant
from tracformer.proteins.wild_type import RESIDUES, WildType, family_hmm

LETTERS = RESIDUES + GAP


@dataclass(frozen=True)
class FamilyRows:
    """The distinct sequences of a family that use the 20 amino acids alone.

    Attributes:
        columns: Their rows.
        weights: (N,) 1/neighbours at 80% identity.
        dropped: Number of records left out, by reason.
    """

    columns: list[str]
    weights: NDArray[np.float64]
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def letters(self) -> NDArray[np.int64]:
        """(N, L) indices into `LETTERS`."""
        return numbered(self.columns)


def family_rows(alignment: Alignment) -> FamilyRows:
    """Return the rows of a family that models are fitted to.

    Raises:
        ValueError: No record is left.
    """
    columns = [record.columns for record in alignment.records]
    known = [row for row in columns if not set(row) - set(LETTERS)]
    distinct = list(dict.fromkeys(known))
    dropped = {
        "letters other than the 20 amino acids": len(columns) - len(known),
        "copies of another row": len(known) - len(distinct),
    }
    if not distinct:
        raise ValueError(f"{alignment.name} has no sequence of the 20 amino acids")
    return FamilyRows(distinct, sequence_weights(as_rows(distinct)), dropped)


def numbered(rows: Sequence[str]) -> NDArray[np.int64]:
    """Return (N, L) indices of the rows' letters into `LETTERS`."""
    table = np.full(256, -1, np.int64)
    table[np.frombuffer(LETTERS.encode(), np.uint8)] = np.arange(len(LETTERS))
    return table[as_rows(list(rows))]


def mutated_row(wild: WildType, mutant: Mutant) -> str | None:
    """Return the mutant's row; None if one of its positions has no column."""
    letters = list(wild.row)
    for change in mutant.changes:
        place = wild.place(change.position)
        if place == INSERTED:
            return None
        letters[place] = change.new
    return "".join(letters)


def rival_scores(
    family: FamilyRows,
    wild: WildType,
    mutants: Sequence[Mutant],
    progress: Callable[[int], None] = lambda steps: None,
) -> dict[str, list[float]]:
    """Return the log ratios of mutants under a profile, a profile HMM and arDCA.

    A mutant with a position outside of the columns has NaN.
    """
    rows = [mutated_row(wild, mutant) for mutant in mutants]
    letters = family.letters
    model = ardca.fit(letters, family.weights, len(LETTERS), progress=progress)
    known = numbered([wild.row, *(row for row in rows if row is not None)])
    shares = ardca.letter_shares(letters, family.weights, len(LETTERS))
    profile = np.log(shares)[np.arange(shares.shape[0]), known].sum(1)
    hmm = family_hmm(family.columns)
    emissions = np.array([list(row)[: len(RESIDUES)] for row in hmm.match_emissions][1:])
    matched = np.concatenate((np.log(np.maximum(emissions, 1e-30)), np.zeros((hmm.M, 1))), 1)
    found = {
        "profile": profile,
        "hmm": matched[np.arange(hmm.M), known].sum(1),
        "ardca": model.log_prob(known),
    }
    return {name: _ratios(values, rows) for name, values in found.items()}


def _ratios(values: NDArray[np.float64], rows: Sequence[str | None]) -> list[float]:
    wild, *rest = values.tolist()
    ratios = iter(value - wild for value in rest)
    return [math.nan if row is None else next(ratios) for row in rows]
