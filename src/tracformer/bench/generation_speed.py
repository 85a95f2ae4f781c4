"""Generation with the cache, the engine under requests, and memory.

Weights are random, because speed does not depend on them. Rivals take turns, and the median of a
few rounds counts.

    generation/batch     a step with the cache, against GPT-2 of `transformers`
    generation/weights   weights in float32, bfloat16 and int8
    generation/engine    many different requests: through the engine, and one after the other
    generation/cache     what the cache saves; a late token against an early one
    generation/hole      a long blank, against masked diffusion
    generation/memory    growth of a process that loads a model and generates
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from tracformer.baselines.gpt2 import GPT2
from tracformer.bench import (
    BenchRow,
    Figures,
    Measured,
    Measurement,
    Scale,
    read_bandwidth,
    timed,
    watch_growth,
)
from tracformer.bench.training_speed import build
from tracformer.devices import keep_freed_memory
from tracformer.evaluation.flops import at_equal_parameters
from tracformer.generation.decode import fill
from tracformer.generation.engine import Engine
from tracformer.generation.orders import Ancestral
from tracformer.generation.samplers import Sampler
from tracformer.model import Tracformer, TracformerConfig
from tracformer.model.batch import Batch
from tracformer.model.fast_step import KINDS, bytes_read

SAMPLERS = (
    Sampler(),
    Sampler(temperature=0.0),
    Sampler(temperature=0.8, top_p=0.9),
    Sampler(top_k=40),
)
LONGEST, LARGEST_HOLE = 200, 40  # tokens of a request
OF_BANDWIDTH = "of what the read bandwidth allows"


# ---- measured


def cached(
    config: dict[str, Any], gpt2: dict[str, Any], batch: int, tokens: int, rounds: int
) -> Figures:
    """Measure seconds of a step: a Tracformer in modes `car` and `ar`, and GPT-2."""
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


def weights(config: dict[str, Any], batch: int, tokens: int, rounds: int) -> Figures:
    """Measure seconds of a step with weights of each kind, and the bytes that it reads."""
    models: dict[str, Any] = {kind: tracformer_of(config) for kind in KINDS}
    for kind, model in models.items():
        model.lean(kind)
    start = config["max_length"] // 2
    runs = {
        kind: partial(step_seconds, model, batch, start, tokens) for kind, model in models.items()
    }
    return {
        "seconds": in_turns(rounds, **runs),
        "bytes": {kind: bytes_read(model) for kind, model in models.items()},
        "batch": batch,
    }


def engine(config: dict[str, Any], count: int, rounds: int) -> Figures:
    """Measure seconds of many requests through the engine, and one after the other."""
    model = tracformer_of(config)
    questions = mixed_questions(model, count)
    shared = Engine(model, rows=32)

    def at_once() -> None:
        with ThreadPoolExecutor(count) as callers:
            list(callers.map(lambda question: shared.request().fill(**question), questions))

    def one_by_one() -> None:
        for question in questions:
            fill(model, **question)

    try:
        seconds = in_turns(
            rounds, at_once=lambda: timed(at_once), one_by_one=lambda: timed(one_by_one)
        )
    finally:
        shared.close()
    tokens = sum(int(question["batch"].targets().sum()) for question in questions)
    return {"seconds": seconds, "tokens": tokens, "requests": count}


def cache(config: dict[str, Any], tokens: int, rounds: int) -> Figures:
    """Measure seconds of a token early and late in the text, and of one without the cache."""
    model = tracformer_of(config)
    T = model.config.max_length
    seconds = in_turns(
        rounds,
        near=lambda: step_seconds(model, 1, T // 10, tokens),
        far=lambda: step_seconds(model, 1, T - tokens - 2, tokens),
        uncached=lambda: whole_pass_seconds(model, T // 2),
    )
    return {"seconds": seconds, "length": T}


def hole(config: dict[str, Any], rounds: int) -> Figures:
    """Measure seconds to fill the middle half of 128 tokens, in mode `car` and by MDLM.

    MDLM has about the same size and takes one step per token.
    """
    from tracformer.baselines.mdlm import MDLM, MDLMConfig

    model, greedy = tracformer_of(config), Sampler(temperature=0.0)
    shape = model.config
    names = ("vocab_size", "max_length", "n_head", "d_model")
    like: dict[str, Any] = {name: getattr(shape, name) for name in names}
    sizes = [MDLM(MDLMConfig(n_layer=n, **like)).num_parameters() for n in (1, 2)]
    layers = max(1, round(1 + (model.num_parameters() - sizes[0]) / (sizes[1] - sizes[0])))
    mdlm = MDLM(MDLMConfig(n_layer=layers, **like)).eval()
    length = min(128, shape.max_length)
    text = torch.randint(shape.vocab_size, (1, length))
    context = torch.ones(1, length, dtype=torch.bool)
    context[:, length // 4 : 3 * length // 4] = False
    batch, order = Batch(text, context), Ancestral(length // 2)
    seconds = in_turns(
        rounds,
        car=lambda: timed(lambda: fill(model, batch, sampler=greedy)),
        mdlm=lambda: timed(lambda: fill(mdlm, batch, "diffusion", order=order, sampler=greedy)),
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
    """Measure the growth in bytes of a process that loads a model and generates."""
    with torch.device("meta"):
        build("gpt2", gpt2, "")  # imports everything before memory is watched
    grown = watch_growth()
    model = tracformer_of(config) if system == "tracformer" else gpt2_of(gpt2)
    start = config["max_length"] // 2
    if isinstance(model, Tracformer):
        step_seconds(model, batch, start, tokens)
    else:
        gpt2_step_seconds(model, batch, start, tokens)
    return {"peak_bytes": grown(), "weight_bytes": weight_bytes(model)}


def in_turns(rounds: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Return the median seconds of each run; they take turns, so a busy moment affects all."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return {name: statistics.median(each) for name, each in times.items()}


def tracformer_of(config: dict[str, Any]) -> Tracformer:
    """Return a Tracformer with random weights, ready to be timed."""
    from tracformer.native import available

    keep_freed_memory()
    available()  # compiles native code before anything is timed
    torch.manual_seed(0)
    model = build("tracformer", config, "native").eval()
    assert isinstance(model, Tracformer)
    return model


def gpt2_of(config: dict[str, Any]) -> torch.nn.Module:
    """Return the GPT-2 of `transformers`, with its head and its own cache."""
    import transformers

    with torch.device("meta"):
        peer = build("gpt2", config, "")
    assert isinstance(peer, GPT2)
    network: torch.nn.Module = transformers.GPT2LMHeadModel(peer.network.config).eval()
    return network


def mixed_questions(model: Tracformer, count: int) -> list[dict[str, Any]]:
    """Return arguments of `fill` for different requests.

    Each has one sequence of a fifth of LONGEST to all of it, with one hole. Two of three are in
    mode `car`, the others in `ar`; samplers are of four kinds.
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
        questions.append(
            {
                "batch": Batch(tokens, (place < start) | (place >= start + hole)),
                "mode": ("car", "car", "ar")[seed % 3],
                "sampler": SAMPLERS[seed % len(SAMPLERS)],
                "seed": seed,
            }
        )
    return questions


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes that a step must read: every weight once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def step_seconds(
    model: Tracformer, batch: int, start: int, tokens: int, mode: str = "car"
) -> float:
    """Return the seconds of a step from position `start` on; the first step is not counted.

    The text before `start` is given; the text after it is predicted (car) or absent (ar).
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
    """Return the seconds of one token without the cache."""
    T = model.config.max_length
    text, place = torch.randint(model.config.vocab_size, (1, T)), torch.arange(T)[None]
    with torch.no_grad():
        return timed(lambda: model.logits_at(Batch(text, place < start), "car", place == start))


@torch.no_grad()
def gpt2_step_seconds(model: torch.nn.Module, batch: int, start: int, tokens: int) -> float:
    """Return the seconds of a step of GPT-2 with its cache; the first is not counted."""
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr,assignment]
    out = model(torch.randint(vocabulary, (batch, start)), use_cache=True, logits_to_keep=1)
    begun = 0.0
    for i in range(tokens + 1):
        if i == 1:
            begun = time.perf_counter()
        last = out.logits[:, -1].argmax(1, keepdim=True)
        out = model(last, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
    return (time.perf_counter() - begun) / tokens


# ---- cases


def _config(scale: Scale) -> TracformerConfig:
    changes = {**(scale.changes or {}), "dropout": 0.0}
    return TracformerConfig.preset(scale.generation_preset, **changes)


def _configs(scale: Scale) -> dict[str, Any]:
    config = _config(scale)
    return {"config": config.to_dict(), "gpt2": at_equal_parameters("gpt2", config).to_dict()}


def _batch_cases(scale: Scale) -> dict[str, dict[str, Any]]:
    common = {**_configs(scale), "tokens": scale.tokens, "rounds": scale.generation_rounds}
    return {str(batch): {**common, "batch": batch} for batch in scale.batches}


def _memory_cases(scale: Scale) -> dict[str, dict[str, Any]]:
    return {
        f"{batch}/{system}": {**_configs(scale), "system": system, "batch": batch, "tokens": 4}
        for system in ("tracformer", "gpt2")
        for batch in scale.batches
    }


def _one_case(*names: str) -> Callable[[Scale], dict[str, dict[str, Any]]]:
    """Return one case with the configuration and the named arguments."""

    def cases(scale: Scale) -> dict[str, dict[str, Any]]:
        values = {
            "rounds": scale.generation_rounds,
            "tokens": scale.tokens,
            "batch": 1,
            "count": scale.requests,
        }
        arguments = {name: values[name] for name in names}
        return {"all": {"config": _config(scale).to_dict(), **arguments}}

    return cases


# ---- rows


def _batch_rows(found: Measured) -> list[BenchRow]:
    rows = []
    limit = read_bandwidth(found)
    for batch, figures in found.by_length("generation/batch").items():
        seconds = figures["seconds"]
        for system, name, size in (
            ("car", "Tracformer car", ""),
            ("ar", "Tracformer ar", ""),
            ("gpt2", "GPT-2 of transformers", "gpt2_"),
        ):
            what = f"cached generation, {name}"
            setting = f"batch {batch}, {figures[f'{size}parameters'] / 1e6:.1f}M"
            speed = batch / seconds[system]
            if limit is not None and batch == 1:
                share = figures[f"{size}weight_bytes"] / seconds[system] / limit
                rows.append(BenchRow(what, setting, speed, "tokens/s", share, OF_BANDWIDTH))
            if system != "gpt2":
                ratio = seconds["gpt2"] / seconds[system]
                rows.append(BenchRow(what, setting, speed, "tokens/s", ratio, "times GPT-2"))
            elif limit is None or batch != 1:
                rows.append(BenchRow(what, setting, speed, "tokens/s"))
    return rows


def _weights_rows(found: Measured) -> list[BenchRow]:
    figures = found.get("generation/weights/all")
    if figures is None:
        return []
    rows = []
    limit, setting = read_bandwidth(found), f"batch {figures['batch']}"
    for kind, seconds in figures["seconds"].items():
        what, speed = f"cached generation, weights as {kind}", figures["batch"] / seconds
        if limit is not None:
            share = figures["bytes"][kind] / seconds / limit
            rows.append(BenchRow(what, setting, speed, "tokens/s", share, OF_BANDWIDTH))
        if kind != "float32":
            ratio = figures["seconds"]["float32"] / seconds
            rows.append(BenchRow(what, setting, speed, "tokens/s", ratio, "times float32"))
    return rows


def _engine_rows(found: Measured) -> list[BenchRow]:
    figures = found.get("generation/engine/all")
    if figures is None:
        return []
    at_once, one_by_one = (figures["seconds"][name] for name in ("at_once", "one_by_one"))
    what = f"{figures['requests']} requests at once"
    setting = f"{figures['tokens']} tokens in all, everything mixed"
    speed, ratio = figures["tokens"] / at_once, one_by_one / at_once
    return [BenchRow(what, setting, speed, "tokens/s", ratio, "times one after the other")]


def _cache_rows(found: Measured) -> list[BenchRow]:
    figures = found.get("generation/cache/all")
    if figures is None:
        return []
    near, setting = figures["seconds"]["near"], f"batch 1, T={figures['length']}"
    return [
        BenchRow(what, setting, 1e3 * seconds, "ms/token", seconds / near, of)
        for what, seconds, of in (
            ("without the cache", figures["seconds"]["uncached"], "times as long"),
            ("a late token", figures["seconds"]["far"], "times as long as an early one"),
        )
    ]


def _hole_rows(found: Measured) -> list[BenchRow]:
    figures = found.get("generation/hole/all")
    if figures is None:
        return []
    car, mdlm, targets = *(figures["seconds"][each] for each in ("car", "mdlm")), figures["targets"]
    size = figures["mdlm_parameters"] / 1e6
    setting = f"{targets} of {2 * targets} tokens, {targets} steps, {size:.0f}M"
    return [BenchRow("a hole, MDLM", setting, mdlm, "s", mdlm / car, "times cached CAR")]


def _memory_rows(found: Measured) -> list[BenchRow]:
    rows = []
    for case, figures in found.cases("generation/memory").items():
        batch, system = case.split("/")
        size, ratio = figures["peak_bytes"] / 2**20, figures["peak_bytes"] / figures["weight_bytes"]
        what, setting, of = f"peak memory, {system}", f"batch {batch}", "times its float32 weights"
        rows.append(BenchRow(what, setting, size, "MiB", ratio, of))
    return rows


MEASUREMENTS = (
    Measurement("generation/batch", cached, _batch_cases, _batch_rows),
    Measurement(
        "generation/weights", weights, _one_case("batch", "tokens", "rounds"), _weights_rows
    ),
    Measurement("generation/engine", engine, _one_case("count", "rounds"), _engine_rows),
    Measurement("generation/cache", cache, _one_case("tokens", "rounds"), _cache_rows),
    Measurement("generation/hole", hole, _one_case("rounds"), _hole_rows),
    Measurement("generation/memory", memory, _memory_cases, _memory_rows),
)
