"""Attention alone, forward and backward: time, growth with the length T, peak memory.

One sequence. The encoder is read forwards; the decoder reads prefix and suffix, with a query at
every position. Our implementations are timed layer by layer. A dense layer costs the same whatever
its mask, so one is timed and counted log2(T) times. The rivals:

    dense mask   the same keys as boolean masks in PyTorch's attention
    reference    this package's definition, with dense masks
    causal       dense causal attention in PyTorch: another answer, but of the same use to a
                 left-to-right model
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer import geometry
from tracformer.attention import Attention, Layout, build_attention
from tracformer.attention import reference as masks
from tracformer.attention.reference import mirrored
from tracformer.bench import (
    BenchRow,
    Figures,
    Measured,
    Measurement,
    Scale,
    growth,
    least_time,
    over,
    watch_growth,
)
from tracformer.devices import keep_freed_memory
from tracformer.files import optional_package, write_atomically

OURS = ("native", "blocked", "triton")
RIVALS = {
    "dense mask": "the dense mask in SDPA",
    "reference": "`reference`",
    "causal": "dense causal SDPA",
}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    """Return PyTorch's attention of (B, T, H, D) tensors."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


class DenseMasks:
    """The same keys as boolean masks in PyTorch's attention."""

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        """Attend in an encoder layer."""
        mask = masks.prefix_encoder_mask(layout.length, offsets).to(q.device)
        return attend(q, k, v, mask)  # rows are in reading order: one mask serves both readings

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        """Attend in a decoder layer."""
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
    """Dense causal attention over as many positions."""

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        """Attend to all positions before."""
        return attend(q, k, v, None, causal=True)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        """Attend to the keys of the forward reading only, with a query at every position."""
        B, T = layout.batch, layout.length
        return attend(q.unflatten(0, (B, T)), k[:B], v[:B], None, causal=True).flatten(0, 1)


def attention_of(name: str) -> Attention:
    """Return a rival or one of our implementations by name."""
    kinds: dict[str, Callable[[], Attention]] = {"dense mask": DenseMasks, "causal": Causal}
    return kinds[name]() if name in kinds else build_attention(name)


# ---- measured


def encoder(
    length: int,
    ours: Sequence[str],
    dense: Sequence[str],
    heads: int,
    head_size: int,
    n_max: int,
    rounds: int,
    device: str,
    dtype: str,
) -> Figures:
    """Measure seconds of each layer for our implementations, of one layer for dense ones."""
    keep_freed_memory()
    on, layout = torch.device(device), whole_layout(length, 1, device)
    inputs = heads_of(1, length, heads, head_size, 3, device, dtype)
    layers = [geometry.encoder_offsets(layer, n_max) for layer in range(1, layers_of(length) + 1)]

    def seconds(name: str, offsets: tuple[int, ...]) -> float:
        run = forward_backward(encode_with(attention_of(name), offsets, layout), inputs)
        return least_time(run, rounds, on)

    times: dict[str, list[float]] = {name: [] for name in ours}
    for offsets in layers:  # implementations in turn: what disturbs one disturbs all
        for name in ours:
            times[name].append(seconds(name, offsets))
    return {
        "layers": len(layers),
        "seconds": {**times, **{name: [seconds(name, layers[-1])] for name in dense}},
    }


def decoder(
    length: int,
    ours: Sequence[str],
    dense: Sequence[str],
    heads: int,
    head_size: int,
    rounds: int,
    device: str,
    dtype: str,
) -> Figures:
    """Measure seconds of each stride for our implementations, of one layer for dense ones."""
    keep_freed_memory()
    on, layout = torch.device(device), whole_layout(length, 2, device)
    (queries,) = heads_of(1, length, heads, head_size, 1, device, dtype)
    keys = heads_of(2, length, heads, head_size, 2, device, dtype)
    inputs = [queries.detach()[0].requires_grad_(), *keys]
    strides = [2**layer for layer in range(1, layers_of(length) + 1)]

    def seconds(name: str, stride: int) -> float:
        run = forward_backward(decode_with(attention_of(name), stride, layout), inputs)
        return least_time(run, rounds, on)

    times: dict[str, list[float]] = {name: [] for name in ours}
    for stride in strides:
        for name in ours:
            times[name].append(seconds(name, stride))
    return {
        "strides": strides,
        "layers": len(strides),
        "seconds": {**times, **{name: [seconds(name, 2)] for name in dense}},
    }


