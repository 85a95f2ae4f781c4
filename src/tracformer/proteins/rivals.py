"""What else scores mutants of a family: a profile, a profile HMM, and arDCA.

All are fitted to the distinct sequences of an alignment, weighted by 1/neighbours at 80% identity
(HMMER weights them in its own way). `profile` and `hmm` treat positions as independent.

arDCA (Trinquier, Uguzzoni, Pagnani, Zamponi and Weigt, "Efficient generative modeling of protein
sequences using simple autoregressive models", 2021) is one multinomial logistic regression per
column. The columns are ordered from the most to the least conserved one (ascending entropy), and

    p(x_i = a | earlier columns) = softmax_a( h_i(a) + sum over earlier j of J_ij(a, x_j) )

so the probability of a whole sequence is exact. `fit_ardca` minimises the weighted negative
log-likelihood with a quadratic penalty by L-BFGS; the problem is convex.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tracformer.data.alignment import GAP, as_rows, sequence_weights
from tracformer.proteins.mutants import Mutant, mutated_row
from tracformer.proteins.wild_type import RESIDUES, WildType, family_columns, family_hmm

BLOCK = 12  # columns that arDCA computes together


class Ardca(nn.Module):
    """Autoregressive direct-coupling analysis of sequences (N, L) of letters 0..V-1.

    Args:
        order: The columns from first to last.
        letters: V, the number of letters.
    """

    def __init__(self, order: NDArray[np.int64], letters: int) -> None:
        super().__init__()
        L, V = len(order), letters
        self.fields = nn.Parameter(torch.zeros(L, V))
        self.couplings = nn.Parameter(torch.zeros(L, V, L, V))  # from column j and its letter
        self.order = torch.from_numpy(order)
        self.rank = self.order.argsort()
        self.earlier = (self.rank[:, None] < self.rank)[:, None, :, None]

    def forward(self, rows: Tensor) -> Tensor:
        """Return (N, L) the log-probability of each letter given the earlier columns."""
        L, V = self.fields.shape
        rows = rows[:, self.order]
        letters = nn.functional.one_hot(rows, V).to(self.fields.dtype).flatten(1)
        couplings = (self.couplings * self.earlier)[self.order][:, :, self.order]
        couplings = couplings.reshape(L * V, L * V)
        parts = []
        for start in range(0, L, BLOCK):  # columns after a block add nothing to it
            first, last = start * V, min(start + BLOCK, L) * V
            parts.append(letters[:, :last] @ couplings[:last, first:last])
        scores = torch.cat(parts, 1).view(-1, L, V) + self.fields[self.order]
        return scores.log_softmax(2).gather(2, rows[..., None])[:, self.rank, 0]

    @torch.no_grad()
    def log_prob(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (N,) the exact log-probability of each sequence."""
        parts = [self(torch.from_numpy(rows[i : i + 1024])) for i in range(0, len(rows), 1024)]
        return np.asarray(torch.cat(parts).double().sum(1))


def letter_shares(
    rows: NDArray[np.int64], weights: NDArray[np.float64], letters: int, pseudocount: float = 0.5
) -> NDArray[np.float64]:
    """Return (L, V) the weighted share of each letter in each column."""
    counts = np.full((rows.shape[1], letters), pseudocount)
    for column in range(rows.shape[1]):
        np.add.at(counts[column], rows[:, column], weights)
    return counts / counts.sum(1, keepdims=True)


def fit_ardca(
    rows: NDArray[np.int64],
    weights: NDArray[np.float64],
    letters: int,
    *,
    couplings_penalty: float = 2e-3,  # by the held-out likelihood of PF00595
    fields_penalty: float = 1e-4,
    steps: int = 70,
    progress: Callable[[int], None] = lambda steps: None,
) -> Ardca:
    """Return an arDCA fitted to aligned sequences.

    Args:
        rows: (N, L) letters 0..V-1.
        weights: (N,) weight of each sequence, such as `data.alignment.sequence_weights`.
        letters: V, the number of letters.
        couplings_penalty: Weight of the squared couplings, beside the mean negative log-likelihood
            of a sequence.
        fields_penalty: Weight of the squared fields, relative to the columns' shares.
        steps: Iterations of L-BFGS.
        progress: Called every ten iterations with their number.
    """
    shares = letter_shares(rows, weights, letters)
    entropy = -(shares * np.log(shares)).sum(1)
    model = Ardca(np.argsort(entropy, kind="stable"), letters)
    start = torch.from_numpy(np.log(shares)).float()
    with torch.no_grad():
        model.fields.copy_(start)
    data, share = torch.from_numpy(rows), torch.from_numpy(weights / weights.sum()).float()

    def loss() -> Tensor:
        optimizer.zero_grad()
        couplings = (model.couplings * model.earlier).square().sum()
        fields = (model.fields - start).square().sum()
        penalty = couplings_penalty * couplings + fields_penalty * fields
        value: Tensor = penalty - share @ model(data).sum(1)
        value.backward()
        return value

    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=10,
        max_eval=14,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        history_size=8,
        line_search_fn="strong_wolfe",
    )
    for _ in range(0, steps, 10):
        optimizer.step(loss)
        progress(10)
    return model.eval()


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


def family_rows(family: str | PathLike[str]) -> FamilyRows:
    """Return the rows of an alignment, or of prepared training data, that rivals are fitted to.

    Raises:
        ValueError: No record is left.
    """
    columns = family_columns(family)
    known = [row for row in columns if not set(row) - set(LETTERS)]
    distinct = list(dict.fromkeys(known))
    dropped = {
        "letters other than the 20 amino acids": len(columns) - len(known),
        "copies of another row": len(known) - len(distinct),
    }
    if not distinct:
        raise ValueError(f"{family} has no sequence of the 20 amino acids")
    return FamilyRows(distinct, sequence_weights(as_rows(distinct)), dropped)


def numbered(rows: Sequence[str]) -> NDArray[np.int64]:
    """Return (N, L) indices of the rows' letters into `LETTERS`."""
    table = np.full(256, -1, np.int64)
    table[np.frombuffer(LETTERS.encode(), np.uint8)] = np.arange(len(LETTERS))
    return table[as_rows(list(rows))]


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
    model = fit_ardca(letters, family.weights, len(LETTERS), progress=progress)
    known = numbered([wild.row, *(row for row in rows if row is not None)])
    shares = letter_shares(letters, family.weights, len(LETTERS))
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
