"""Training speed at one width and with equal weight products a token: what remains is attention and
everything around it.
"""

from tracformer.bench.pieces import BenchPiece, BenchRow, Measured, Scale
from tracformer.bench.training_speed import step
from tracformer.evaluation.flops import at_equal_work, weight_multiplies
from tracformer.model import TracformerConfig

PART = "equal-work"
# for our width of 768
TARGETS = {(4096, "gpt2"): 1.25, (4096, "bert"): 1.6, (1024, "gpt2"): 1.0, (1024, "bert"): 1.0}


def pieces(scale: Scale) -> list[BenchPiece]:
    """One sequence or few: the dense rivals at this width need much memory.

    Layers follow from the length, and the peers' from ours.
    """
    found = []
    for T, batch in scale.wide:
        tokens = T * batch
        config = TracformerConfig(
            vocab_size=scale.wide_vocab,
            max_length=T,
            n_layer=(T - 1).bit_length(),
            n_head=scale.wide_heads,
            d_model=scale.wide_width,
            n_max=16,
        )
        shapes = {"tracformer": config.to_dict()}
        shapes |= {
            family: at_equal_work(family, config, tokens, tokens // 2).to_dict()
            for family in scale.peers
        }
        about = 3 * weight_multiplies(config, tokens, tokens // 2) / 55e9
        for family, shape in shapes.items():
            arguments = {
                "family": family,
                "config": shape,
                "batch": batch,
                "length": T,
                "rounds": scale.wide_rounds,
            }
            found.append(
                BenchPiece(
                    f"{PART}/{T}/{family}", step, arguments, seconds=8 + about * scale.wide_rounds
                )
            )
    return found


def rows(found: Measured) -> list[BenchRow]:
    lines = []
    for name, figures in found.under(f"{PART}/").items():
        T, family = name.split("/")
        ours = found.get(f"{PART}/{T}/tracformer")
        speed = figures["tokens"] / figures["seconds"]
        work = figures["operations"] / figures["tokens"]
        setting = (
            f"T={T}, {figures['layers']} layers, {work / 1e6:.0f} MFLOP of weight products a token"
        )
        note = f"peak {figures['peak_bytes'] / 2**30:.1f} GiB"
        if family == "tracformer" or ours is None:
            lines.append(
                BenchRow(PART, f"training, {family}", setting, speed, "tokens/s", note=note)
            )
            continue
        share = work / (ours["operations"] / ours["tokens"])
        ratio = ours["tokens"] / ours["seconds"] / speed
        target = TARGETS.get((int(T), family)) if ours["config_width"] == 768 else None
        of = f"times as many tokens/s in Tracformer ({share:.3f} of its weight products)"
        lines.append(
            BenchRow(
                PART,
                f"training, {family}",
                setting,
                speed,
                "tokens/s",
                ratio,
                of,
                target,
                note=note,
            )
        )
    return lines
