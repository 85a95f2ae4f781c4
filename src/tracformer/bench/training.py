"""The training step of the presets: time, tokens a second, and how much of the machine's matrix-product rate the weight products use."""

from typing import Any

import torch

from tracformer.bench.flops import at_equal_parameters
from tracformer.bench.machine import rate
from tracformer.bench.measure import least_time
from tracformer.bench.results import Figures, Found, Piece, Row, over
from tracformer.bench.scale import Scale
from tracformer.bench.steps import build, question, step
from tracformer.model import TracformerConfig
from tracformer.runtime import keep_freed_memory

PART = "training"
UTILISATION = {"paper-small": 0.65, "laptop": 0.60, "laptop-long": 0.60}  # the targets, for `native` in float32
OURS = ("native float32", "native bfloat16", "blocked float32", "reference float32", "full encoder")


def pieces(scale: Scale) -> list[Piece]:
    found = []
    for preset, batch in scale.presets:
        config = TracformerConfig.preset(preset, **(scale.shrink or {}))
        common = {"batch": batch, "length": config.max_length, "rounds": scale.rounds}
        about = 2.5 if config.d_model < 384 else 14.0
        for kind in OURS:
            changed = {**config.to_dict(), "encoder": "full"} if kind == "full encoder" else config.to_dict()
            attention, precision = ("native", "float32") if kind == "full encoder" else kind.split()
            arguments = {"family": "tracformer", "config": changed, "attention": attention, "precision": precision, **common}
            found.append(Piece(f"training/{preset}/{kind}", step, arguments, seconds=3 + about * scale.rounds))
        for family in scale.peers:
            peer = at_equal_parameters(family, config).to_dict()
            arguments = {"family": family, "config": peer, **common}
            found.append(Piece(f"training/{preset}/{family}", step, arguments, seconds=7 + about * scale.rounds))
    if scale.compile_preset:
        config = TracformerConfig.preset(scale.compile_preset, **(scale.shrink or {}))
        arguments = {"config": config.to_dict(), "batch": dict(scale.presets)[scale.compile_preset], "rounds": scale.rounds}
        found.append(Piece(f"training/{scale.compile_preset}/layers compiled", compiled_layers, arguments, seconds=90))
    return found


def compiled_layers(config: dict[str, Any], batch: int, rounds: int) -> Figures:
    """Seconds of the widest encoder layer and the finest decoder layer, forward and backward, as they are and through torch.compile."""
    from tracformer.attention import Layout
    from tracformer.model import Tracformer
    from tracformer.model.rotary import rotary_angles

    keep_freed_memory()
    torch.manual_seed(0)
    model = build("tracformer", config, "native").train()
    assert isinstance(model, Tracformer)
    T = model.config.max_length
    _, _, context = question("tracformer", model, batch, T)
    layout = Layout(torch.full((batch,), T), T, 2, (~context).flatten().nonzero()[:, 0])
    angles = rotary_angles(layout.positions, model.config.head_size, model.config.rotary_base, torch.float32)
    features = torch.randn(2 * batch, T, model.config.d_model, requires_grad=True)
    states = torch.randn(len(layout.rows), model.config.d_model, requires_grad=True)
    query_angles, encoder, decoder = angles.at(layout.rows), model.encoder[-1], model.decoder[-1]

    def encode() -> None:
        encoder(features, angles, layout, model.attention).sum().backward()

    def decode() -> None:
        decoder(states, features, query_angles, angles, layout, model.attention).sum().backward()

    seconds = {"encoder": {"plain": least_time(encode, rounds)}, "decoder": {"plain": least_time(decode, rounds)}}
    encoder.compile()
    decoder.compile()
    for name, run in (("encoder", encode), ("decoder", decode)):
        run()  # compiles
        seconds[name]["compiled"] = least_time(run, rounds)
    return {"seconds": seconds}


def rows(found: Found) -> list[Row]:
    lines = []
    for name, figures in found.under("training/").items():
        preset, kind = name.split("/", 1)
        if kind == "layers compiled":
            lines += _compiled_rows(preset, figures)
            continue
        ours = found.get(f"training/{preset}/native float32")
        setting = f"{preset}, {figures['tokens']} tokens, {figures['parameters_without_embeddings'] / 1e6:.1f}M + embeddings"
        speed = figures["tokens"] / figures["seconds"]
        what = f"training step, {kind}"
        note = f"{figures['seconds']:.2f} s; peak {figures['peak_bytes'] / 2**20:.0f} MiB"
        precision = "bfloat16" if kind.endswith("bfloat16") else "float32"
        limit = rate(found, precision)
        if limit is not None:
            used = figures["operations"] / figures["seconds"] / limit
            target = UTILISATION.get(preset) if kind == "native float32" else None
            of = f"of the {precision} matrix-product rate, by weight products"
            lines.append(Row(PART, what, setting, speed, "tokens/s", used, of, target, note=note))
        if ours is not None and kind != "native float32":
            ratio = speed / (ours["tokens"] / ours["seconds"])
            lines.append(Row(PART, what, setting, speed, "tokens/s", ratio, "times the tokens/s of native float32", note=note))
            memory = over(figures["peak_bytes"], ours["peak_bytes"])
            lines.append(Row(PART, f"peak memory, {kind}", setting, figures["peak_bytes"] / 2**20, "MiB", memory, "of native float32"))
    return lines


def _compiled_rows(preset: str, figures: Figures) -> list[Row]:
    return [
        Row(
            PART,
            f"one {side} layer, native, torch.compile",
            f"{preset}, forward + backward",
            1e3 * seconds["compiled"],
            "ms",
            seconds["plain"] / seconds["compiled"],
            "times as it is",
        )
        for side, seconds in figures["seconds"].items()
    ]
