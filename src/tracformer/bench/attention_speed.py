"""Attention: time, growth and memory, against other implementations.

What the attentions are compared with: PyTorch's own attention under dense masks, dense causal
attention, and `blocked` compiled.

Attention alone, forward and backward: all encoder layers, the decoder's strides, growth in T, peak
memory, against dense versions.

One sequence. The encoder is read forwards; the decoder reads prefix and suffix, every position a
query. A dense layer costs the same whatever its mask, so one is timed and stands for each of the
log2(T) layers.

What the attention part found, line by line.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer import geometry
from tracformer.attention import Attention, Layout, build_attention
from tracformer.attention import reference as masks
from tracformer.attention.layout import mirrored
from tracformer.bench.pieces import (
    BenchPiece,
    BenchRow,
    Figures,
    Measured,
    Scale,
    exponent,
    least_time,
    over,
    watch_growth,
)
from tracformer.devices import keep_freed_memory

NAMES = ("dense mask", "causal", "compiled")


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """All (B, T, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


class DenseMasks:
    """What one writes without this package: the same key sets as boolean masks in
    PyTorch's attention.
    """

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        mask = masks.prefix_encoder_mask(layout.length, offsets).to(q.device)
        return attend(q, k, v, mask)  # rows are in reading order: one mask serves both readings

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        B, T = layout.batch, layout.length
        queries = (
            q.new_zeros(B * T, *q.shape[1:]).index_copy(0, layout.rows, q).unflatten(0, (B, T))
        )
        mask = masks.prefix_decoder_mask(T, stride).to(q.device)
        if layout.readings == 2:
            k, v = (torch.cat((x[:B], mirrored(x[B:], layout.mirror)), dim=1) for x in (k, v))
            mask = torch.cat((mask, masks.suffix_decoder_mask(T, stride).to(q.device)), dim=1)
        return attend(queries, k, v, mask).flatten(0, 1)[layout.rows]


class Causal:
    """Dense causal attention over as many rows: not the same answer, but the same service to a
    left-to-right model.
    """

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        return attend(q, k, v, None, causal=True)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        """Over the forward reading's keys alone, every position a query."""
        B, T = layout.batch, layout.length
        return attend(q.unflatten(0, (B, T)), k[:B], v[:B], None, causal=True).flatten(0, 1)


class Compiled:
    """`blocked` through torch.compile, each layer by itself."""

    def __init__(self) -> None:
        self.blocked = build_attention("blocked")
        self.made: dict[Any, Callable[..., Tensor]] = {}

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        return self._made(("encode", offsets, layout.length), self.blocked.encode)(
            q, k, v, offsets, layout
        )

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        layout.query_slots  # noqa: B018  computed once, outside
        return self._made(("decode", stride, layout.length), self.blocked.decode)(
            q, k, v, stride, layout
        )

    def _made(self, key: Any, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if key not in self.made:
            self.made[key] = torch.compile(function, dynamic=False)
        return self.made[key]


def attention_of(name: str) -> Attention:
    """A rival or an implementation of ours, by name."""
    kinds: dict[str, Callable[[], Attention]] = {
        "dense mask": DenseMasks,
        "causal": Causal,
        "compiled": Compiled,
    }
    return kinds[name]() if name in kinds else build_attention(name)


__all__ = ["PART", "pieces", "rows"]


def pieces(scale: Scale) -> list[BenchPiece]:
    shape = {
        "heads": scale.heads,
        "head_size": scale.head_size,
        "device": scale.device,
        "dtype": scale.dtype,
    }
    rounds = {"n_max": scale.n_max, "rounds": scale.rounds}
    ours = ("triton", "blocked") if scale.device.startswith("cuda") else ("native", "blocked")
    found = []
    for T in scale.lengths:
        dense = _dense_rivals(T, scale)
        arguments = {"length": T, "ours": ours, "dense": dense, **shape, **rounds}
        found.append(
            BenchPiece(
                f"attention/encoder/{T}",
                encoder,
                arguments,
                seconds=4 + T / 700 + _dense_seconds(T, dense),
            )
        )
    for T in scale.decoder_lengths:
        dense = tuple(
            name
            for name in _dense_rivals(T, scale)
            if name == "causal" or T <= scale.masks_up_to // 2
        )
        arguments = {"length": T, "ours": ours, "dense": dense, **shape, "rounds": scale.rounds}
        found.append(
            BenchPiece(
                f"attention/decoder/{T}",
                decoder,
                arguments,
                seconds=5 + 40 * (T / 8192) ** 2 + _dense_seconds(T, dense),
            )
        )
    for T in scale.compiled_lengths:
        found.append(
            BenchPiece(
                f"attention/compiled/{T}", compiled, {"length": T, **shape, **rounds}, seconds=120
            )
        )
    if not scale.device.startswith("cuda"):
        for T in scale.memory_lengths:
            for kind in (
                "causal",
                *(f"{side} {name}" for side in ("encoder", "decoder") for name in ours),
            ):
                arguments = {
                    "kind": kind,
                    "length": T,
                    "heads": scale.heads,
                    "head_size": scale.head_size,
                    "n_max": scale.n_max,
                }
                found.append(
                    BenchPiece(
                        f"attention/memory/{T}/{kind}",
                        memory,
                        arguments,
                        seconds=3 + 10 * (T / 8192) ** 2,
                    )
                )
    return found


def _dense_rivals(T: int, scale: Scale) -> tuple[str, ...]:
    masked = ("dense mask",) if scale.device.startswith("cuda") else ("dense mask", "reference")
    return (
        *(masked if T <= scale.masks_up_to else ()),
        *(("causal",) if T <= scale.causal_up_to else ()),
    )


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
        times[name].append(
            least_time(
                forward_backward(encode_with(attentions[name], layers[-1], layout), inputs),
                rounds,
                on,
            )
        )
    return {"layers": len(layers), "seconds": times}


def decoder(
    length: int,
    ours: tuple[str, ...],
    dense: tuple[str, ...],
    heads: int,
    head_size: int,
    rounds: int,
    device: str,
    dtype: str,
) -> Figures:
    """Seconds of each stride 2, 4, ..., 2^log2(T) for our implementations; of one
    layer for dense ones.
    """
    keep_freed_memory()
    on, layout = torch.device(device), whole_layout(length, 2, device)
    (queries,) = heads_of(1, length, heads, head_size, 1, device, dtype)
    inputs = [
        queries.detach()[0].requires_grad_(),
        *heads_of(2, length, heads, head_size, 2, device, dtype),
    ]
    attentions = {name: attention_of(name) for name in (*ours, *dense)}
    strides = [2**layer for layer in range(1, layers_of(length) + 1)]
    times: dict[str, list[float]] = {name: [] for name in attentions}
    for stride in strides:
        for name in ours:
            times[name].append(
                least_time(
                    forward_backward(decode_with(attentions[name], stride, layout), inputs),
                    rounds,
                    on,
                )
            )
    for name in dense:
        times[name].append(
            least_time(
                forward_backward(decode_with(attentions[name], 2, layout), inputs), rounds, on
            )
        )
    return {"strides": strides, "seconds": times}


def compiled(
    length: int, heads: int, head_size: int, n_max: int, rounds: int, device: str, dtype: str
) -> Figures:
    """Seconds of `blocked` as it is and through torch.compile: the widest encoder layer, and the
    decoder's finest stride.
    """
    keep_freed_memory()
    on = torch.device(device)
    plain, made = attention_of("blocked"), attention_of("compiled")
    inputs = heads_of(1, length, heads, head_size, 3, device, dtype)
    offsets = geometry.encoder_offsets(layers_of(length), n_max)
    one, two = whole_layout(length, 1, device), whole_layout(length, 2, device)
    rows = [
        inputs[0].detach()[0].requires_grad_(),
        *heads_of(2, length, heads, head_size, 2, device, dtype),
    ]
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
    """Growth of a fresh process over one forward and backward, in bytes, inputs not counted: the
    widest encoder layer, stride 2.
    """

    def ready(T: int) -> Callable[[], object]:
        q, k, v = heads_of(1, T, heads, head_size, 3)
        if kind == "causal":
            return forward_backward(
                encode_with(attention_of(kind), (), whole_layout(T, 1)), [q, k, v]
            )
        side, name = kind.split(" ", 1)
        if side == "encoder":
            offsets = geometry.encoder_offsets(layers_of(T), n_max)
            return forward_backward(
                encode_with(attention_of(name), offsets, whole_layout(T, 1)), [q, k, v]
            )
        rows = [q.detach()[0].requires_grad_(), *heads_of(2, T, heads, head_size, 2)]
        return forward_backward(decode_with(attention_of(name), 2, whole_layout(T, 2)), rows)

    ready(64)()  # code and threads are there
    run = ready(length)
    grown = watch_growth()
    run()
    # the result and the gradients of the inputs
    unavoidable = (6 if kind.startswith("decoder") else 4) * length * heads * head_size * 4
    return {"bytes": grown(), "unavoidable": unavoidable}


def forward_backward(
    attention: Callable[..., Tensor], inputs: list[Tensor]
) -> Callable[[], object]:
    return lambda: torch.autograd.grad(
        (out := attention(*inputs)), inputs, out.detach(), allow_unused=True
    )


def encode_with(
    attention: Attention, offsets: tuple[int, ...], layout: Layout
) -> Callable[..., Tensor]:
    return lambda q, k, v: attention.encode(q, k, v, offsets, layout)


def decode_with(attention: Attention, stride: int, layout: Layout) -> Callable[..., Tensor]:
    return lambda q, k, v: attention.decode(q, k, v, stride, layout)


def heads_of(
    rows: int,
    length: int,
    heads: int,
    head_size: int,
    count: int,
    device: str = "cpu",
    dtype: str = "float32",
) -> list[Tensor]:
    kind: Any = {"device": device, "dtype": getattr(torch, dtype)}
    return [
        torch.randn(rows, length, heads, head_size, requires_grad=True, **kind)
        for _ in range(count)
    ]


def whole_layout(length: int, readings: int, device: str = "cpu") -> Layout:
    """One sequence, every position a query."""
    return Layout(
        torch.tensor([length], device=device), length, readings, torch.arange(length, device=device)
    )


def layers_of(length: int) -> int:
    return max(1, math.ceil(math.log2(length)))


PART = "attention"
OURS = ("native", "blocked", "triton")
FASTER_THAN_MASK, FASTER_THAN_CAUSAL, AT = 30.0, 15.0, 4096  # the targets
LARGEST_EXPONENT = 1.05


def rows(found: Measured) -> list[BenchRow]:
    return [
        *_encoder_rows(found),
        *_decoder_rows(found),
        *_compiled_rows(found),
        *_memory_rows(found),
    ]


def encoder_sums(figures: Figures) -> dict[str, float]:
    """Seconds of all layers, by implementation; a dense layer counts log2(T) times."""
    return _sums(figures["seconds"], figures["layers"])


def decoder_sums(figures: Figures) -> dict[str, float]:
    """The same over the strides."""
    return _sums(figures["seconds"], len(figures["strides"]))


def _sums(seconds: Mapping[str, list[float]], layers: int) -> dict[str, float]:
    return {
        name: sum(times) if name in OURS else layers * times[0] for name, times in seconds.items()
    }


def _encoder_rows(found: Measured) -> list[BenchRow]:
    pieces = {int(T): figures for T, figures in found.under("attention/encoder/").items()}
    lines = []
    for T, figures in pieces.items():
        sums, setting = encoder_sums(figures), f"T={T}, {figures['layers']} layers"
        for name in (name for name in sums if name in OURS):
            targets = (
                {"dense mask": FASTER_THAN_MASK, "causal": FASTER_THAN_CAUSAL}
                if T == AT and name == "native"
                else {}
            )
            rivals = [rival for rival in ("dense mask", "reference", "causal") if rival in sums]
            what = f"encoder attention, {name}"
            for rival in rivals:
                lines.append(
                    BenchRow(
                        PART,
                        what,
                        setting,
                        1e3 * sums[name],
                        "ms",
                        sums[rival] / sums[name],
                        f"times {_told(rival)}",
                        targets.get(rival),
                    )
                )
            if not rivals:
                lines.append(BenchRow(PART, what, setting, 1e3 * sums[name], "ms"))
    if len(pieces) > 1:
        lines += _growth_rows(pieces)
    full = {
        T: encoder_sums(figures) for T, figures in pieces.items() if "causal" in figures["seconds"]
    }
    if full:
        T = max(full)
        ours = next(name for name in OURS if name in full[T])
        lines.append(
            BenchRow(
                PART,
                "full encoder, attention",
                f"T={T}",
                1e3 * full[T]["causal"],
                "ms",
                full[T]["causal"] / full[T][ours],
                f"times the cost of the multi-scope one, {ours}",
            )
        )
    return lines


def _growth_rows(pieces: Mapping[int, Figures]) -> list[BenchRow]:
    """Exponents of time in T: of the layers that every T has, and of all log2(T),
    whose number grows too.
    """
    lines = []
    lengths = sorted(pieces)
    common = min(figures["layers"] for figures in pieces.values())
    setting = f"T={lengths[0]}..{lengths[-1]}"
    for name in (name for name in pieces[lengths[0]]["seconds"] if name in OURS):
        same = exponent(lengths, [sum(pieces[T]["seconds"][name][:common]) for T in lengths])
        every = exponent(lengths, [sum(pieces[T]["seconds"][name]) for T in lengths])
        target = LARGEST_EXPONENT if name == "native" and lengths[-1] >= 32768 else None
        what = f"encoder attention, {name}: growth"
        lines.append(
            BenchRow(
                PART,
                what,
                setting,
                None,
                "",
                same,
                f"exponent in T, layers 1 to {common} summed",
                target,
                at_most=True,
            )
        )
        lines.append(
            BenchRow(
                PART, what, setting, None, "", every, "exponent in T, all log2(T) layers summed"
            )
        )
        single = [
            exponent(lengths, [pieces[T]["seconds"][name][layer] for T in lengths])
            for layer in range(common)
        ]
        told = f"exponent in T, median layer (from {min(single):.2f} to {max(single):.2f})"
        lines.append(BenchRow(PART, what, setting, None, "", sorted(single)[common // 2], told))
    return lines


def _decoder_rows(found: Measured) -> list[BenchRow]:
    lines = []
    pieces = {int(T): figures for T, figures in found.under("attention/decoder/").items()}
    for T, figures in pieces.items():
        strides, seconds = figures["strides"], figures["seconds"]
        for name in (name for name in seconds if name in OURS):
            times = seconds[name]
            causal = seconds["causal"][0] if "causal" in seconds else None
            note = (
                ""
                if causal is None
                else "a stride: "
                + ", ".join(f"{s}: {t / causal:.2f}" for s, t in zip(strides, times, strict=True))
            )
            ratio, of = (
                (None, "") if causal is None else (sum(times) / causal, "of one dense causal layer")
            )
            what, setting = f"decoder attention, {name}", f"T={T}, strides 2 to {strides[-1]}"
            lines.append(
                BenchRow(PART, what, setting, 1e3 * sum(times), "ms", ratio, of, note=note)
            )
            for rival in (rival for rival in ("dense mask", "reference") if rival in seconds):
                ratio = decoder_sums(figures)[rival] / sum(times)
                lines.append(
                    BenchRow(
                        PART, what, setting, 1e3 * sum(times), "ms", ratio, f"times {_told(rival)}"
                    )
                )
    if len(pieces) > 1:
        lengths = sorted(pieces)
        for name in (name for name in pieces[lengths[0]]["seconds"] if name in OURS):
            grown = exponent(lengths, [sum(pieces[T]["seconds"][name]) for T in lengths])
            setting = f"T={lengths[0]}..{lengths[-1]}"
            lines.append(
                BenchRow(
                    PART,
                    f"decoder attention, {name}: growth",
                    setting,
                    None,
                    "",
                    grown,
                    "exponent in T, all strides summed",
                )
            )
    return lines


def _compiled_rows(found: Measured) -> list[BenchRow]:
    return [
        BenchRow(
            PART,
            f"{side} attention, blocked, torch.compile",
            f"T={T}, {'widest layer' if side == 'encoder' else 'stride 2'}",
            1e3 * seconds["compiled"],
            "ms",
            seconds["blocked"] / seconds["compiled"],
            "times blocked",
        )
        for T, figures in found.under("attention/compiled/").items()
        for side, seconds in figures["seconds"].items()
    ]


def _memory_rows(found: Measured) -> list[BenchRow]:
    lines = []
    pieces = found.under("attention/memory/")
    for name, figures in pieces.items():
        T, kind = name.split("/", 1)
        dense = pieces.get(f"{T}/causal")
        ratio = (
            None if dense is None or kind == "causal" else over(figures["bytes"], dense["bytes"])
        )
        note = (
            f"{max(0.0, figures['bytes'] - figures['unavoidable']) / 2**20:.0f} MiB beyond the "
            "result and the gradients"
        )
        of = "" if ratio is None else "of dense causal"
        lines.append(
            BenchRow(
                PART,
                f"peak memory, {kind}",
                f"T={T}, one layer",
                figures["bytes"] / 2**20,
                "MiB",
                ratio,
                of,
                note=note,
            )
        )
    return lines


def _told(rival: str) -> str:
    return {
        "dense mask": "the dense mask in SDPA",
        "causal": "dense causal SDPA",
        "reference": "`reference`",
    }[rival]
