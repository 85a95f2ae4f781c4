"""Attention alone, forward and backward: all encoder layers, the decoder's strides, growth in T, peak memory, against dense versions.

One sequence. The encoder is read forwards; the decoder reads prefix and suffix, every position a query. A dense layer costs the same
whatever its mask, so one is timed and stands for each of the log2(T) layers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tracformer import geometry
from tracformer.attention import Attention, Layout
from tracformer.bench.attention_rows import PART, rows
from tracformer.bench.measure import least_time, watch_growth
from tracformer.bench.results import Figures, Piece
from tracformer.bench.rivals import attention_of
from tracformer.bench.scale import Scale
from tracformer.runtime import keep_freed_memory

__all__ = ["PART", "pieces", "rows"]


def pieces(scale: Scale) -> list[Piece]:
    shape = {"heads": scale.heads, "head_size": scale.head_size, "device": scale.device, "dtype": scale.dtype}
    rounds = {"n_max": scale.n_max, "rounds": scale.rounds}
    ours = ("triton", "blocked") if scale.device.startswith("cuda") else ("native", "blocked")
    found = []
    for T in scale.lengths:
        dense = _dense_rivals(T, scale)
        arguments = {"length": T, "ours": ours, "dense": dense, **shape, **rounds}
        found.append(Piece(f"attention/encoder/{T}", encoder, arguments, seconds=4 + T / 700 + _dense_seconds(T, dense)))
    for T in scale.decoder_lengths:
        dense = tuple(name for name in _dense_rivals(T, scale) if name == "causal" or T <= scale.masks_up_to // 2)
        arguments = {"length": T, "ours": ours, "dense": dense, **shape, "rounds": scale.rounds}
        found.append(Piece(f"attention/decoder/{T}", decoder, arguments, seconds=5 + 40 * (T / 8192) ** 2 + _dense_seconds(T, dense)))
    for T in scale.compiled_lengths:
        found.append(Piece(f"attention/compiled/{T}", compiled, {"length": T, **shape, **rounds}, seconds=120))
    if not scale.device.startswith("cuda"):
        for T in scale.memory_lengths:
            for kind in ("causal", *(f"{side} {name}" for side in ("encoder", "decoder") for name in ours)):
                arguments = {"kind": kind, "length": T, "heads": scale.heads, "head_size": scale.head_size, "n_max": scale.n_max}
                found.append(Piece(f"attention/memory/{T}/{kind}", memory, arguments, seconds=3 + 10 * (T / 8192) ** 2))
    return found


def _dense_rivals(T: int, scale: Scale) -> tuple[str, ...]:
    masked = ("dense mask",) if scale.device.startswith("cuda") else ("dense mask", "reference")
    return (*(masked if T <= scale.masks_up_to else ()), *(("causal",) if T <= scale.causal_up_to else ()))


def _dense_seconds(T: int, dense: tuple[str, ...]) -> float:
    return sum((2.0 if name == "causal" else 8.0) * 4 * (T / 4096) ** 2 for name in dense)


# ---- measured


def encoder(
    length: int,
    ours: tuple[str, ...],
    dense: tuple[str, ...],
    heads: int,
    head_size: int,
    n_max: int,
    rounds: int,
    device: str,
    dtype: str,
) -> Figures:
    """Seconds of each layer 1 .. log2(T) for our implementations; of one layer for dense ones."""
    keep_freed_memory()
    on, layout = torch.device(device), whole_layout(length, 1, device)
    inputs = heads_of(1, length, heads, head_size, 3, device, dtype)
    attentions = {name: attention_of(name) for name in (*ours, *dense)}
    layers = [geometry.encoder_offsets(layer, n_max) for layer in range(1, layers_of(length) + 1)]
    times: dict[str, list[float]] = {name: [] for name in attentions}
    for offsets in layers:  # rivals one right after the other: a busy moment hits all alike
        for name in ours:
            run = forward_backward(encode_with(attentions[name], offsets, layout), inputs)
            times[name].append(least_time(run, rounds, on))
    for name in dense:
        times[name].append(least_time(forward_backward(encode_with(attentions[name], layers[-1], layout), inputs), rounds, on))
    return {"layers": len(layers), "seconds": times}


def decoder(
    length: int, ours: tuple[str, ...], dense: tuple[str, ...], heads: int, head_size: int, rounds: int, device: str, dtype: str
) -> Figures:
    """Seconds of each stride 2, 4, ..., 2^log2(T) for our implementations; of one layer for dense ones."""
    keep_freed_memory()
    on, layout = torch.device(device), whole_layout(length, 2, device)
    (queries,) = heads_of(1, length, heads, head_size, 1, device, dtype)
    inputs = [queries.detach()[0].requires_grad_(), *heads_of(2, length, heads, head_size, 2, device, dtype)]
    attentions = {name: attention_of(name) for name in (*ours, *dense)}
    strides = [2**layer for layer in range(1, layers_of(length) + 1)]
    times: dict[str, list[float]] = {name: [] for name in attentions}
    for stride in strides:
        for name in ours:
            times[name].append(least_time(forward_backward(decode_with(attentions[name], stride, layout), inputs), rounds, on))
    for name in dense:
        times[name].append(least_time(forward_backward(decode_with(attentions[name], 2, layout), inputs), rounds, on))
    return {"strides": strides, "seconds": times}


def compiled(length: int, heads: int, head_size: int, n_max: int, rounds: int, device: str, dtype: str) -> Figures:
    """Seconds of `blocked` as it is and through torch.compile: the widest encoder layer, and the decoder's finest stride."""
    keep_freed_memory()
    on = torch.device(device)
    plain, made = attention_of("blocked"), attention_of("compiled")
    inputs = heads_of(1, length, heads, head_size, 3, device, dtype)
    offsets = geometry.encoder_offsets(layers_of(length), n_max)
    one, two = whole_layout(length, 1, device), whole_layout(length, 2, device)
    rows = [inputs[0].detach()[0].requires_grad_(), *heads_of(2, length, heads, head_size, 2, device, dtype)]
    seconds: dict[str, dict[str, float]] = {"encoder": {}, "decoder": {}}
    for name, attention in (("blocked", plain), ("compiled", made)):
        run = forward_backward(encode_with(attention, offsets, one), inputs)
        run()  # compiles
        seconds["encoder"][name] = least_time(run, rounds, on)
        run = forward_backward(decode_with(attention, 2, two), rows)
        run()
        seconds["decoder"][name] = least_time(run, rounds, on)
    return {"seconds": seconds}


