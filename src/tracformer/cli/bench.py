"""Measure speed and memory on this machine, as ratios against other systems.

    tracformer bench --quick                            a quick look, a minute or two
    tracformer bench                                    everything, about half an hour on two cores
    tracformer bench --only attention,training
    tracformer bench --device cuda --dtype bfloat16     attention on a GPU

Figures are saved in --out after every piece, so the same command continues an interrupted run and
measures nothing twice. Systems of the package transformers need the extra `peers`, the picture the
extra `plot`. Run it on a machine that does nothing else.
"""

import argparse
import dataclasses
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracformer.bench.suite import Store

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tracformer bench`."""
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: shows that it works, not how fast it is"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PARTS",
        help="parts, separated by commas: machine, attention, training, generation, fills",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder of the figures (default: bench-results/full or bench-results/quick)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="ignore the figures that the folder has"
    )
    parser.add_argument("--json", metavar="FILE", help="write a copy of results.json")
    parser.add_argument("--markdown", metavar="FILE", help="write a copy of table.md")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="file of the picture, .png, .svg or .pdf (default: plot.png in the folder)",
    )
    parser.add_argument(
        "--device", default="cpu", help="cpu, or cuda for attention only (default: cpu)"
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=DTYPES,
        help="precision of the attention part (default: float32)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer bench`."""
    from tracformer.bench import FULL, QUICK, suite
    from tracformer.bench.attention_speed import check_format
    from tracformer.files import write_atomically
    from tracformer.report.tables import print_tables

    scale = dataclasses.replace(
        QUICK if arguments.quick else FULL, device=arguments.device, dtype=arguments.dtype
    )
    check_device(arguments.device)
    if arguments.plot:
        check_format(Path(arguments.plot))
    parts = suite.chosen_parts(arguments.only, arguments.device)
    folder = Path(arguments.out) if arguments.out else suite.default_folder(scale)
    store = suite.Store(folder, suite.describe(scale), arguments.fresh)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # a terminated run must stop the process of its piece too
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        rows = suite.run(scale, parts, store, say)
    except KeyboardInterrupt:
        say(
            f"tracformer bench: interrupted; the figures so far are in {folder}, and the same "
            "command continues"
        )
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    marked = suite.markdown(rows, store.run)
    for path, content in (
        (folder / "table.md", marked),
        (arguments.markdown, marked),
        (arguments.json, store.document(rows)),
    ):
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(path), content)
    print_tables(suite.tables(rows))
    picture = draw(store, arguments.plot, folder)
    shown = f"; picture: {picture}" if picture else ""
    say(f"figures: {store.path}; tables: {folder / 'table.md'}{shown}")
    return 0


def check_device(device: str) -> None:
    """Raise ValueError unless the device is there."""
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device is {device!r}; it must be cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {device}, but PyTorch {torch.__version__} finds no GPU")


def draw(store: "Store", wanted: str | None, folder: Path) -> Path | None:
    """Draw the picture; without matplotlib that is an error only if --plot was given."""
    from tracformer.bench.attention_speed import draw_growth

    out = Path(wanted) if wanted else folder / "plot.png"
    try:
        return out if draw_growth(store.pieces, out) else None
    except ImportError as missing:
        if wanted:
            raise
        say(f"tracformer bench: no picture: {missing}")
        return None


def say(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)
