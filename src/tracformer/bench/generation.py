"""Generation with the cache, with random weights: speed does not depend on them. Rivals take turns; the median of a few rounds counts."""

import time
from functools import partial
from typing import Any

import torch

from tracformer.bench import requests
from tracformer.bench.decoding import in_turns, tracformer_of
from tracformer.bench.flops import at_equal_parameters
from tracformer.bench.generation_rows import PART, rows
from tracformer.bench.measure import timed, watch_growth
from tracformer.bench.results import Figures, Piece
from tracformer.bench.scale import Scale
from tracformer.bench.steps import build
from tracformer.model import Tracformer, TracformerConfig
from tracformer.model.lean import KINDS
from tracformer.model.step import bytes_read
from tracformer.peers.gpt2 import GPT2

__all__ = ["PART", "pieces", "rows"]


def pieces(scale: Scale) -> list[Piece]:
    config = TracformerConfig.preset(scale.generation_preset, **{**(scale.shrink or {}), "dropout": 0.0})
    peer = at_equal_parameters("gpt2", config).to_dict()
    shapes = {"config": config.to_dict(), "gpt2": peer}
    rounds = {"tokens": scale.tokens, "rounds": scale.generation_rounds}
    found = [
        Piece(f"generation/batch/{batch}", cached, {**shapes, "batch": batch, **rounds}, seconds=20 + scale.tokens * batch / 16)
        for batch in scale.batches
    ]
    arguments: dict[str, Any] = {"config": config.to_dict(), "kinds": KINDS, **rounds}
    found.append(Piece("generation/weights", lean, {**arguments, "batch": 1}, seconds=30))
    arguments = {"config": config.to_dict(), "count": scale.requests, "rounds": max(1, scale.generation_rounds // 2)}
    found.append(Piece("generation/engine", requests.together, arguments, seconds=60))
    found.append(Piece("generation/cache", cache, {"config": config.to_dict(), **rounds}, seconds=25))
    found.append(Piece("generation/hole", hole, {"config": config.to_dict(), "rounds": scale.generation_rounds}, seconds=60))
    for system in ("tracformer", "gpt2"):
        for batch in scale.batches:
            arguments = {**shapes, "system": system, "batch": batch, "tokens": 4}
            found.append(Piece(f"generation/memory/{batch}/{system}", memory, arguments, seconds=12))
    return found


# ---- measured


def cached(config: dict[str, Any], gpt2: dict[str, Any], batch: int, tokens: int, rounds: int) -> Figures:
    """Seconds a step, `batch` tokens each, of a Tracformer in `car` and `ar` mode and of transformers' GPT-2 with its own cache."""
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


def lean(config: dict[str, Any], kinds: tuple[str, ...], batch: int, tokens: int, rounds: int) -> Figures:
    """Seconds a step with weights held in each of the ways, and the bytes that a step then reads."""
    models: dict[str, Any] = {kind: tracformer_of(config) for kind in kinds}
    for kind, model in models.items():
        model.lean(kind)
    start = config["max_length"] // 2
    seconds = in_turns(rounds, **{kind: partial(step_seconds, model, batch, start, tokens) for kind, model in models.items()})
    return {"seconds": seconds, "bytes": {kind: bytes_read(model) for kind, model in models.items()}, "batch": batch}


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
    """Seconds to fill the middle half of 128 tokens, in `car` mode and by MDLM of about the same size with as many steps as targets."""
    from tracformer.generation.fill import fill
    from tracformer.generation.orders import Ancestral
    from tracformer.generation.samplers import Sampler
    from tracformer.peers.mdlm import MDLM, MDLMConfig

    model, greedy = tracformer_of(config), Sampler(temperature=0.0)
    shape = model.config
    like: dict[str, Any] = {key: getattr(shape, key) for key in ("vocab_size", "max_length", "n_head", "d_model")}
    layers = [MDLM(MDLMConfig(n_layer=n, **like)).num_parameters() for n in (1, 2)]
    wanted = max(1, round(1 + (model.num_parameters() - layers[0]) / (layers[1] - layers[0])))
    mdlm = MDLM(MDLMConfig(n_layer=wanted, **like)).eval()
    length = min(128, shape.max_length)
    text = torch.randint(shape.vocab_size, (1, length))
    context = torch.ones(1, length, dtype=torch.bool)
    context[:, length // 4 : 3 * length // 4] = False
    seconds = in_turns(
        rounds,
        car=lambda: timed(lambda: fill(model, text, context, sampler=greedy)),
        mdlm=lambda: timed(lambda: fill(mdlm, text, context, "diffusion", order=Ancestral(length // 2), sampler=greedy)),
    )
    return {"seconds": seconds, "targets": length // 2, "parameters": model.num_parameters(), "mdlm_parameters": mdlm.num_parameters()}


def memory(config: dict[str, Any], gpt2: dict[str, Any], system: str, batch: int, tokens: int) -> Figures:
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


def step_seconds(model: Tracformer, batch: int, start: int, tokens: int, mode: str = "car") -> float:
    """Seconds a step from position `start` on; the text before is given, that after is open (car) or absent. The first is not counted."""
    T = model.config.max_length
    text = torch.randint(model.config.vocab_size, (batch, T))
    context = torch.arange(T).expand(batch, -1) < start
    cache = model.cache(text, context, mode)
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
        return timed(lambda: model.logits_at(text, torch.arange(T)[None] < start, "car", None, position))


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