def memory(kind: str, length: int, heads: int, head_size: int, n_max: int) -> Figures:
    """Measure the growth of the process in bytes over one forward and backward, without inputs.

    The layer is the widest of the encoder or the decoder's with stride 2.

    Args:
        kind: "causal", or "encoder" or "decoder" and the name of an implementation.
        length: Sequence length.
        heads: Attention heads.
        head_size: Size of a head.
        n_max: Encoder scopes.
    """
    side, _, name = kind.partition(" ")

    def ready(T: int) -> Callable[[], object]:
        q, k, v = heads_of(1, T, heads, head_size, 3)
        if side == "decoder":
            rows = [q.detach()[0].requires_grad_(), *heads_of(2, T, heads, head_size, 2)]
            return forward_backward(decode_with(attention_of(name), 2, whole_layout(T, 2)), rows)
        offsets = geometry.encoder_offsets(layers_of(T), n_max)
        run = encode_with(attention_of(name or "causal"), offsets, whole_layout(T, 1))
        return forward_backward(run, [q, k, v])

    ready(64)()  # loads code and starts threads
    run = ready(length)
    grown = watch_growth()
    run()
    # the result and the gradients of the inputs
    unavoidable = (6 if side == "decoder" else 4) * length * heads * head_size * 4
    return {"bytes": grown(), "unavoidable": unavoidable}


def forward_backward(
    attention: Callable[..., Tensor], inputs: list[Tensor]
) -> Callable[[], object]:
    """Return a function that runs an attention and its gradients."""
    return lambda: torch.autograd.grad(
        (out := attention(*inputs)), inputs, out.detach(), allow_unused=True
    )


def encode_with(
    attention: Attention, offsets: tuple[int, ...], layout: Layout
) -> Callable[..., Tensor]:
    """Return an encoder layer's attention as a function of queries, keys and values."""
    return lambda q, k, v: attention.encode(q, k, v, offsets, layout)


def decode_with(attention: Attention, stride: int, layout: Layout) -> Callable[..., Tensor]:
    """Return a decoder layer's attention as a function of queries, keys and values."""
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
    """Return `count` random tensors (rows, length, heads, head_size) with gradients."""
    kind: Any = {"device": device, "dtype": getattr(torch, dtype)}
    shape = (rows, length, heads, head_size)
    return [torch.randn(shape, requires_grad=True, **kind) for _ in range(count)]


def whole_layout(length: int, readings: int, device: str = "cpu") -> Layout:
    """Return the layout of one sequence with a query at every position."""
    return Layout(
        torch.tensor([length], device=device), length, readings, torch.arange(length, device=device)
    )


def layers_of(length: int) -> int:
    """Return log2(T), rounded up: the number of layers that a length needs."""
    return max(1, math.ceil(math.log2(length)))


# ---- cases


def _cases(scale: Scale, T: int, masks_up_to: int) -> dict[str, Any]:
    gpu = scale.device.startswith("cuda")
    masked = ("dense mask",) if gpu else ("dense mask", "reference")
    causal = ("causal",) if T <= scale.causal_up_to else ()
    return {
        "length": T,
        "ours": ("triton", "blocked") if gpu else ("native", "blocked"),
        "dense": (*(masked if T <= masks_up_to else ()), *causal),
        "heads": scale.heads,
        "head_size": scale.head_size,
        "rounds": scale.rounds,
        "device": scale.device,
        "dtype": scale.dtype,
    }


def _encoder_cases(scale: Scale) -> dict[str, dict[str, Any]]:
    return {
        str(T): {**_cases(scale, T, scale.masks_up_to), "n_max": scale.n_max} for T in scale.lengths
    }


