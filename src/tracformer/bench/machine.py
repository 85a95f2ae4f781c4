"""The machine's limits, measured first: what training (matrix products) and generation (reading
weights) can hope for.
"""

import platform
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tracformer.bench.pieces import (
    BenchPiece,
    BenchRow,
    Figures,
    Measured,
    Scale,
    least_time,
    processor_name,
)

PART = "machine"
PIECE = "machine/limits"
PRECISIONS = ("float32", "bfloat16")
# rows, inner, columns
SHAPES = (
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 768, 3072),
    (2048, 3072, 768),
    (3072, 3072, 3072),
)


def pieces(scale: Scale) -> list[BenchPiece]:
    shapes = SHAPES[: scale.matmul_shapes]
    arguments = {
        "device": scale.device,
        "shapes": shapes,
        "mebibytes": scale.bandwidth_mebibytes,
        "rounds": scale.rounds,
    }
    return [BenchPiece(PIECE, limits, arguments, seconds=15.0)]


def limits(
    device: str, shapes: tuple[tuple[int, int, int], ...], mebibytes: int, rounds: int
) -> Figures:
    """Operations a second of matrix products by precision, each the best of its shapes; bytes a
    second read and copied.
    """
    on = torch.device(device)
    figures: Figures = {
        "processor": torch.cuda.get_device_name(on) if on.type == "cuda" else processor_name(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "torch": torch.__version__,
    }
    for precision in PRECISIONS:
        rates = {
            f"{m}x{k}x{n}": product_rate(m, k, n, getattr(torch, precision), on, rounds)
            for m, k, n in shapes
        }
        figures[f"products_{precision}"] = rates
        figures[f"rate_{precision}"] = max(rates.values())
    figures.update(bandwidths(mebibytes, on, rounds))
    return figures


def product_rate(
    m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, rounds: int
) -> float:
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return 2.0 * m * k * n / least_time(lambda: torch.mm(a, b, out=out), 2 * rounds, device)


def bandwidths(mebibytes: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Bytes a second: `read` by the fastest reader there is; `copy`, what is read and what is
    written; and what PyTorch reads of a matrix that it multiplies with one row.
    """
    from tracformer.native import available

    width = 4096
    weights = torch.ones(mebibytes * 2**18 // width, width, device=device)
    target, row = torch.empty_like(weights), torch.ones(width, device=device)
    size = float(weights.numel() * weights.element_size())
    native = device.type == "cpu" and available()
    if native:
        torch.ops.tracformer.large_pages([weights])  # as generation reads its own
    read = (
        partial(torch.ops.tracformer.streamed_sum, weights)
        if native
        else partial(Tensor.sum, weights)
    )
    seconds = {
        name: least_time(run, 2 * rounds, device)
        for name, run in {
            "read": read,
            "copy": lambda: target.copy_(weights),
            "matrix_vector": lambda: weights @ row,
        }.items()
    }
    rates = {name: (2 if name == "copy" else 1) * size / each for name, each in seconds.items()}
    return {**rates, "read_by": "native code" if native else "PyTorch's sum"}


def rate(found: Measured, precision: str = "float32") -> float | None:
    """Operations a second of matrix products."""
    figures = found.get(PIECE)
    return None if figures is None else float(figures[f"rate_{precision}"])


def read_bandwidth(found: Measured) -> float | None:
    """Bytes a second: the fastest reading seen.

    A product that reads faster than the sum shows that the sum was disturbed.
    """
    figures = found.get(PIECE)
    return None if figures is None else max(float(figures["read"]), float(figures["matrix_vector"]))


def rows(found: Measured) -> list[BenchRow]:
    figures = found.get(PIECE)
    if figures is None:
        return []
    single, half = (figures[f"rate_{precision}"] for precision in PRECISIONS)
    read = read_bandwidth(found)
    assert read is not None
    best = {
        precision: max(rates, key=rates.get)
        for precision in PRECISIONS
        if (rates := figures[f"products_{precision}"])
    }
    return [
        BenchRow(PART, "matrix product", f"float32, {best['float32']}", single / 1e9, "GFLOP/s"),
        BenchRow(
            PART,
            "matrix product",
            f"bfloat16, {best['bfloat16']}",
            half / 1e9,
            "GFLOP/s",
            half / single,
            "float32",
        ),
        BenchRow(PART, "memory read", f"float32, by {figures['read_by']}", read / 1e9, "GB/s"),
        BenchRow(
            PART,
            "memory copy",
            "read and written",
            figures["copy"] / 1e9,
            "GB/s",
            figures["copy"] / read,
            "read",
        ),
        BenchRow(
            PART,
            "matrix times one row",
            "float32, PyTorch",
            figures["matrix_vector"] / 1e9,
            "GB/s",
            figures["matrix_vector"] / read,
            "read",
        ),
    ]
