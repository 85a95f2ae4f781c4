"""The picture of a run: one panel a question, everything as ratios."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tracformer.bench import attention_speed as attention_rows
from tracformer.bench import machine
from tracformer.bench.pieces import Figures, Measured
from tracformer.files import optional_package, write_atomically

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's
FORMATS = (".png", ".svg", ".pdf")


def check_format(out: Path) -> None:
    if out.suffix not in FORMATS:
        raise ValueError(
            f"the picture is to be {out.name!r}; it must end in one of: {', '.join(FORMATS)}"
        )


def draw(pieces: Mapping[str, Figures], out: Path) -> bool:
    """Write the picture; False where there is nothing to draw."""
    check_format(out)
    optional_package("matplotlib", "a plot", "plot").use("Agg")
    from matplotlib import pyplot

    found = Measured(pieces)
    panels: list[Callable[[Any, Measured], None]] = [
        panel
        for panel, prefix in PANELS
        if any(figures for figures in found.under(prefix).values())
    ]
    if not panels:
        return False
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.0 * columns, 3.6 * lines), layout="constrained", squeeze=False
    )
    for place, panel in zip(axes.flat, panels, strict=False):
        panel(place, found)
        place.grid(alpha=0.25)
    for place in axes.flat[len(panels) :]:
        place.axis("off")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda path: figure.savefig(path, dpi=150, format=out.suffix[1:]))
    pyplot.close(figure)
    return True


def _lengths(axes: Any, title: str, ylabel: str) -> None:
    axes.set(xscale="log", yscale="log", title=title, xlabel="T", ylabel=ylabel)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(fontsize=7)


def _encoder(axes: Any, found: Measured) -> None:
    pieces = {
        int(T): attention_rows.encoder_sums(figures)
        for T, figures in found.under("attention/encoder/").items()
    }
    _curves(axes, pieces, "encoder attention, all layers")


def _decoder(axes: Any, found: Measured) -> None:
    pieces = {
        int(T): attention_rows.decoder_sums(figures)
        for T, figures in found.under("attention/decoder/").items()
    }
    _curves(axes, pieces, "decoder attention, all strides")


def _curves(axes: Any, pieces: Mapping[int, Mapping[str, float]], title: str) -> None:
    """Time over that of our fastest at the shortest length."""
    least = min(pieces)
    unit = min(pieces[least].values())
    for i, name in enumerate(dict.fromkeys(name for sums in pieces.values() for name in sums)):
        points = [(T, sums[name] / unit) for T, sums in sorted(pieces.items()) if name in sums]
        axes.plot(
            *zip(*points, strict=True),
            marker="o",
            markersize=3,
            color=COLOURS[i % len(COLOURS)],
            label=name,
        )
    _lengths(axes, title, f"time over the fastest at T={least}")


def _training(axes: Any, found: Measured) -> None:
    pieces = {
        name: figures
        for name, figures in found.under("training/").items()
        if "operations" in figures
    }
    bars = []
    for name, figures in pieces.items():
        rate = machine.rate(found, "bfloat16" if name.endswith("bfloat16") else "float32")
        bars.append(
            (
                name.replace("/", ", "),
                figures["operations"] / figures["seconds"] / rate if rate else 0.0,
            )
        )
    _bars(
        axes, bars, "training step: weight products", "of the matrix-product rate of its precision"
    )
    axes.axvline(0.65, color="black", linestyle=":", linewidth=1)


def _equal_work(axes: Any, found: Measured) -> None:
    pieces = found.under("equal-work/")
    bars = []
    for name, figures in pieces.items():
        T, family = name.split("/")
        ours = pieces.get(f"{T}/tracformer")
        if ours is not None and family != "tracformer":
            bars.append(
                (
                    f"T={T}, {family}",
                    figures["seconds"] / figures["tokens"] / (ours["seconds"] / ours["tokens"]),
                )
            )
    _bars(axes, bars, "training at equal weight products", "Tracformer's tokens/s over theirs")
    axes.axvline(1.0, color="black", linestyle=":", linewidth=1)


def _generation(axes: Any, found: Measured) -> None:
    bars = [
        (f"batch {batch}, {system}", figures["seconds"]["gpt2"] / seconds)
        for batch, figures in found.under("generation/batch/").items()
        for system, seconds in figures["seconds"].items()
    ]
    _bars(axes, bars, "cached generation", "tokens/s over GPT-2's of transformers")
    axes.axvline(1.0, color="black", linestyle=":", linewidth=1)


def _memory(axes: Any, found: Measured) -> None:
    for i, (prefix, figure, label) in enumerate(
        (("long/encoder/", "bytes", "encoder pair"), ("long/step/", "peak_bytes", "optimiser step"))
    ):
        points = sorted((int(T), figures[figure]) for T, figures in found.under(prefix).items())
        if points:
            lengths, sizes = zip(*points, strict=True)
            axes.plot(
                lengths,
                [size / sizes[0] for size in sizes],
                marker="o",
                color=COLOURS[i],
                label=label,
            )
            axes.plot(
                lengths,
                [T / lengths[0] for T in lengths],
                color="black",
                linestyle=":",
                linewidth=1,
            )
    _lengths(axes, "memory of long sequences (dotted: linear)", "over the shortest")


def _bars(axes: Any, bars: list[tuple[str, float]], title: str, xlabel: str) -> None:
    names, values = [name for name, _ in bars], [value for _, value in bars]
    axes.barh(range(len(bars)), values, color=COLOURS[0])
    axes.set_yticks(range(len(bars)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=xlabel)


PANELS: tuple[tuple[Callable[[Any, Measured], None], str], ...] = (
    (_encoder, "attention/encoder/"),
    (_decoder, "attention/decoder/"),
    (_training, "training/"),
    (_equal_work, "equal-work/"),
    (_generation, "generation/batch/"),
    (_memory, "long/"),
)
