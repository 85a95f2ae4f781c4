"""What the generation part found, line by line."""

from tracformer.bench.machine import read_bandwidth
from tracformer.bench.results import Found, Row

PART = "generation"
OF_BANDWIDTH, FASTER_THAN_GPT2 = 0.60, {1: 2.0, 16: 1.5}  # the targets, at the paper's size
INT8_FASTER = 1.7


def rows(found: Found) -> list[Row]:
    return [*_speed_rows(found), *_weights_rows(found), *_engine_rows(found), *_cache_rows(found), *_hole_rows(found), *_memory_rows(found)]


def _speed_rows(found: Found) -> list[Row]:
    lines = []
    limit = read_bandwidth(found)
    for name, figures in found.under("generation/batch/").items():
        batch, seconds = int(name), figures["seconds"]
        paper = figures["parameters"] > 100e6  # the targets are for the paper's size
        for system in ("car", "ar"):
            what, setting = f"cached generation, Tracformer {system}", f"batch {batch}, {figures['parameters'] / 1e6:.1f}M"
            speed, aimed = batch / seconds[system], paper and system == "car"
            if limit is not None and batch == 1:
                share, target = figures["weight_bytes"] / seconds[system] / limit, OF_BANDWIDTH if aimed else None
                lines.append(Row(PART, what, setting, speed, "tokens/s", share, "of what the read bandwidth allows", target))
            target = FASTER_THAN_GPT2.get(batch) if aimed else None
            lines.append(Row(PART, what, setting, speed, "tokens/s", seconds["gpt2"] / seconds[system], "times GPT-2", target))
        what, setting = "cached generation, GPT-2 of transformers", f"batch {batch}, {figures['gpt2_parameters'] / 1e6:.1f}M"
        share = None if limit is None or batch != 1 else figures["gpt2_weight_bytes"] / seconds["gpt2"] / limit
        of = "" if share is None else "of what the read bandwidth allows"
        lines.append(Row(PART, what, setting, batch / seconds["gpt2"], "tokens/s", share, of))
    return lines


def _weights_rows(found: Found) -> list[Row]:
    figures = found.get("generation/weights")
    if figures is None:
        return []
    limit, seconds = read_bandwidth(found), figures["seconds"]
    lines = []
    for kind, each in seconds.items():
        what, setting, speed = f"cached generation, weights as {kind}", f"batch {figures['batch']}", figures["batch"] / each
        if limit is not None:
            lines.append(
                Row(PART, what, setting, speed, "tokens/s", figures["bytes"][kind] / each / limit, "of what the read bandwidth allows")
            )
        if kind != "float32":
            target = INT8_FASTER if kind == "int8" and figures["bytes"]["float32"] > 400e6 else None
            lines.append(Row(PART, what, setting, speed, "tokens/s", seconds["float32"] / each, "times float32", target))
    return lines


def _engine_rows(found: Found) -> list[Row]:
    figures = found.get("generation/engine")
    if figures is None:
        return []
    at_once, one_by_one = figures["seconds"]["at_once"], figures["seconds"]["one_by_one"]
    what, setting = (
        f"{figures['requests']} requests at once",
        f"{figures['tokens']} tokens in all, everything mixed",
    )
    return [Row(PART, what, setting, figures["tokens"] / at_once, "tokens/s", one_by_one / at_once, "times one after the other")]


def _cache_rows(found: Found) -> list[Row]:
    figures = found.get("generation/cache")
    if figures is None:
        return []
    near, far, uncached = (figures["seconds"][name] for name in ("near", "far", "uncached"))
    setting = f"batch 1, T={figures['length']}"
    return [
        Row(PART, "without the cache", setting, 1e3 * uncached, "ms/token", uncached / near, "times as long"),
        Row(PART, "a token late in the text", setting, 1e3 * far, "ms/token", far / near, "times as long as an early one"),
    ]


def _hole_rows(found: Found) -> list[Row]:
    figures = found.get("generation/hole")
    if figures is None:
        return []
    car, mdlm = figures["seconds"]["car"], figures["seconds"]["mdlm"]
    setting = (
        f"{figures['targets']} of {2 * figures['targets']} tokens, {figures['targets']} steps, {figures['mdlm_parameters'] / 1e6:.0f}M"
    )
    return [Row(PART, "a hole, MDLM", setting, mdlm, "s", mdlm / car, "times as long as cached CAR")]


def _memory_rows(found: Found) -> list[Row]:
    return [
        Row(
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
