"""Score mutants: the log-probability of mutated residues, relative to those of the wild type.

    log ratio = log p(mutant residues | rest) - log p(wild-type residues | rest)

The rest is everything but the mutated positions, so each term is one conditional of the model. In
mode `car` it is the exact joint probability of all mutated residues; `sum_of_singles` adds up the
log ratios of the single mutations instead, as is usual for masked models, which ignores that
mutations interact.
"""

import csv
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tracformer.data.alignment import INSERTED
from tracformer.data.tokenizer import Tokenizer
from tracformer.files import optional_package, write_atomically
from tracformer.loading import find_folder
from tracformer.model.base import ConditionalModel
from tracformer.model.batch import Batch
from tracformer.proteins.wild_type import RESIDUES, WildType, find_wild_type

SUBSTITUTION = re.compile(r"([A-Za-z])(\d+)([A-Za-z])")
SCORE = "DMS_score"  # ProteinGym's name of the measured value

Floats = NDArray[np.float64]


class Substitution(NamedTuple):
    """One residue replaced by another."""

    old: str
    position: int
    new: str

    def __str__(self) -> str:
        return f"{self.old}{self.position}{self.new}"


@dataclass(frozen=True)
class Mutant:
    """A set of substitutions, and what was measured.

    Args:
        name: As written, such as "A24G:C30D".
        changes: The substitutions.
        measured: The measured value; NaN if there is none.
    """

    name: str
    changes: tuple[Substitution, ...]
    measured: float = math.nan


class MutantScore(NamedTuple):
    """What a model says about a mutant. All values are NaN if a position has no column."""

    mutant: Mutant
    log_ratio: float
    sum_of_singles: float


def parse_mutant(text: str, wild: WildType) -> tuple[Substitution, ...]:
    """Return the substitutions of a text such as "A24G:C30D".

    Raises:
        ValueError: The text has another form, a letter is no residue, a position is out of range or
            named twice, or the wild type has another residue there.
    """
    changes: list[Substitution] = []
    for part in text.strip().split(":"):
        match = SUBSTITUTION.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not a mutant; write A24G, or A24G:C30D for several sites"
            )
        change = Substitution(match[1].upper(), int(match[2]), match[3].upper())
        found = wild.residue(change.position)
        if change.old != found:
            raise ValueError(
                f"{part}: the wild type has {found} at position {change.position}, not {change.old}"
            )
        if change.new not in RESIDUES:
            raise ValueError(f"{part}: {change.new!r} is not one of the residues {RESIDUES}")
        if change.position in [other.position for other in changes]:
            raise ValueError(f"{text!r} names position {change.position} twice")
        changes.append(change)
    return tuple(sorted(changes, key=lambda change: change.position))


def read_mutants(
    path: str | PathLike[str], wild: WildType, score_column: str = SCORE
) -> list[Mutant]:
    """Read a CSV table in ProteinGym's convention.

    Args:
        path: Table with a column `mutant`.
        wild: The wild type, whose residues the mutants must name.
        score_column: Column of measured values; it may be missing.

    Raises:
        ValueError: The table has no column `mutant`, or a row is wrong; the message names its line.
    """
    mutants = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        columns = table.fieldnames or []
        if "mutant" not in columns:
            found = ", ".join(columns)
            raise ValueError(f"{path} has no column 'mutant'; its columns are: {found}")
        if score_column != SCORE and score_column not in columns:
            found = ", ".join(columns)
            raise ValueError(f"{path} has no column {score_column!r}; its columns are: {found}")
        for row in table:
            try:
                changes = parse_mutant(row["mutant"] or "", wild)
                measured = float(row.get(score_column) or "nan")
            except ValueError as error:
                raise ValueError(f"{path}, line {table.line_num}: {error}") from None
            mutants.append(Mutant(row["mutant"], changes, measured))
    if not mutants:
        raise ValueError(f"{path} has no mutants")
    return mutants


def all_singles(wild: WildType) -> list[Mutant]:
    """Return every substitution of one residue, position by position."""
    changes = (
        Substitution(old, position, new)
        for position, old in enumerate(wild.sequence, wild.first)
        for new in RESIDUES
        if new != old
    )
    return [Mutant(str(change), (change,)) for change in changes]


def read_wild_type(
    given: str,
    tokenizer: Tokenizer,
    model: str,
    first: int | None = None,
    family: str | PathLike[str] | None = None,
) -> WildType:
    """Return the wild type that a user names, as a model reads it; see `find_wild_type`.

    Args:
        given: Residues, a FASTA file with one record, or the name of a record of `family`.
        tokenizer: The model's tokenizer.
        model: The model as `tracformer.load` takes it, whose `family.hmm` is used without `family`.
        first: Number of the first residue; None: that in the record's name, else 1.
        family: Alignment whose columns the model reads.
    """
    aligned = tokenizer.has_gaps
    folder = find_folder(model) if aligned and not family else None
    return find_wild_type(given, aligned, first, family, folder)


