"""A heat map of single mutants: one column per position, one row per amino acid."""

import math
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from tracformer.files import optional_package
from tracformer.proteins.mutants import MutantScore
from tracformer.proteins.wild_type import WildType

BY_PROPERTY = "GPAVILMFYWSTCNQDEHKR"  # similar amino acids are neighbours
FORMATS = (".png", ".svg", ".pdf")


def check_path(path: str | PathLike[str]) -> None:
    """Raise ValueError if the name of a picture does not end with one of its formats."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"{path}: the name of a picture must end with {', '.join(FORMATS)}")


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
    optional_package("matplotlib", "a heat map", "plot").use("Agg")
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
