"""Training steps against systems of equal size.

One training step of any system, timed in a fresh process: forward, backward, clipped gradients,
AdamW.

The training step of the presets: time, tokens a second, and how much of the machine's
matrix-product rate the weight products use.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.baselines import find_family
from tracformer.bench.machine import rate
from tracformer.bench.pieces import (
    BenchPiece,
    BenchRow,
    Figures,
    Measured,
    Scale,
    least_time,
    over,
    timed,
    watch_growth,
)
from tracformer.contexts import draw_contexts, parse
from tracformer.devices import keep_freed_memory
from tracformer.evaluation.flops import asked, at_equal_parameters, training_operations
from tracformer.model import ConditionalModel, Tracformer, TracformerConfig
from tracformer.model.batch import Batch

HALF_HIDDEN = "span:p=0.5,mean=50"
SHORT = 128  # tokens of the step that warms up


def step(
    family: str,
    config: Mapping[str, Any],
    batch: int,
    length: int,
    precision: str = "float32",
    attention: str = "native",
    rounds: int = 3,
    recompute: bool = False,
) -> Figures:
    """Seconds of a whole step (the least of `rounds`, after a short one that warms up) and of its
    forward and backward; peak of bytes.
    """
    from tracformer.training.optimizer import build_optimizer
    from tracformer.training.train_config import OptimizerConfig

    keep_freed_memory()
    torch.manual_seed(0)
    with torch.device("meta"):
        build(family, config, attention)  # everything is imported before memory is watched
    grown = watch_growth()
    model = build(family, config, attention).train()
    model.checkpoint_activations = recompute
    mode, tokens, context = question(family, model, batch, length)
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(), fused=True)
    take_gradients(
        model, optimizer, tokens[:, :SHORT], hidden_from(context[:, :SHORT]), mode, precision
    )
    update(model, optimizer)
    whole, gradients = [], []
    for _ in range(rounds):
        forward_backward = timed(
            lambda: take_gradients(model, optimizer, tokens, context, mode, precision)
        )
        gradients.append(forward_backward)
        whole.append(forward_backward + timed(lambda: update(model, optimizer)))
    targets = int((~context).sum())
    return {
        "seconds": min(whole),
        "forward_backward_seconds": min(gradients),
        "all_seconds": whole,
        "tokens": batch * length,
        "targets": targets,
        "operations": training_operations(model.config, batch * length, targets, mode),
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters(embeddings=False),
        "layers": len(model.blocks()),
        "config_width": config["d_model"],
        "peak_bytes": grown(),
    }


def build(family: str, config: Mapping[str, Any], attention: str) -> ConditionalModel:
    found = find_family(family)
    shape = found.config_class.from_dict({**config, "modes": tuple(config.get("modes", ()))})
    return (
        Tracformer(shape, attention)
        if isinstance(shape, TracformerConfig)
        else found.model_class(shape)
    )


def question(
    family: str, model: ConditionalModel, batch: int, length: int
) -> tuple[str, Tensor, Tensor]:
    """A mode, random tokens, and half of them hidden in spans; a left-to-right model
    predicts every token.
    """
    mode, all_targets = asked(family)
    tokens = torch.randint(model.config.vocab_size, (batch, length))
    if all_targets:
        return mode, tokens, torch.zeros(batch, length, dtype=torch.bool)
    return (
        mode,
        tokens,
        torch.from_numpy(draw_contexts(parse(HALF_HIDDEN), [length] * batch, 0, range(batch))),
    )


def hidden_from(context: Tensor) -> Tensor:
    """The context with its first position asked, so that there is a target."""
    return context & (torch.arange(context.shape[1]) > 0)


def take_gradients(
    model: ConditionalModel,
    optimizer: Any,
    tokens: Tensor,
    context: Tensor,
    mode: str,
    precision: str,
) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if precision == "bfloat16" else nullcontext():
        loss = model.loss(Batch(tokens, context), mode)
    loss.backward()


def update(model: ConditionalModel, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


PART = "training"
# the targets, for `native` in float32
UTILISATION = {"paper-small": 0.65, "laptop": 0.60, "laptop-long": 0.60}
OURS = ("native float32", "native bfloat16", "blocked float32", "reference float32", "full encoder")


def pieces(scale: Scale) -> list[BenchPiece]:
    found = []
    for preset, batch in scale.presets:
        config = TracformerConfig.preset(preset, **(scale.shrink or {}))
        common = {"batch": batch, "length": config.max_length, "rounds": scale.rounds}
        about = 2.5 if config.d_model < 384 else 14.0
        for kind in OURS:
            changed = (
                {**config.to_dict(), "encoder": "full"}
                if kind == "full encoder"
                else config.to_dict()
            )
            attention, precision = ("native", "float32") if kind == "full encoder" else kind.split()
            arguments = {
                "family": "tracformer",
                "config": changed,
                "attention": attention,
                "precision": precision,
                **common,
            }
            found.append(
                BenchPiece(
                    f"training/{preset}/{kind}", step, arguments, seconds=3 + about * scale.rounds
                )
            )
        for family in scale.peers:
            peer = at_equal_parameters(family, config).to_dict()
            arguments = {"family": family, "config": peer, **common}
            found.append(
                BenchPiece(
                    f"training/{preset}/{family}", step, arguments, seconds=7 + about * scale.rounds
                )
            )
    if scale.compile_preset:
        config = TracformerConfig.preset(scale.compile_preset, **(scale.shrink or {}))
        arguments = {
            "config": config.to_dict(),
            "batch": dict(scale.presets)[scale.compile_preset],
            "rounds": scale.rounds,
        }
        found.append(
            BenchPiece(
                f"training/{scale.compile_preset}/layers compiled",
                compiled_layers,
                arguments,
                seconds=90,
            )
        )
    return found


def compiled_layers(config: dict[str, Any], batch: int, rounds: int) -> Figures:
    """Seconds of the widest encoder layer and the finest decoder layer, forward and backward, as
    they are and through torch.compile.
    """
    from tracformer.attention import Layout
    from tracformer.model import Tracformer
    from tracformer.model.blocks import rotary_angles

    keep_freed_memory()
    torch.manual_seed(0)
    model = build("tracformer", config, "native").train()
    assert isinstance(model, Tracformer)
    T = model.config.max_length
    _, _, context = question("tracformer", model, batch, T)
    layout = Layout(torch.full((batch,), T), T, 2, (~context).flatten().nonzero()[:, 0])
    angles = rotary_angles(
        layout.positions, model.config.head_size, model.config.rotary_base, torch.float32
    )
    features = torch.randn(2 * batch, T, model.config.d_model, requires_grad=True)
    states = torch.randn(len(layout.rows), model.config.d_model, requires_grad=True)
    query_angles, encoder, decoder = angles.at(layout.rows), model.encoder[-1], model.decoder[-1]

    def encode() -> None:
        encoder(features, angles, layout, model.attention).sum().backward()

    def decode() -> None:
        decoder(states, features, query_angles, angles, layout, model.attention).sum().backward()

    seconds = {
        "encoder": {"plain": least_time(encode, rounds)},
        "decoder": {"plain": least_time(decode, rounds)},
    }
    encoder.compile()
    decoder.compile()
    for name, run in (("encoder", encode), ("decoder", decode)):
        run()  # compiles
        seconds[name]["compiled"] = least_time(run, rounds)
    return {"seconds": seconds}


def rows(found: Measured) -> list[BenchRow]:
    lines = []
    for name, figures in found.under("training/").items():
        preset, kind = name.split("/", 1)
        if kind == "layers compiled":
            lines += _compiled_rows(preset, figures)
            continue
        ours = found.get(f"training/{preset}/native float32")
        setting = (
            f"{preset}, {figures['tokens']} tokens, "
            f"{figures['parameters_without_embeddings'] / 1e6:.1f}M + embeddings"
        )
        speed = figures["tokens"] / figures["seconds"]
        what = f"training step, {kind}"
        note = f"{figures['seconds']:.2f} s; peak {figures['peak_bytes'] / 2**20:.0f} MiB"
        precision = "bfloat16" if kind.endswith("bfloat16") else "float32"
        limit = rate(found, precision)
        if limit is not None:
            used = figures["operations"] / figures["seconds"] / limit
            target = UTILISATION.get(preset) if kind == "native float32" else None
            of = f"of the {precision} matrix-product rate, by weight products"
            lines.append(
                BenchRow(PART, what, setting, speed, "tokens/s", used, of, target, note=note)
            )
        if ours is not None and kind != "native float32":
            ratio = speed / (ours["tokens"] / ours["seconds"])
            lines.append(
                BenchRow(
                    PART,
                    what,
                    setting,
                    speed,
                    "tokens/s",
                    ratio,
                    "times the tokens/s of native float32",
                    note=note,
                )
            )
            memory = over(figures["peak_bytes"], ours["peak_bytes"])
            lines.append(
                BenchRow(
                    PART,
                    f"peak memory, {kind}",
                    setting,
                    figures["peak_bytes"] / 2**20,
                    "MiB",
                    memory,
                    "of native float32",
                )
            )
    return lines


def _compiled_rows(preset: str, figures: Figures) -> list[BenchRow]:
    return [
        BenchRow(
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
