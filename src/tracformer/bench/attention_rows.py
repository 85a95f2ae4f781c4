"""What the attention part found, line by line."""

from collections.abc import Mapping

from tracformer.bench.measure import exponent
from tracformer.bench.results import Figures, Found, Row, over

PART = "attention"
OURS = ("native", "blocked", "triton")
FASTER_THAN_MASK, FASTER_THAN_CAUSAL, AT = 30.0, 15.0, 4096  # the targets
LARGEST_EXPONENT = 1.05


def rows(found: Found) -> list[Row]:
    return [*_encoder_rows(found), *_decoder_rows(found), *_compiled_rows(found), *_memory_rows(found)]


def encoder_sums(figures: Figures) -> dict[str, float]:
    """Seconds of all layers, by implementation; a dense layer counts log2(T) times."""
    return _sums(figures["seconds"], figures["layers"])


def decoder_sums(figures: Figures) -> dict[str, float]:
    """The same over the strides."""
    return _sums(figures["seconds"], len(figures["strides"]))


def _sums(seconds: Mapping[str, list[float]], layers: int) -> dict[str, float]:
    return {name: sum(times) if name in OURS else layers * times[0] for name, times in seconds.items()}


def _encoder_rows(found: Found) -> list[Row]:
    pieces = {int(T): figures for T, figures in found.under("attention/encoder/").items()}
    lines = []
    for T, figures in pieces.items():
        sums, setting = encoder_sums(figures), f"T={T}, {figures['layers']} layers"
        for name in (name for name in sums if name in OURS):
            targets = {"dense mask": FASTER_THAN_MASK, "causal": FASTER_THAN_CAUSAL} if T == AT and name == "native" else {}
            rivals = [rival for rival in ("dense mask", "reference", "causal") if rival in sums]
            what = f"encoder attention, {name}"
            for rival in rivals:
                lines.append(
                    Row(PART, what, setting, 1e3 * sums[name], "ms", sums[rival] / sums[name], f"times {_told(rival)}", targets.get(rival))
                )
            if not rivals:
                lines.append(Row(PART, what, setting, 1e3 * sums[name], "ms"))
    if len(pieces) > 1:
        lines += _growth_rows(pieces)
    full = {T: encoder_sums(figures) for T, figures in pieces.items() if "causal" in figures["seconds"]}
    if full:
        T = max(full)
        ours = next(name for name in OURS if name in full[T])
        lines.append(
            Row(
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


def _growth_rows(pieces: Mapping[int, Figures]) -> list[Row]:
    """Exponents of time in T: of the layers that every T has, and of all log2(T), whose number grows too."""
    lines = []
    lengths = sorted(pieces)
    common = min(figures["layers"] for figures in pieces.values())
    setting = f"T={lengths[0]}..{lengths[-1]}"
    for name in (name for name in pieces[lengths[0]]["seconds"] if name in OURS):
        same = exponent(lengths, [sum(pieces[T]["seconds"][name][:common]) for T in lengths])
        every = exponent(lengths, [sum(pieces[T]["seconds"][name]) for T in lengths])
        target = LARGEST_EXPONENT if name == "native" and lengths[-1] >= 32768 else None
        what = f"encoder attention, {name}: growth"
        lines.append(Row(PART, what, setting, None, "", same, f"exponent in T, layers 1 to {common} summed", target, at_most=True))
        lines.append(Row(PART, what, setting, None, "", every, "exponent in T, all log2(T) layers summed"))
        single = [exponent(lengths, [pieces[T]["seconds"][name][layer] for T in lengths]) for layer in range(common)]
        told = f"exponent in T, median layer (from {min(single):.2f} to {max(single):.2f})"
        lines.append(Row(PART, what, setting, None, "", sorted(single)[common // 2], told))
    return lines


def _decoder_rows(found: Found) -> list[Row]:
    lines = []
    pieces = {int(T): figures for T, figures in found.under("attention/decoder/").items()}
    for T, figures in pieces.items():
        strides, seconds = figures["strides"], figures["seconds"]
        for name in (name for name in seconds if name in OURS):
            times = seconds[name]
            causal = seconds["causal"][0] if "causal" in seconds else None
            note = "" if causal is None else "a stride: " + ", ".join(f"{s}: {t / causal:.2f}" for s, t in zip(strides, times, strict=True))
            ratio, of = (None, "") if causal is None else (sum(times) / causal, "of one dense causal layer")
            what, setting = f"decoder attention, {name}", f"T={T}, strides 2 to {strides[-1]}"
            lines.append(Row(PART, what, setting, 1e3 * sum(times), "ms", ratio, of, note=note))
            for rival in (rival for rival in ("dense mask", "reference") if rival in seconds):
                ratio = decoder_sums(figures)[rival] / sum(times)
                lines.append(Row(PART, what, setting, 1e3 * sum(times), "ms", ratio, f"times {_told(rival)}"))
    if len(pieces) > 1:
        lengths = sorted(pieces)
        for name in (name for name in pieces[lengths[0]]["seconds"] if name in OURS):
            grown = exponent(lengths, [sum(pieces[T]["seconds"][name]) for T in lengths])
            setting = f"T={lengths[0]}..{lengths[-1]}"
            lines.append(Row(PART, f"decoder attention, {name}: growth", setting, None, "", grown, "exponent in T, all strides summed"))
    return lines


def _compiled_rows(found: Found) -> list[Row]:
    return [
        Row(
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


def _memory_rows(found: Found) -> list[Row]:
    lines = []
    pieces = found.under("attention/memory/")
    for name, figures in pieces.items():
        T, kind = name.split("/", 1)
        dense = pieces.get(f"{T}/causal")
        ratio = None if dense is None or kind == "causal" else over(figures["bytes"], dense["bytes"])
        note = f"{max(0.0, figures['bytes'] - figures['unavoidable']) / 2**20:.0f} MiB beyond the result and the gradients"
        of = "" if ratio is None else "of dense causal"
        lines.append(Row(PART, f"peak memory, {kind}", f"T={T}, one layer", figures["bytes"] / 2**20, "MiB", ratio, of, note=note))
    return lines


def _told(rival: str) -> str:
    return {"dense mask": "the dense mask in SDPA", "causal": "dense causal SDPA", "reference": "`reference`"}[rival]
