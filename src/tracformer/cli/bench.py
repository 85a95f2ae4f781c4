"""Measure speed and memory on this machine, against rivals, as ratios: one table, one picture.

    tracformer bench --quick                        a look, in a minute or two
    tracformer bench                                everything, about half an hour on two cores
    tracformer bench --only attention,training
    tracformer bench --device cuda --dtype bfloat16     attention on a GPU

Figures are saved after every piece in --out: the same command goes on after an interruption, and
measures nothing twice. Rivals from the package transformers need the extra `peers`, the picture the
extra `plot`. Run it on a machine that does nothing else.
"""

import argparse
import dataclasses
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tracformer.cli import output as show

if TYPE_CHECKING:
    from tracformer.bench.pieces import Store

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: whether it works, not how fast it is"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="PARTS",
        help="machine, attention, training, equal-work, generation, long; by commas",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="where figures go, and are found again (default: bench-results/full or /quick)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="measure everything anew, whatever the folder holds"
    )
    parser.add_argument("--json", metavar="FILE", help="a second copy of results.json")
    parser.add_argument(
        "--markdown", metavar="FILE", help="a second copy of table.md: tables to paste"
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="the picture, .png, .svg or .pdf (default: plot.png in the folder)",
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), or cuda: attention alone")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=DTYPES,
        help="of the attention part (default: float32)",
    )


def run(arguments: argparse.Namespace) -> int:
    import torch

    from tracformer.bench import plot, suite
    from tracformer.bench import suite as tables
    from tracformer.bench.pieces import FULL, QUICK, Store

    scale = dataclasses.replace(
        QUICK if arguments.quick else FULL, device=arguments.device, dtype=arguments.dtype
    )
    check_device(arguments.device)
    picture = Path(arguments.plot) if arguments.plot else None
    if picture is not None:
        plot.check_format(picture)
    parts = suite.chosen_parts(arguments.only, arguments.device)
    folder = Path(arguments.out) if arguments.out else suite.default_folder(scale)
    store = Store(folder, suite.describe(scale), arguments.fresh)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warn_if_busy(torch.get_num_threads())
    # so that no piece goes on alone
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        rows = suite.run(scale, parts, store, tell)
    except KeyboardInterrupt:
        tell(
            f"tracformer bench: interrupted; what is measured is in {folder}, and the same command "
            "goes on from there"
        )
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    warnings = tables.warnings(store.pieces, suite.doubtful(store.pieces))
    marked = tables.markdown(rows, store.run, warnings)
    for path, content in (
        (folder / "table.md", marked),
        (arguments.markdown, marked),
        (arguments.json, store.document(rows)),
    ):
        if path is not None:
            write(Path(path), content)
    show.put(tables.text(rows))
    for warning in warnings:
        tell(f"tracformer bench: {warning}")
    drawn = draw(store, picture or folder / "plot.png", wanted=picture is not None)
    tell(
        f"figures: {store.path}; tables: {folder / 'table.md'}"
        + (f"; picture: {drawn}" if drawn else "")
    )
    return 0


def check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device is {device!r}; it must be cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device is {device}, but PyTorch {torch.__version__} finds no GPU")


def warn_if_busy(threads: int) -> None:
    from tracformer.bench.pieces import load_average

    load = load_average()
    if load is not None and load > 0.3:
        tell(
            f"tracformer bench: the machine is busy (load average {load:.2f} with {os.cpu_count()} "
            f"cores, {threads} used here): "
            f"timings then mean little"
        )


def draw(store: "Store", out: Path, wanted: bool) -> Path | None:
    """The picture; where it was not asked for by name, a machine without matplotlib
    does without.
    """
    from tracformer.bench import plot

    try:
        return out if plot.draw(store.pieces, out) else None
    except ImportError as missing:
        if wanted:
            raise
        tell(f"tracformer bench: no picture: {missing}")
        return None


def write(path: Path, content: str) -> None:
    from tracformer.files import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