def memory(kind: str, length: int, heads: int, head_size: int, n_max: int) -> Figures:
    """Growth of a fresh process over one forward and backward, in bytes, inputs not counted: the widest encoder layer, stride 2."""

    def ready(T: int) -> Callable[[], object]:
        q, k, v = heads_of(1, T, heads, head_size, 3)
        if kind == "causal":
            return forward_backward(encode_with(attention_of(kind), (), whole_layout(T, 1)), [q, k, v])
        side, name = kind.split(" ", 1)
        if side == "encoder":
            offsets = geometry.encoder_offsets(layers_of(T), n_max)
            return forward_backward(encode_with(attention_of(name), offsets, whole_layout(T, 1)), [q, k, v])
        rows = [q.detach()[0].requires_grad_(), *heads_of(2, T, heads, head_size, 2)]
        return forward_backward(decode_with(attention_of(name), 2, whole_layout(T, 2)), rows)

    ready(64)()  # code and threads are there
    run = ready(length)
    grown = watch_growth()
    run()
    unavoidable = (6 if kind.startswith("decoder") else 4) * length * heads * head_size * 4  # the result and the gradients of the inputs
    return {"bytes": grown(), "unavoidable": unavoidable}


def forward_backward(attention: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    return lambda: torch.autograd.grad((out := attention(*inputs)), inputs, out.detach(), allow_unused=True)


def encode_with(attention: Attention, offsets: tuple[int, ...], layout: Layout) -> Callable[..., Tensor]:
    return lambda q, k, v: attention.encode(q, k, v, offsets, layout)


def decode_with(attention: Attention, stride: int, layout: Layout) -> Callable[..., Tensor]:
    return lambda q, k, v: attention.decode(q, k, v, stride, layout)


def heads_of(rows: int, length: int, heads: int, head_size: int, count: int, device: str = "cpu", dtype: str = "float32") -> list[Tensor]:
    kind: Any = {"device": device, "dtype": getattr(torch, dtype)}
    return [torch.randn(rows, length, heads, head_size, requires_grad=True, **kind) for _ in range(count)]


def whole_layout(length: int, readings: int, device: str = "cpu") -> Layout:
    """One sequence, every position a query."""
    return Layout(torch.tensor([length], device=device), length, readings, torch.arange(length, device=device))


def layers_of(length: int) -> int:
    return max(1, math.ceil(math.log2(length)))