def score_mutants(
    model: ConditionalModel,
    tokenizer: Tokenizer,
    wild: WildType,
    mutants: Sequence[Mutant | str] | None = None,
    *,
    mode: str = "car",
    batch: int = 256,
) -> list[MutantScore]:
    """Return the log ratios of mutants, in nats.

    Args:
        model: The model.
        tokenizer: Its tokenizer, in which every letter of the row is one token.
        wild: The wild type.
        mutants: Its mutants, or texts such as "A24G:C30D"; None: every single substitution.
        mode: "car" for exact joint probabilities; "ac" for the sum of each mutated residue's
            marginal, given everything that is not mutated.
        batch: Number of sequences per pass.

    Raises:
        ValueError: The model was not trained in the mode, or the wild type does not fit it.
    """
    mutants = (
        all_singles(wild)
        if mutants is None
        else [m if isinstance(m, Mutant) else Mutant(m, parse_mutant(m, wild)) for m in mutants]
    )
    singles = dict.fromkeys((change,) for mutant in mutants for change in mutant.changes)
    wanted = list(dict.fromkeys([*(mutant.changes for mutant in mutants), *singles]))
    scored = [
        changes
        for changes in wanted
        if all(wild.place(change.position) != INSERTED for change in changes)
    ]
    ratios = dict(
        zip(scored, _log_ratios(model, tokenizer, wild, scored, mode, batch), strict=True)
    )
    return [
        MutantScore(
            mutant,
            ratios.get(mutant.changes, math.nan),
            sum(ratios.get((change,), math.nan) for change in mutant.changes),
        )
        for mutant in mutants
    ]


def _log_ratios(
    model: ConditionalModel,
    tokenizer: Tokenizer,
    wild: WildType,
    mutants: Sequence[tuple[Substitution, ...]],
    mode: str,
    batch: int,
) -> list[float]:
    """Return the log ratio of each set of substitutions."""
    row = tokenizer.encode(wild.row)
    if len(row) != len(wild.row):
        raise ValueError(
            f"the model's tokenizer makes {len(row)} tokens of {len(wild.row)} letters; mutants "
            "need a tokenizer with one token per residue, such as `protein` or `protein-aligned`"
        )
    letter = {residue: tokenizer.encode(residue)[0] for residue in RESIDUES}
    places = [tuple(wild.place(change.position) for change in changes) for changes in mutants]
    hidden = list(dict.fromkeys(places))  # each set of positions needs the wild type's term once
    rows: list[list[int]] = [row] * len(hidden)
    for changes, at in zip(mutants, places, strict=True):
        mutant = list(row)
        for change, place in zip(changes, at, strict=True):
            mutant[place] = letter[change.new]
        rows.append(mutant)
    sums = log_probs(model, rows, [*hidden, *places], mode, batch)
    reference = dict(zip(hidden, sums[: len(hidden)], strict=True))
    return [value - reference[at] for value, at in zip(sums[len(hidden) :], places, strict=True)]


def mutated_row(wild: WildType, mutant: Mutant) -> str | None:
    """Return the mutant's row; None if one of its positions has no column."""
    letters = list(wild.row)
    for change in mutant.changes:
        place = wild.place(change.position)
        if place == INSERTED:
            return None
        letters[place] = change.new
    return "".join(letters)


def whole_ratios(
    model: ConditionalModel, tokenizer: Tokenizer, wild: WildType, mutants: Sequence[Mutant]
) -> list[float]:
    """Return log p(whole mutant) minus log p(whole wild type), as models without holes score.

    By the chain rule from the first letter to the last, in mode `car`; NaN for a mutant with a
    position outside of the columns.
    """
    rows = [mutated_row(wild, mutant) for mutant in mutants]
    known = [tokenizer.encode(row) for row in (wild.row, *rows) if row is not None]
    whole = tuple(range(len(wild.row)))
    reference, *sums = log_probs(model, known, [whole] * len(known), "car", 64)
    ratios = iter(value - reference for value in sums)
    return [math.nan if row is None else next(ratios) for row in rows]


@torch.no_grad()
def log_probs(
    model: ConditionalModel,
    rows: Sequence[Sequence[int]],
    hidden: Sequence[tuple[int, ...]],
    mode: str,
    batch: int,
) -> list[float]:
    """Return log p(tokens at the hidden places | the other tokens) of each row."""
    sums: list[float] = []
    for start in range(0, len(rows), batch):
        tokens = torch.tensor(rows[start : start + batch], device=model.head.device)
        context = torch.ones_like(tokens, dtype=torch.bool)
        for number, places in enumerate(hidden[start : start + batch]):
            context[number, list(places)] = False
        sums += model.log_prob(Batch(tokens, context), mode).double().sum(1).tolist()
    return sums


class Agreement(NamedTuple):
    """How well scores rank measured values. Higher measured values are better."""

    mutants: int
    spearman: float
    low: float  # 95% interval, by bootstrap over mutants
    high: float
    auc: float  # of telling mutants above the median measured value from the others
    ndcg: float  # normalised discounted cumulative gain of the top 10%


