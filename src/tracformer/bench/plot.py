"""The picture of a run: how the time of encoder attention grows with the length."""

from collections.abc import Mapping
from pathlib import Path

from tracformer.bench import Figures, Measured
from tracformer.bench.attention_speed import all_layers
from tracformer.files import optional_package, write_atomically

FORMATS = (".png", ".svg", ".pdf")


def check_format(out: Path) -> None:
    """Raise ValueError unless the file's name ends in a format that can be drawn."""
    if out.suffix not in FORMATS:
        raise ValueError(f"--plot is {out.name!r}; it must end in one of: {', '.join(FORMATS)}")


def draw(pieces: Mapping[str, Figures], out: Path) -> bool:
    """Write the picture; return False if there are no figures for it.

    Args:
        pieces: Figures of the pieces by name.
        out: The file.
    """
    check_format(out)
    by_length = {
        length: all_layers(figures)
        for length, figures in sorted(Measured(pieces).by_length("attention/encoder").items())
    }
    if not by_length:
        return False
    optional_package("matplotlib", "a plot", "plot").use("Agg")
    from matplotlib import pyplot

    shortest = min(by_length)
    unit = min(by_length[shortest].values())
    figure, axes = pyplot.subplots(figsize=(6.0, 4.0), layout="constrained")
    for name in dict.fromkeys(name for seconds in by_length.values() for name in seconds):
        lengths = [length for length in by_length if name in by_length[length]]
        times = [by_length[length][name] / unit for length in lengths]
        axes.plot(lengths, times, marker="o", markersize=3, label=name)
    axes.set(
        xscale="log",
        yscale="log",
        title="encoder attention, all layers",
        xlabel="sequence length T",
        ylabel=f"time over the fastest at T={shortest}",
    )
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda path: figure.savefig(path, dpi=150, format=out.suffix[1:]))
    pyplot.close(figure)
    return True
