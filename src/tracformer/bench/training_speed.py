"""Training steps of any system in a fresh process, against systems of equal size.

A step is forward, backward, gradient clipping and AdamW.

    training/step           the step of each preset: time, tokens per second, peak memory, and how
                            much of the machine's matrix-product rate the weight products use
    training/long encoder   the encoder pair alone on long sequences
    training/long step      a whole step on long sequences
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tracformer.baselines import find_family
from tracformer.bench import (
    BenchRow,
    Figures,
    Measured,
    Measurement,
    Scale,
    growth,
    over,
    product_rate,
    timed,
    watch_growth,
)
from tracformer.contexts import draw_contexts, parse
from tracformer.devices import keep_freed_memory
from tracformer.evaluation.flops import at_equal_parameters, training_mode, training_operations
from tracformer.model import ConditionalModel, Tracformer, TracformerConfig
from tracformer.model.batch import Batch

HALF_PREDICTED = "span:p=0.5,mean=50"
SHORT = 128  # tokens of the step that warms up
BASE = "native float32"  # other steps are compared with this one
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    "native float32, recomputed activations": {"recompute": True},
    "native bfloat16": {"precision": "bfloat16"},
    "blocked float32": {"attention": "blocked"},
    "reference float32": {"attention": "reference"},
}


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
    """Measure seconds of a whole step, the least of `rounds` after a short one, and peak bytes."""
    from tracformer.training.optimizer import build_optimizer
    from tracformer.training.train_config import OptimizerConfig

    keep_freed_memory()
    torch.manual_seed(0)
    with torch.device("meta"):
        build(family, config, attention)  # imports everything before memory is watched
    grown = watch_growth()
    model = build(family, config, attention).train()
    model.checkpoint_activations = recompute
    mode, whole = question(family, model, batch, length)
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(), fused=True)

    def take_step(batch: Batch) -> None:
        optimizer.zero_grad()
        half = precision == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = model.loss(batch, mode)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    # the first position is predicted, so that there is a target
    short = whole.context[:, :SHORT] & (torch.arange(min(SHORT, length)) > 0)
    take_step(Batch(whole.tokens[:, :SHORT], short))
    times = [timed(lambda: take_step(whole)) for _ in range(rounds)]
    targets = int(whole.targets().sum())
    return {
        "seconds": min(times),
        "all_seconds": times,
        "tokens": batch * length,
        "targets": targets,
        "operations": training_operations(model.config, batch * length, targets, mode),
        "parameters": model.num_parameters(),
        "parameters_without_embeddings": model.num_parameters(embeddings=False),
        "layers": len(model.blocks()),
        "peak_bytes": grown(),
    }


def build(family: str, config: Mapping[str, Any], attention: str) -> ConditionalModel:
    """Return a model with random weights; `attention` is for a Tracformer only."""
    found = find_family(family)
    shape = found.config_class.from_dict({**config, "modes": tuple(config.get("modes", ()))})
    if isinstance(shape, TracformerConfig):
        return Tracformer(shape, attention)
    return found.model_class(shape)


def question(family: str, model: ConditionalModel, batch: int, length: int) -> tuple[str, Batch]:
    """Return a mode and a batch of random tokens of which half are given, in spans.

    A left-to-right model predicts every token.
    """
    mode, all_targets = training_mode(family)
    tokens = torch.randint(model.config.vocab_size, (batch, length))
    if all_targets:
        return mode, Batch(tokens, torch.zeros(batch, length, dtype=torch.bool))
    context = draw_contexts(parse(HALF_PREDICTED), [length] * batch, 0, range(batch))
    return mode, Batch(tokens, torch.from_numpy(context))


def encoder(config: dict[str, object], length: int) -> Figures:
    """Measure forward and backward of the encoder pair on one sequence, in seconds and bytes."""
    from tracformer.attention import Layout
    from tracformer.model.blocks import rotary_angles

    keep_freed_memory()
    torch.manual_seed(0)
    model = build("tracformer", config, "native").train()
    assert isinstance(model, Tracformer)

    def ready(T: int) -> Callable[[], object]:
        mode, batch = question("tracformer", model, 1, T)
        layout = Layout(torch.tensor([T]), T, 2, torch.arange(0))
        angles = rotary_angles(
            layout.positions, model.config.head_size, model.config.rotary_base, torch.float32
        )
        return lambda: (
            model._encode(model._readings(batch, mode, layout), angles, layout)[-1].sum().backward()
        )

    ready(64)()
    run = ready(length)
    grown = watch_growth()
    return {"seconds": timed(run), "bytes": grown()}


# ---- cases


def _step_cases(scale: Scale) -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    for preset, batch in scale.presets:
        config = TracformerConfig.preset(preset, **(scale.changes or {}))
        common = {"batch": batch, "length": config.max_length, "rounds": scale.rounds}
        shape = {"family": "tracformer", "config": config.to_dict()}
        for name, changes in VARIANTS.items():
            cases[f"{preset}/{name}"] = {**shape, **changes, **common}
        full = {**config.to_dict(), "encoder": "full"}
        cases[f"{preset}/full encoder"] = {"family": "tracformer", "config": full, **common}
        for family in scale.peers:
            peer = at_equal_parameters(family, config).to_dict()
            cases[f"{preset}/{family}"] = {"family": family, "config": peer, **common}
    return cases


def _long_encoder_cases(scale: Scale) -> dict[str, dict[str, Any]]:
    config = TracformerConfig.preset(scale.long_preset, **(scale.changes or {})).to_dict()
    return {str(T): {"config": config, "length": T} for T in scale.long_lengths}


def _long_step_cases(scale: Scale) -> dict[str, dict[str, Any]]:
    config = TracformerConfig.preset(scale.long_preset, **(scale.changes or {})).to_dict()
    common = {"family": "tracformer", "config": config, "batch": 1, "rounds": 1, "recompute": True}
    return {str(T): {**common, "length": T} for T in scale.long_lengths}


# ---- rows


def _step_rows(found: Measured) -> list[BenchRow]:
    pieces = found.cases("training/step")
    rows = []
    for case, figures in pieces.items():
        preset, kind = case.split("/", 1)
        size = figures["parameters_without_embeddings"] / 1e6
        setting = f"{preset}, {figures['tokens']} tokens, {size:.1f}M + embeddings"
        what, speed = f"training step, {kind}", figures["tokens"] / figures["seconds"]
        peak = figures["peak_bytes"] / 2**20
        note = f"{figures['seconds']:.2f} s; peak {peak:.0f} MiB"
        precision = "bfloat16" if kind.endswith("bfloat16") else "float32"
        if (limit := product_rate(found, precision)) is not None:
            used = figures["operations"] / figures["seconds"] / limit
            of = f"of the {precision} matrix-product rate, by weight products"
            rows.append(BenchRow(what, setting, speed, "tokens/s", used, of, note))
        base = pieces.get(f"{preset}/{BASE}")
        if base is not None and kind != BASE:
            ratio = speed / (base["tokens"] / base["seconds"])
            of = f"times the tokens/s of {BASE}"
            rows.append(BenchRow(what, setting, speed, "tokens/s", ratio, of, note))
            ratio_of_memory = over(figures["peak_bytes"], base["peak_bytes"])
            what = f"peak memory, {kind}"
            rows.append(BenchRow(what, setting, peak, "MiB", ratio_of_memory, f"of {BASE}"))
    return rows


def _long_encoder_rows(found: Measured) -> list[BenchRow]:
    pieces = found.by_length("training/long encoder")
    return _long_rows("encoder pair, forward + backward", pieces, "bytes")


def _long_step_rows(found: Measured) -> list[BenchRow]:
    pieces = found.by_length("training/long step")
    return _long_rows("optimizer step, recomputing activations", pieces, "peak_bytes")


def _long_rows(what: str, pieces: Mapping[int, Figures], memory: str) -> list[BenchRow]:
    rows = []
    for T, figures in pieces.items():
        least = min(pieces)
        ratio = None if T == least else over(figures[memory], pieces[least][memory])
        of = "" if ratio is None else f"times T={least}"
        note = f"{figures['seconds']:.1f} s"
        rows.append(BenchRow(what, f"T={T}", figures[memory] / 2**20, "MiB", ratio, of, note))
    for figure, of in ((memory, "memory"), ("seconds", "time")):
        exponent = growth({T: figures[figure] for T, figures in pieces.items()})
        if exponent is not None:
            setting = f"T={min(pieces)}..{max(pieces)}"
            of = f"exponent of {of} in T"
            rows.append(BenchRow(f"{what}: growth", setting, ratio=exponent, of=of))
    return rows


MEASUREMENTS = (
    Measurement("training/step", step, _step_cases, _step_rows),
    Measurement("training/long encoder", encoder, _long_encoder_cases, _long_encoder_rows),
    Measurement("training/long step", step, _long_step_cases, _long_step_rows),
)