def agreement(scores: Iterable[float], measured: Iterable[float], draws: int = 2000) -> Agreement:
    """Return how well scores agree with measured values; pairs with a NaN are left out.

    Raises:
        ValueError: Fewer than three pairs are left, or all values of one side are equal.
    """
    from scipy.stats import rankdata

    pairs = np.array([*zip(scores, measured, strict=True)], np.float64).reshape(-1, 2)
    pairs = pairs[~np.isnan(pairs).any(1)]
    if len(pairs) < 3 or (pairs == pairs[0]).all(0).any():
        raise ValueError(
            f"{len(pairs)} mutants have a score and a measured value; at least 3 are needed that "
            "are not all equal"
        )
    found, truth = pairs.T
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(pairs), size=(draws, len(pairs)))
    ranks = [_correlation(rankdata(found[i]), rankdata(truth[i])) for i in drawn]
    low, high = np.nanquantile(ranks, [0.025, 0.975])
    above = truth > np.median(truth)
    order = rankdata(found)
    positives, negatives = int(above.sum()), int((~above).sum())
    auc = (order[above].sum() - positives * (positives + 1) / 2) / max(1, positives * negatives)
    return Agreement(
        len(pairs),
        _correlation(order, rankdata(truth)),
        float(low),
        float(high),
        float(auc),
        _ndcg(found, truth),
    )


def _correlation(a: Floats, b: Floats) -> float:
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size else math.nan


def _ndcg(found: Floats, truth: Floats, share: float = 0.1) -> float:
    """Return NDCG of the best `share`, with measured values scaled to [0, 1] as gains."""
    gains = (truth - truth.min()) / (truth.max() - truth.min())
    top = max(1, int(len(gains) * share))
    discounts = 1.0 / np.log2(np.arange(2, top + 2))
    best = np.sort(gains)[::-1][:top] @ discounts
    return float(gains[np.argsort(-found, kind="stable")[:top]] @ discounts / best)


COLUMNS = ("mutant", "log_ratio", "sum_of_singles", "positions", "residues", SCORE)


def write_scores(path: str | PathLike[str], scores: Sequence[MutantScore]) -> None:
    """Write a CSV table, one mutant per line; a mutant without score has empty cells."""
    measured = any(not math.isnan(score.mutant.measured) for score in scores)
    lines = [",".join(COLUMNS if measured else COLUMNS[:-1])]
    for mutant, log_ratio, singles in scores:
        cells = [
            mutant.name,
            _cell(log_ratio),
            _cell(singles),
            ":".join(str(change.position) for change in mutant.changes),
            ":".join(change.new for change in mutant.changes),
        ]
        lines.append(",".join([*cells, _cell(mutant.measured)] if measured else cells))
    write_atomically(Path(path), "\n".join(lines) + "\n")


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


BY_PROPERTY = "GPAVILMFYWSTCNQDEHKR"  # similar amino acids are neighbours
FORMATS = (".png", ".svg", ".pdf")


def check_path(path: str | PathLike[str]) -> None:
    """Raise an error if a picture with this name cannot be drawn: ValueError or ImportError."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: the name of a picture must end with {', '.join(FORMATS)}")
    optional_package("matplotlib", "a heat map", "plot").use("Agg")


def draw_heat_map(
    path: str | PathLike[str], wild: WildType, scores: Sequence[MutantScore], title: str = ""
) -> None:
    """Write a picture of the log ratios of single mutants; the wild type is marked by dots.

    Mutants of several positions are left out; cells without a score stay grey.

    Args:
        path: File that ends with .png, .svg or .pdf.
        wild: The wild type.
        scores: Scores of its mutants.
        title: Text above the picture.
    """
    check_path(path)
    from matplotlib import pyplot

    values = [[math.nan] * len(wild.sequence) for _ in BY_PROPERTY]
    for mutant, log_ratio, _ in scores:
        if len(mutant.changes) == 1:
            [change] = mutant.changes
            values[BY_PROPERTY.index(change.new)][change.position - wild.first] = log_ratio
    known = [abs(value) for row in values for value in row if not math.isnan(value)]
    limit = max(known, default=1.0)
    figure, axes = pyplot.subplots(
        figsize=(max(6.0, 0.16 * len(wild.sequence) + 1.5), 4.2), layout="constrained"
    )
    axes.set_facecolor("#d0d0d0")
    image = axes.imshow(values, aspect="auto", cmap="RdBu", vmin=-limit, vmax=limit)
    axes.plot(
        range(len(wild.sequence)),
        [BY_PROPERTY.index(residue) for residue in wild.sequence],
        linestyle="none",
        marker="o",
        markersize=3,
        color="black",
        label="wild type",
    )
    axes.set_yticks(range(len(BY_PROPERTY)), list(BY_PROPERTY), fontsize=7)
    step = 1 if len(wild.sequence) <= 30 else 5
    numbers = [i for i in range(len(wild.sequence)) if (i + wild.first) % step == 0]
    axes.set_xticks(numbers, [str(i + wild.first) for i in numbers], fontsize=7)
    axes.set_xlabel("position")
    axes.set_ylabel("amino acid")
    axes.set_title(title, fontsize=9)
    figure.colorbar(image, label="log ratio to the wild type (nats)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