def _decoder_cases(scale: Scale) -> dict[str, dict[str, Any]]:
    return {str(T): _cases(scale, T, scale.masks_up_to // 2) for T in scale.decoder_lengths}


def _memory_cases(scale: Scale) -> dict[str, dict[str, Any]]:
    if scale.device.startswith("cuda"):
        return {}
    shape = {"heads": scale.heads, "head_size": scale.head_size, "n_max": scale.n_max}
    kinds = [f"{side} {name}" for side in ("encoder", "decoder") for name in ("native", "blocked")]
    return {
        f"{T}/{kind}": {"kind": kind, "length": T, **shape}
        for T in scale.memory_lengths
        for kind in ("causal", *kinds)
    }


# ---- rows


def all_layers(figures: Figures) -> dict[str, float]:
    """Return the seconds of all layers or strides together, by implementation."""
    return {
        name: sum(times) if name in OURS else figures["layers"] * times[0]
        for name, times in figures["seconds"].items()
    }


def _encoder_rows(found: Measured) -> list[BenchRow]:
    pieces = found.by_length("attention/encoder")
    rows = []
    for T, figures in pieces.items():
        rows += _rival_rows("encoder", f"T={T}, {figures['layers']} layers", all_layers(figures))
    rows += _growth_rows("encoder", pieces)
    if longest := max((T for T, each in pieces.items() if "causal" in each["seconds"]), default=0):
        seconds = all_layers(pieces[longest])
        ours = next(name for name in OURS if name in seconds)
        ratio, of = seconds["causal"] / seconds[ours], f"times the multi-scope encoder, {ours}"
        rows.append(
            _milliseconds("full encoder, attention", f"T={longest}", seconds["causal"], ratio, of)
        )
    return rows


def _decoder_rows(found: Measured) -> list[BenchRow]:
    pieces = found.by_length("attention/decoder")
    rows = []
    for T, figures in pieces.items():
        setting, seconds = f"T={T}, strides 2 to {figures['strides'][-1]}", all_layers(figures)
        if "causal" in seconds:
            layer = figures["seconds"]["causal"][0]
            for name in (name for name in seconds if name in OURS):
                ratio, of = seconds[name] / layer, "of one dense causal layer"
                rows.append(
                    _milliseconds(f"decoder attention, {name}", setting, seconds[name], ratio, of)
                )
        others = {name: value for name, value in seconds.items() if name != "causal"}
        if "causal" not in seconds or len(others) > len([name for name in others if name in OURS]):
            rows += _rival_rows("decoder", setting, others)
    return rows + _growth_rows("decoder", pieces)


def _rival_rows(side: str, setting: str, seconds: Mapping[str, float]) -> list[BenchRow]:
    """Return our time with the ratio to each rival, or alone if there is none."""
    rivals = [name for name in RIVALS if name in seconds]
    rows = []
    for name in (name for name in seconds if name in OURS):
        what = f"{side} attention, {name}"
        for rival in rivals:
            ratio, of = seconds[rival] / seconds[name], f"times {RIVALS[rival]}"
            rows.append(_milliseconds(what, setting, seconds[name], ratio, of))
        if not rivals:
            rows.append(_milliseconds(what, setting, seconds[name]))
    return rows


def _growth_rows(side: str, pieces: Mapping[int, Figures]) -> list[BenchRow]:
    """Return exponents of time in T, of the layers that every T has and of all log2(T) layers."""
    if len(pieces) < 2:
        return []
    common = min(figures["layers"] for figures in pieces.values())
    setting = f"T={min(pieces)}..{max(pieces)}"
    rows = []
    for name in (name for name in pieces[min(pieces)]["seconds"] if name in OURS):
        times = {T: figures["seconds"][name] for T, figures in pieces.items()}
        for of, layers in (
            (f"exponent in T, layers 1 to {common}", common),
            ("exponent in T, all log2(T) layers", None),
        ):
            ratio = growth({T: sum(each[:layers]) for T, each in times.items()})
            what = f"{side} attention, {name}: growth"
            rows.append(BenchRow(what, setting, ratio=ratio, of=of))
    return rows


def _memory_rows(found: Measured) -> list[BenchRow]:
    pieces = found.cases("attention/memory")
    rows = []
    for case, figures in pieces.items():
        T, kind = case.split("/", 1)
        dense = pieces.get(f"{T}/causal", {}).get("bytes")
        ratio = None if kind == "causal" else over(figures["bytes"], dense)
        extra = max(0.0, figures["bytes"] - figures["unavoidable"]) / 2**20
        rows.append(
            BenchRow(
                f"peak memory, {kind}",
                f"T={T}, one layer",
                figures["bytes"] / 2**20,
                "MiB",
                ratio,
                "" if ratio is None else "of dense causal",
                f"{extra:.0f} MiB more than the result and the gradients",
            )
        )
    return rows


def _milliseconds(
    what: str, setting: str, seconds: float, ratio: float | None = None, of: str = ""
) -> BenchRow:
    return BenchRow(what, setting, 1e3 * seconds, "ms", ratio, of)


MEASUREMENTS = (
    Measurement("attention/encoder", encoder, _encoder_cases, _encoder_rows),
    Measurement("attention/decoder", decoder, _decoder_cases, _decoder_rows),
    Measurement("attention/memory", memory, _memory_cases, _memory_rows),
)


FORMATS = (".png", ".svg", ".pdf")


def check_format(out: Path) -> None:
    """Raise ValueError unless the file's name ends in a format that can be drawn."""
    if out.suffix not in FORMATS:
        raise ValueError(f"--plot is {out.name!r}; it must end in one of: {', '.join(FORMATS)}")


def draw_growth(pieces: Mapping[str, Figures], out: Path) -> bool:
    """Write the picture; return False if there are no figures for it.

    Args:
        pieces: Figures of the pieces by name.
        out: The file.
    """
    check_format(out)
    by_length = {
        length: all_layers(figures)
        for length, figures in sorted(Measured(pieces).by_length("attention/encoder").items())
    }
    if not by_length:
        return False
    optional_package("matplotlib", "a plot", "plot").use("Agg")
    from matplotlib import pyplot

    shortest = min(by_length)
    unit = min(by_length[shortest].values())
    figure, axes = pyplot.subplots(figsize=(6.0, 4.0), layout="constrained")
    for name in dict.fromkeys(name for seconds in by_length.values() for name in seconds):
        lengths = [length for length in by_length if name in by_length[length]]
        times = [by_length[length][name] / unit for length in lengths]
        axes.plot(lengths, times, marker="o", markersize=3, label=name)
    axes.set(
        xscale="log",
        yscale="log",
        title="encoder attention, all layers",
        xlabel="sequence length T",
        ylabel=f"time over the fastest at T={shortest}",
    )
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda path: figure.savefig(path, dpi=150, format=out.suffix[1:]))
    pyplot.close(figure)
    return True
