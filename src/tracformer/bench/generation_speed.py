"""Cached generation, the engine under requests, and memory.

What the pieces about generation share: a model with random weights, and rivals that take turns.

Many requests of different lengths, contexts, modes and samplers that come at once: through the
engine, and one after the other.

Generation with the cache, with random weights: speed does not depend on them. Rivals take turns;
the median of a few rounds counts.

What the generation part found, line by line.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from tracformer.baselines.gpt2 import GPT2
from tracformer.bench.machine import read_bandwidth
from tracformer.bench.pieces import (
    BenchPiece,
    BenchRow,
    Figures,
    Measured,
    Scale,
    timed,
    watch_growth,
)
from tracformer.bench.training_speed import build
from tracformer.devices import keep_freed_memory
from tracformer.evaluation.flops import at_equal_parameters
from tracformer.generation.decode import fill
from tracformer.generation.engine import Engine
from tracformer.generation.samplers import Sampler
from tracformer.model import Tracformer, TracformerConfig
from tracformer.model.batch import Batch
from tracformer.model.fast_step import KINDS, bytes_read


def in_turns(rounds: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each, measured in turns so that a busy moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return {name: statistics.median(each) for name, each in times.items()}


def tracformer_of(config: dict[str, Any]) -> Tracformer:
    from tracformer.native import available

    keep_freed_memory()
    available()  # compile what is compiled before anything is timed
    torch.manual_seed(0)
    model = build("tracformer", config, "native").eval()
    assert isinstance(model, Tracformer)
    return model


SAMPLERS = (
    Sampler(),
    Sampler(temperature=0.0),
    Sampler(temperature=0.8, top_p=0.9),
    Sampler(top_k=40),
)
LONGEST, LARGEST_HOLE = 200, 40  # tokens


def together(config: dict[str, Any], count: int, rounds: int) -> Figures:
    """Seconds for `count` requests."""
    model = tracformer_of(config)
    questions = mixed_questions(model, count)
    engine = Engine(model, rows=32)

    def at_once() -> None:
        with ThreadPoolExecutor(count) as callers:
            list(callers.map(lambda question: engine.request().fill(**question), questions))

    def one_by_one() -> None:
        for question in questions:
            fill(model, **question)

    try:
        seconds = in_turns(
            rounds, at_once=lambda: timed(at_once), one_by_one=lambda: timed(one_by_one)
        )
    finally:
        engine.close()
    return {
        "seconds": seconds,
        "tokens": sum(int(question["batch"].targets().sum()) for question in questions),
        "requests": count,
    }


def mixed_questions(model: Tracformer, count: int) -> list[dict[str, Any]]:
    """One sequence each, a fifth to all of LONGEST, with one hole somewhere; two in `car` mode to
    one in `ar`, samplers of four kinds.
    """
    draw = torch.Generator().manual_seed(0)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    longest = min(LONGEST, model.config.max_length)
    questions = []
    for seed in range(count):
        length = between(longest // 5, longest)
        hole = min(length, between(LARGEST_HOLE // 5, LARGEST_HOLE))
        start = between(0, length - hole)
        place = torch.arange(length)[None]
        tokens = torch.randint(model.config.vocab_size, (1, length), generator=draw)
        question = {
            "batch": Batch(tokens, (place < start) | (place >= start + hole)),
            "mode": ("car", "car", "ar")[seed % 3],
        }
        questions.append({**question, "sampler": SAMPLERS[seed % len(SAMPLERS)], "seed": seed})
    return questions


__all__ = ["PART", "pieces", "rows"]


def pieces(scale: Scale) -> list[BenchPiece]:
    config = TracformerConfig.preset(
        scale.generation_preset, **{**(scale.shrink or {}), "dropout": 0.0}
    )
    peer = at_equal_parameters("gpt2", config).to_dict()
    shapes = {"config": config.to_dict(), "gpt2": peer}
    rounds = {"tokens": scale.tokens, "rounds": scale.generation_rounds}
    found = [
        BenchPiece(
            f"generation/batch/{batch}",
            cached,
            {**shapes, "batch": batch, **rounds},
            seconds=20 + scale.tokens * batch / 16,
        )
        for batch in scale.batches
    ]
    arguments: dict[str, Any] = {"config": config.to_dict(), "kinds": KINDS, **rounds}
    found.append(BenchPiece("generation/weights", lean, {**arguments, "batch": 1}, seconds=30))
    arguments = {
        "config": config.to_dict(),
        "count": scale.requests,
        "rounds": max(1, scale.generation_rounds // 2),
    }
    found.append(BenchPiece("generation/engine", together, arguments, seconds=60))
    found.append(
        BenchPiece("generation/cache", cache, {"config": config.to_dict(), **rounds}, seconds=25)
    )
    found.append(
        BenchPiece(
            "generation/hole",
            hole,
            {"config": config.to_dict(), "rounds": scale.generation_rounds},
            seconds=60,
        )
    )
    for system in ("tracformer", "gpt2"):
        for batch in scale.batches:
            arguments = {**shapes, "system": system, "batch": batch, "tokens": 4}
            found.append(
                BenchPiece(f"generation/memory/{batch}/{system}", memory, arguments, seconds=12)
            )
    return found


# ---- measured


def cached(
    config: dict[str, Any], gpt2: dict[str, Any], batch: int, tokens: int, rounds: int
) -> Figures:
    """Seconds a step, `batch` tokens each, of a Tracformer in `car` and `ar` mode and of
    transformers' GPT-2 with its own cache.
    """
    ours, theirs = tracformer_of(config), gpt2_of(gpt2)
    start = ours.config.max_length // 2
    seconds = in_turns(
        rounds,
        car=lambda: step_seconds(ours, batch, start, tokens),
        ar=lambda: step_seconds(ours, batch, start, tokens, "ar"),
        gpt2=lambda: gpt2_step_seconds(theirs, batch, start, tokens),
    )
    return {
        "seconds": seconds,
        "weight_bytes": weight_bytes(ours),
        "gpt2_weight_bytes": weight_bytes(theirs),
        "parameters": sum(p.numel() for p in ours.parameters()),
        "gpt2_parameters": sum(p.numel() for p in theirs.parameters()),
    }


def lean(
    config: dict[str, Any], kinds: tuple[str, ...], batch: int, tokens: int, rounds: int
) -> Figures:
    """Seconds a step with weights held in each of the ways, and the bytes that a
    step then reads.
    """
    models: dict[str, Any] = {kind: tracformer_of(config) for kind in kinds}
    for kind, model in models.items():
        model.lean(kind)
    start = config["max_length"] // 2
    seconds = in_turns(
        rounds,
        **{
            kind: partial(step_seconds, model, batch, start, tokens)
            for kind, model in models.items()
        },
    )
    return {
        "seconds": seconds,
        "bytes": {kind: bytes_read(model) for kind, model in models.items()},
        "batch": batch,
    }


def cache(config: dict[str, Any], tokens: int, rounds: int) -> Figures:
    """What the cache saves, and whether a token late in the text costs more than an early one."""
    model = tracformer_of(config)
    T = model.config.max_length
    return {
        "seconds": in_turns(
            rounds,
            near=lambda: step_seconds(model, 1, T // 10, tokens),
            far=lambda: step_seconds(model, 1, T - tokens - 2, tokens),
            uncached=lambda: whole_pass_seconds(model, T // 2),
        ),
        "length": T,
    }


def hole(config: dict[str, Any], rounds: int) -> Figures:
    """Seconds to fill the middle half of 128 tokens, in `car` mode and by MDLM of about the same
    size with as many steps as targets.
    """
    from tracformer.baselines.mdlm import MDLM, MDLMConfig
    from tracformer.generation.decode import fill
    from tracformer.generation.orders import Ancestral
    from tracformer.generation.samplers import Sampler

    model, greedy = tracformer_of(config), Sampler(temperature=0.0)
    shape = model.config
    like: dict[str, Any] = {
        key: getattr(shape, key) for key in ("vocab_size", "max_length", "n_head", "d_model")
    }
    layers = [MDLM(MDLMConfig(n_layer=n, **like)).num_parameters() for n in (1, 2)]
    wanted = max(1, round(1 + (model.num_parameters() - layers[0]) / (layers[1] - layers[0])))
    mdlm = MDLM(MDLMConfig(n_layer=wanted, **like)).eval()
    length = min(128, shape.max_length)
    text = torch.randint(shape.vocab_size, (1, length))
    context = torch.ones(1, length, dtype=torch.bool)
    context[:, length // 4 : 3 * length // 4] = False
    seconds = in_turns(
        rounds,
        car=lambda: timed(lambda: fill(model, Batch(text, context), sampler=greedy)),
        mdlm=lambda: timed(
            lambda: fill(
                mdlm,
                Batch(text, context),
                "diffusion",
                order=Ancestral(length // 2),
                sampler=greedy,
            )
        ),
    )
    return {
        "seconds": seconds,
        "targets": length // 2,
        "parameters": model.num_parameters(),
        "mdlm_parameters": mdlm.num_parameters(),
    }


def memory(
    config: dict[str, Any], gpt2: dict[str, Any], system: str, batch: int, tokens: int
) -> Figures:
    """Growth of a fresh process that loads and generates, in bytes: weights, caches and scratch."""
    with torch.device("meta"):
        build("gpt2", gpt2, "")  # everything is imported before memory is watched
    grown = watch_growth()
    model = tracformer_of(config) if system == "tracformer" else gpt2_of(gpt2)
    start = config["max_length"] // 2
    if isinstance(model, Tracformer):
        step_seconds(model, batch, start, tokens)
    else:
        gpt2_step_seconds(model, batch, start, tokens)
    return {"peak_bytes": grown(), "weight_bytes": weight_bytes(model)}


def gpt2_of(config: dict[str, Any]) -> torch.nn.Module:
    """GPT-2 as `transformers` ships it, head and cache included."""
    import transformers

    with torch.device("meta"):
        peer = build("gpt2", config, "")
    assert isinstance(peer, GPT2)
    network: torch.nn.Module = transformers.GPT2LMHeadModel(peer.network.config).eval()
    return network


def weight_bytes(model: torch.nn.Module) -> int:
    """What a step must read: every weight once; the table of tokens is the head."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def step_seconds(
    model: Tracformer, batch: int, start: int, tokens: int, mode: str = "car"
) -> float:
    """Seconds a step from position `start` on; the text before is given, that after is open (car)
    or absent. The first is not counted.
    """
    T = model.config.max_length
    text = torch.randint(model.config.vocab_size, (batch, T))
    context = torch.arange(T).expand(batch, -1) < start
    cache = model.cache(Batch(text, context), mode)
    assert cache is not None
    rows = torch.arange(batch)
    begun = 0.0
    for t in range(start, start + tokens + 1):
        if t == start + 1:
            begun = time.perf_counter()
        at = torch.full((batch,), t)
        cache.reveal(rows, at, cache.logits(rows, at).argmax(1))
    return (time.perf_counter() - begun) / tokens


