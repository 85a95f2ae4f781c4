"""Drawings of docs/concepts.md, from the key positions in tracformer.geometry.

python docs/pictures/concepts.py      writes modes.svg, encoder.svg and decoder.svg
"""

from pathlib import Path

from tracformer import geometry

HERE = Path(__file__).parent
LENGTH, LAYERS, N_MAX = 16, 4, 3
GIVEN, READ, TARGET, LINE, INK, PALE = (
    "#9ecae1",
    "#3182bd",
    "#fdae6b",
    "#bdbdbd",
    "#222222",
    "#f0f0f0",
)
WORDS = ("The", "dog", "was", "hungry", ".", "It", "looked", "for", "some", "food", ".")
TARGETS, ASKED = (3, 6, 8, 9), 6
MODES = {
    "car": "p(looked | all given tokens, all tokens before it)",
    "ac": "p(looked | all given tokens)",
    "ar": "p(looked | all tokens before it)",
}


def svg(width: int, height: int, parts: list[str]) -> str:
    """Return a drawing on white ground, so that it can be read on dark pages too."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="13">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, anchor: str = "middle", color: str = INK) -> str:
    """Return a line of text."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def box(x: float, y: float, w: float, h: float, fill: str, stroke: str = LINE) -> str:
    """Return a rounded box."""
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="4" fill="{fill}" stroke="{stroke}"/>'


def modes() -> str:
    """Return which tokens each mode reads when it predicts one target."""
    parts = [
        box(10, 8, 16, 16, READ),
        text(32, 21, "read", "start"),
        box(90, 8, 16, 16, PALE),
        text(112, 21, "not read", "start"),
        box(200, 8, 16, 16, TARGET),
        text(222, 21, "predicted", "start"),
        text(310, 21, "dashed: not given (a target)", "start"),
    ]
    for row, (mode, formula) in enumerate(MODES.items()):
        y = 44 + row * 72
        parts.append(text(10, y + 12, f"{mode}:  {formula}", "start"))
        for i, word in enumerate(WORDS):
            given = i not in TARGETS
            read = {"car": given or i < ASKED, "ac": given, "ar": i < ASKED}[mode]
            fill = TARGET if i == ASKED else READ if read else PALE
            dashes = "" if given else ' stroke-dasharray="4 3" stroke-width="2"'
            x = 10 + i * 62
            parts.append(box(x, y + 22, 58, 26, fill, INK).replace("/>", f"{dashes}/>"))
            color = "white" if fill == READ else INK
            parts.append(text(x + 29, y + 40, word, color=color))
    return svg(700, 262, parts)


def encoder() -> str:
    """Return the keys of one query in each layer of the prefix encoder, and its scopes."""
    query, parts = 14, []
    parts.append(text(90, 18, "prefix encoder: what the query at position 14 reads", "start"))
    for row, layer in enumerate(range(LAYERS, 0, -1)):
        y = 50 + row * 46
        keys = set(geometry.prefix_encoder_keys(query, geometry.encoder_offsets(layer, N_MAX)))
        first = max(1, query - geometry.scope_size(layer) + 1)
        parts.append(text(10, y + 5, f"layer {layer}", "start"))
        width = (query - first) * 36 + 30
        parts.append(box(75 + first * 36 - 15, y - 16, width, 32, PALE))
        for t in range(1, LENGTH + 1):
            fill = READ if t in keys else "white"
            parts.append(
                f'<circle cx="{75 + t * 36}" cy="{y}" r="9" fill="{fill}" stroke="{INK}"/>'
            )
        parts.append(text(75 + 17 * 36, y + 5, f"{query - first + 1} inputs", "start"))
    for t in range(1, LENGTH + 1):
        parts.append(text(75 + t * 36, 236, str(t)))
    return svg(780, 248, parts)


def decoder() -> str:
    """Return the features that one decoder query reads in each layer, as bars over their inputs."""
    query, parts = 8, []
    parts.append(
        text(90, 18, "decoder: the features that position 8 reads, and what they cover", "start")
    )
    for row, layer in enumerate(range(1, LAYERS + 1)):
        y = 50 + row * 46
        pair = geometry.paired_encoder_layer(layer, LAYERS)
        stride, scope = geometry.decoder_stride(layer, LAYERS), geometry.scope_size(pair)
        parts.append(text(10, y + 5, f"layer {layer}", "start"))
        for key in geometry.prefix_decoder_keys(query, stride):
            first = max(1, key - scope + 1)
            parts.append(box(75 + first * 36 - 16, y - 12, (key - first) * 36 + 32, 24, GIVEN))
            parts.append(f'<circle cx="{75 + key * 36}" cy="{y}" r="7" fill="{READ}"/>')
        for key in geometry.suffix_decoder_keys(query, stride, LENGTH):
            last = min(LENGTH, key + scope - 1)
            parts.append(box(75 + key * 36 - 16, y - 12, (last - key) * 36 + 32, 24, GIVEN))
            parts.append(f'<circle cx="{75 + key * 36}" cy="{y}" r="7" fill="{READ}"/>')
        parts.append(box(75 + query * 36 - 12, y - 12, 24, 24, TARGET, INK))
        parts.append(text(75 + 17 * 36, y + 5, f"encoder layer {pair}", "start"))
    for t in range(1, LENGTH + 1):
        parts.append(text(75 + t * 36, 236, str(t)))
    return svg(800, 248, parts)


DRAWINGS = {"modes.svg": modes, "encoder.svg": encoder, "decoder.svg": decoder}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
