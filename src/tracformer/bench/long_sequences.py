"""Long sequences: a whole optimiser step of a small model at up to 32768 tokens, and
how its memory grows.
"""

from collections.abc import Callable

import torch

from tracformer.bench.pieces import (
    BenchPiece,
    BenchRow,
    Figures,
    Measured,
    Scale,
    growth,
    over,
    timed,
    watch_growth,
)
from tracformer.bench.training_speed import build, question, step
from tracformer.devices import keep_freed_memory
from tracformer.model import Tracformer, TracformerConfig

PART = "long"
LARGEST_EXPONENT = 1.05  # linear, for the encoder


def pieces(scale: Scale) -> list[BenchPiece]:
    config = TracformerConfig.preset(scale.long_preset, **(scale.shrink or {})).to_dict()
    found = []
    for T in scale.long_lengths:
        found.append(
            BenchPiece(
                f"long/encoder/{T}", encoder, {"config": config, "length": T}, seconds=3 + T / 1500
            )
        )
    for T in scale.long_lengths:
        arguments = {
            "family": "tracformer",
            "config": config,
            "batch": 1,
            "length": T,
            "rounds": 1,
            "recompute": True,
        }
        found.append(
            BenchPiece(f"long/step/{T}", step, arguments, seconds=5 + 60 * (T / 32768) ** 1.5)
        )
    return found


def encoder(config: dict[str, object], length: int) -> Figures:
    """Forward and backward of the encoder pair alone, one sequence: seconds, and growth of the
    process in bytes.
    """
    from tracformer.attention import Layout
    from tracformer.model.batch import Batch
    from tracformer.model.blocks import rotary_angles

    keep_freed_memory()
    torch.manual_seed(0)
    model = build("tracformer", config, "native").train()
    assert isinstance(model, Tracformer)

    def ready(T: int) -> Callable[[], object]:
        mode, tokens, context = question("tracformer", model, 1, T)
        layout = Layout(torch.tensor([T]), T, 2, torch.arange(0))
        angles = rotary_angles(
            layout.positions, model.config.head_size, model.config.rotary_base, torch.float32
        )
        return lambda: (
            model._encode(model._readings(Batch(tokens, context), mode, layout), angles, layout)[-1]
            .sum()
            .backward()
        )

    ready(64)()
    run = ready(length)
    grown = watch_growth()
    return {"seconds": timed(run), "bytes": grown()}


def rows(found: Measured) -> list[BenchRow]:
    lines = []
    encoders = {int(T): figures for T, figures in found.under("long/encoder/").items()}
    steps = {int(T): figures for T, figures in found.under("long/step/").items()}
    for T, figures in encoders.items():
        lines.append(
            _memory_row(
                "encoder pair, forward + backward",
                T,
                figures["seconds"],
                figures["bytes"],
                encoders,
            )
        )
    memory = "exponent of memory in T"
    if (grown := growth({T: figures["bytes"] for T, figures in encoders.items()})) is not None:
        setting = f"T={min(encoders)}..{max(encoders)}"
        lines.append(
            BenchRow(
                PART,
                "encoder pair: growth",
                setting,
                None,
                "",
                grown,
                memory,
                LARGEST_EXPONENT,
                at_most=True,
            )
        )
    for T, figures in steps.items():
        lines.append(
            _memory_row(
                "optimiser step, recomputing activations",
                T,
                figures["seconds"],
                figures["peak_bytes"],
                steps,
            )
        )
    for figure, told in (("peak_bytes", memory), ("seconds", "exponent of time in T")):
        if (grown := growth({T: figures[figure] for T, figures in steps.items()})) is not None:
            lines.append(
                BenchRow(
                    PART,
                    "optimiser step: growth",
                    f"T={min(steps)}..{max(steps)}",
                    None,
                    "",
                    grown,
                    told,
                )
            )
    return lines


def _memory_row(
    what: str, T: int, seconds: float, size: float, others: dict[int, Figures]
) -> BenchRow:
    least = min(others)
    first = others[least].get("bytes") or others[least].get("peak_bytes")
    ratio = None if T == least else over(size, first)
    return BenchRow(
        PART,
        what,
        f"T={T}",
        size / 2**20,
        "MiB",
        ratio,
        "" if ratio is None else f"times T={least}",
        note=f"{seconds:.1f} s",
    )