def whole_pass_seconds(model: Tracformer, start: int) -> float:
    """Seconds of one token without the cache."""
    T = model.config.max_length
    text, position = torch.randint(model.config.vocab_size, (1, T)), torch.arange(T)[None] == start
    with torch.no_grad():
        return timed(
            lambda: model.logits_at(Batch(text, torch.arange(T)[None] < start), "car", position)
        )


@torch.no_grad()
def gpt2_step_seconds(model: torch.nn.Module, batch: int, start: int, tokens: int) -> float:
    """The same loop with GPT-2 and its cache."""
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr,assignment]
    out = model(torch.randint(vocabulary, (batch, start)), use_cache=True, logits_to_keep=1)
    begun = 0.0
    for i in range(tokens + 1):
        if i == 1:
            begun = time.perf_counter()
        last = out.logits[:, -1].argmax(1, keepdim=True)
        out = model(last, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
    return (time.perf_counter() - begun) / tokens


PART = "generation"
OF_BANDWIDTH, FASTER_THAN_GPT2 = 0.60, {1: 2.0, 16: 1.5}  # the targets, at the paper's size
INT8_FASTER = 1.7


def rows(found: Measured) -> list[BenchRow]:
    return [
        *_speed_rows(found),
        *_weights_rows(found),
        *_engine_rows(found),
        *_cache_rows(found),
        *_hole_rows(found),
        *_memory_rows(found),
    ]


def _speed_rows(found: Measured) -> list[BenchRow]:
    lines = []
    limit = read_bandwidth(found)
    for name, figures in found.under("generation/batch/").items():
        batch, seconds = int(name), figures["seconds"]
        paper = figures["parameters"] > 100e6  # the targets are for the paper's size
        for system in ("car", "ar"):
            what, setting = (
                f"cached generation, Tracformer {system}",
                f"batch {batch}, {figures['parameters'] / 1e6:.1f}M",
            )
            speed, aimed = batch / seconds[system], paper and system == "car"
            if limit is not None and batch == 1:
                share, target = (
                    figures["weight_bytes"] / seconds[system] / limit,
                    OF_BANDWIDTH if aimed else None,
                )
                lines.append(
                    BenchRow(
                        PART,
                        what,
                        setting,
                        speed,
                        "tokens/s",
                        share,
                        "of what the read bandwidth allows",
                        target,
                    )
                )
            target = FASTER_THAN_GPT2.get(batch) if aimed else None
            lines.append(
                BenchRow(
                    PART,
                    what,
                    setting,
                    speed,
                    "tokens/s",
                    seconds["gpt2"] / seconds[system],
                    "times GPT-2",
                    target,
                )
            )
        what, setting = (
            "cached generation, GPT-2 of transformers",
            f"batch {batch}, {figures['gpt2_parameters'] / 1e6:.1f}M",
        )
        share = (
            None
            if limit is None or batch != 1
            else figures["gpt2_weight_bytes"] / seconds["gpt2"] / limit
        )
        of = "" if share is None else "of what the read bandwidth allows"
        lines.append(BenchRow(PART, what, setting, batch / seconds["gpt2"], "tokens/s", share, of))
    return lines


def _weights_rows(found: Measured) -> list[BenchRow]:
    figures = found.get("generation/weights")
    if figures is None:
        return []
    limit, seconds = read_bandwidth(found), figures["seconds"]
    lines = []
    for kind, each in seconds.items():
        what, setting, speed = (
            f"cached generation, weights as {kind}",
            f"batch {figures['batch']}",
            figures["batch"] / each,
        )
        if limit is not None:
            lines.append(
                BenchRow(
                    PART,
                    what,
                    setting,
                    speed,
                    "tokens/s",
                    figures["bytes"][kind] / each / limit,
                    "of what the read bandwidth allows",
                )
            )
        if kind != "float32":
            target = INT8_FASTER if kind == "int8" and figures["bytes"]["float32"] > 400e6 else None
            lines.append(
                BenchRow(
                    PART,
                    what,
                    setting,
                    speed,
                    "tokens/s",
                    seconds["float32"] / each,
                    "times float32",
                    target,
                )
            )
    return lines


def _engine_rows(found: Measured) -> list[BenchRow]:
    figures = found.get("generation/engine")
    if figures is None:
        return []
    at_once, one_by_one = figures["seconds"]["at_once"], figures["seconds"]["one_by_one"]
    what, setting = (
        f"{figures['requests']} requests at once",
        f"{figures['tokens']} tokens in all, everything mixed",
    )
    return [
        BenchRow(
            PART,
            what,
            setting,
            figures["tokens"] / at_once,
            "tokens/s",
            one_by_one / at_once,
            "times one after the other",
        )
    ]


def _cache_rows(found: Measured) -> list[BenchRow]:
    figures = found.get("generation/cache")
    if figures is None:
        return []
    near, far, uncached = (figures["seconds"][name] for name in ("near", "far", "uncached"))
    setting = f"batch 1, T={figures['length']}"
    return [
        BenchRow(
            PART,
            "without the cache",
            setting,
            1e3 * uncached,
            "ms/token",
            uncached / near,
            "times as long",
        ),
        BenchRow(
            PART,
            "a token late in the text",
            setting,
            1e3 * far,
            "ms/token",
            far / near,
            "times as long as an early one",
        ),
    ]


def _hole_rows(found: Measured) -> list[BenchRow]:
    figures = found.get("generation/hole")
    if figures is None:
        return []
    car, mdlm = figures["seconds"]["car"], figures["seconds"]["mdlm"]
    setting = (
        f"{figures['targets']} of {2 * figures['targets']} tokens, {figures['targets']} steps, "
        f"{figures['mdlm_parameters'] / 1e6:.0f}M"
    )
    return [
        BenchRow(
            PART, "a hole, MDLM", setting, mdlm, "s", mdlm / car, "times as long as cached CAR"
        )
    ]


def _memory_rows(found: Measured) -> list[BenchRow]:
    return [
        BenchRow(
            PART,
            f"peak memory, {name.split('/')[1]}",
            f"batch {name.split('/')[0]}",
            figures["peak_bytes"] / 2**20,
            "MiB",
            figures["peak_bytes"] / figures["weight_bytes"],
            "times its float32 weights",
        )
        for name, figures in found.under("generation/memory/").items()
    ]
