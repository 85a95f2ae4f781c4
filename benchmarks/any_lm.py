"""Fill blanks with SmolLM2-135M: what the layout is worth, against rivals on the same holes.

    python benchmarks/any_lm.py data wikipedia.txt stories.txt --out runs/any-lm/data
    python benchmarks/any_lm.py nats --text wikipedia=runs/any-lm/data/test-wikipedia.jsonl \
        --ours runs/any-lm/filled --control runs/any-lm/control --json results/any-lm/smollm2.json
    python benchmarks/any_lm.py fills --windows 50 ...      (the same options)
    python benchmarks/any_lm.py table --json results/any-lm/smollm2.json
    python benchmarks/any_lm.py sentences --ours runs/any-lm/filled

`data` writes train.jsonl, validation.jsonl and test-NAME.jsonl, one article or story per line. Of
each 20 documents in a row one is held out, in turn for validation and for test.

`nats` measures the negative log-likelihood of hidden tokens in windows of 128 tokens: by the base
model and by the control, which was trained left to right on the same rows, from the text before
them; by the new layout, before and after training, from all given tokens. `fills` draws a fill of
one hole in the middle and reports the log-probability of the whole window under the base model;
"reranked" is the fill, of 16 drawn from the left, after which the text behind the hole is most
probable. What --json holds already is not computed again.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tracformer
from tracformer.baselines.causal_lm import CausalLM
from tracformer.contexts import parse, sequence_rng
from tracformer.data import Tokenizer, load_tokenizer
from tracformer.devices import keep_freed_memory
from tracformer.evaluation.bootstrap import difference_interval, mean_interval, ratio
from tracformer.files import write_atomically
from tracformer.generation.decode import fill
from tracformer.generation.samplers import Sampler
from tracformer.loading import find_folder, read_causal_lm
from tracformer.model.batch import Batch
from tracformer.progress import track
from tracformer.rng import derived_seed

HELD_OUT = 20  # one of so many documents
TITLE, HEADING = re.compile(r"= [^=].*[^=] ="), re.compile(r"= .* =")
BASE, LENGTH, BATCH = "smollm2", 128, 16
SHARES, HOLES = (0.1, 0.3, 0.5), (1, 3, 12)
CANDIDATES = 16
SENTENCES = (
    "The capital of France is [[1-2]], a large city on the river Seine.",
    "Albert Einstein was a [[1-3]] who developed the theory of relativity.",
    "She put the samples in the [[1-2]] and forgot them.",
    "Water boils at [[2-6]] degrees Celsius at sea level.",
    "The [[1-3]] is the largest planet in the solar system.",
    "He opened the door because [[4-8]], and the dog ran out.",
    "The first [[2-4]] was built in 1804 by a Cornish engineer.",
    "My sister plays the [[1-2]] in an orchestra, and I sing.",
    "In winter the lake freezes, so [[4-8]] until spring.",
    "Bees make honey from [[2-6]] that they collect from flowers.",
)

Cells = dict[str, Any]


# ---- data


def documents(path: Path) -> Iterator[str]:
    """Yield the texts of a JSONL file, articles after lines `= Title =`, or stories."""
    text = path.read_text()
    if path.suffix == ".jsonl":
        yield from (json.loads(line)["text"] for line in text.splitlines())
        return
    if "<|endoftext|>" in text:
        yield from (part.strip() for part in text.split("<|endoftext|>") if part.strip())
        return
    lines: list[str] = []
    for line in text.splitlines():
        if TITLE.fullmatch(line.strip()) and lines:
            yield "\n".join(lines)
            lines = []
        elif line.strip() and not HEADING.fullmatch(line.strip()):
            lines.append(line)
    if lines:
        yield "\n".join(lines)


def write_data(files: list[Path], out: Path) -> None:
    """Divide the documents of all files into training, validation and test data."""
    parts: dict[str, list[str]] = {"train": [], "validation": []}
    for path in files:
        tests = parts[f"test-{path.stem}"] = []
        for number, text in enumerate(documents(path)):
            held = (parts["validation"], tests)[number // HELD_OUT % 2]
            (held if number % HELD_OUT == 0 else parts["train"]).append(text)
    out.mkdir(parents=True, exist_ok=True)
    for name, texts in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        write_atomically(out / f"{name}.jsonl", lines)
        print(f"{name}: {len(texts):,} documents, {sum(map(len, texts)):,} characters")


def windows(tokenizer: Tokenizer, path: Path, count: int) -> Tensor:
    """Return windows of tokens (N, LENGTH), spread over the documents of a text."""
    found = []
    for text in documents(path):
        ids = tokenizer.encode(text[: 40 * LENGTH])
        starts = range(0, len(ids) - LENGTH + 1, LENGTH)
        found += [ids[start : start + LENGTH] for start in starts[:8]]
    chosen = np.random.default_rng(0).permutation(len(found))[:count]
    return torch.tensor([found[i] for i in sorted(chosen)])


# ---- systems


def untrained() -> CausalLM:
    """Return the base model in the new layout, with an adapter that does nothing yet."""
    model, _ = read_causal_lm(BASE)
    model.adapt(dataclasses.replace(model.config, modes=("car", "ar")), ["car"])
    return model.to(torch.bfloat16).eval()


def adapted(where: str) -> CausalLM:
    """Return the base model with an adapter."""
    model = tracformer.load(where, dtype=torch.bfloat16).model
    assert isinstance(model, CausalLM)
    return model


class Systems:
    """The models of the comparison, each loaded when it is first used."""

    def __init__(self, ours: str, control: str) -> None:
        self.loaders: dict[str, tuple[str, Callable[[], CausalLM]]] = {
            "base, left to right": ("ar", untrained),
            "control, left to right": ("ar", lambda: adapted(control)),
            "new layout, before": ("car", untrained),
            "new layout, after": ("car", lambda: adapted(ours)),
        }
        for name, given in (("control, left to right", control), ("new layout, after", ours)):
            if not given:
                del self.loaders[name]
        self.loaded: dict[str, CausalLM] = {}

    def get(self, name: str) -> tuple[CausalLM, str]:
        """Return a model and its mode."""
        mode, load = self.loaders[name]
        if name not in self.loaded:
            self.loaded[name] = load()
        return self.loaded[name], mode


# ---- measuring


@torch.no_grad()
def log_probs(model: CausalLM, mode: str, tokens: Tensor, given: Tensor) -> Tensor:
    """Return the log-probability (N, T) of each token that is not given."""
    parts = [
        model.log_prob(Batch(some, context), mode)
        for some, context in zip(tokens.split(BATCH), given.split(BATCH), strict=True)
    ]
    return torch.cat(parts).double()


def hidden_spans(rows: int, share: float, mean: int) -> Tensor:
    """Return (rows, LENGTH) bool, True where given: spans of a mean length, or single tokens."""
    kind = f"random:{share}" if mean == 1 else f"span:p={share},mean={mean}"
    strategy = parse(kind)
    drawn = [strategy.draw(LENGTH, sequence_rng(1, row)) for row in range(rows)]
    return torch.from_numpy(np.stack(drawn))


def measure_nats(systems: Systems, texts: dict[str, Tensor], cells: Cells, save: Any) -> None:
    """Fill in the sums of each window, by text, pattern and system."""
    trial = ((0.5, 12), (0.1, 1), (0.3, 3))  # first what earlier figures exist for
    rest = [(p, n) for p in SHARES for n in HOLES if (p, n) not in trial]
    from_left: dict[tuple[str, str], Tensor] = {}
    for (share, mean), text, name in product((*trial, *rest), texts, systems.loaders):
        key, tokens = f"{text} | {mean} at {share:.0%} | {name}", texts[text]
        if key in cells:
            continue
        model, mode = systems.get(name)
        given = hidden_spans(len(tokens), share, mean)
        if mode == "car":
            found = log_probs(model, mode, tokens, given)
        elif (text, name) in from_left:  # one pass for all patterns
            found = from_left[text, name]
        else:
            found = log_probs(model, mode, tokens, torch.zeros_like(given))
            from_left[text, name] = found
        nats, counts = -(found * ~given).sum(1), (~given).sum(1)
        cells[key] = {"nats": [round(x, 3) for x in nats.tolist()], "tokens": counts.tolist()}
        save()
        print(f"{key}: {ratio(nats, counts):.3f}", flush=True)


def measure_fills(systems: Systems, texts: dict[str, Tensor], cells: Cells, save: Any) -> None:
    """Fill in the log-probability of each filled window under the base model."""
    base, _ = systems.get("base, left to right")
    for text, tokens in texts.items():
        nothing = torch.zeros(tokens.shape, dtype=torch.bool)
        for hole in HOLES:
            start = (LENGTH - hole) // 2
            given = ~nothing
            given[:, start : start + hole] = False

            def drawn(
                name: str, number: int, given: Tensor = given, rows: Tensor = tokens
            ) -> Tensor:
                model, mode = systems.get(name)
                sampler = Sampler(banned=(model.config.start_id,))
                parts = [
                    fill(
                        model,
                        Batch(some, context),
                        mode,
                        sampler=sampler,
                        seed=[derived_seed(number, at * BATCH + i) for i in range(len(some))],
                    ).tokens
                    for at, (some, context) in enumerate(
                        zip(rows.split(BATCH), given.split(BATCH), strict=True)
                    )
                ]
                return torch.cat(parts)

            def put(kind: str, values: Tensor, text: str = text, hole: int = hole) -> None:
                cells[f"fills | {text} | {hole} | {kind}"] = [round(x, 3) for x in values.tolist()]
                save()
                print(f"fills | {text} | {hole} | {kind}: {float(values.mean()):.2f}", flush=True)

            def whole(filled: Tensor) -> Tensor:
                return log_probs(base, "ar", filled, torch.zeros_like(filled, dtype=torch.bool))

            def known(kind: str, text: str = text, hole: int = hole) -> bool:
                return f"fills | {text} | {hole} | {kind}" in cells

            if not known("the text itself"):
                put("the text itself", whole(tokens).sum(1))
            for kind in ("control, left to right", "new layout, before", "new layout, after"):
                if kind in systems.loaders and not known(kind):
                    put(kind, whole(drawn(kind, 0)).sum(1))
            if not known("base, reranked"):
                scores, after = [], []
                for number in track(range(CANDIDATES), f"{text} {hole}"):
                    scores.append(whole(drawn("base, left to right", number)))
                    after.append(scores[-1][:, start + hole :].sum(1))
                best = torch.stack(after).argmax(0)
                put("base, left to right", scores[0].sum(1))
                sums = torch.stack([each.sum(1) for each in scores])
                put("base, reranked", sums.gather(0, best[None])[0])


def show(cells: Cells) -> None:
    """Print the tables as Markdown."""
    names = ("base, left to right", "control, left to right", "new layout, before")
    ours = "new layout, after"
    texts = sorted({key.split(" | ")[0] for key in cells if not key.startswith("fills")})
    for text in texts:
        print(f"\n{text}: nats per hidden token\n")
        print("| holes | " + " | ".join((*names, ours)) + " | gain over the control |")
        print("|---" * (len(names) + 3) + "|")
        for mean in HOLES:
            for share in SHARES:
                row = {
                    name: cells.get(f"{text} | {mean} at {share:.0%} | {name}")
                    for name in (*names, ours)
                }
                if not any(row.values()):
                    continue
                shown = [f"{ratio(c['nats'], c['tokens']):.3f}" if c else "" for c in row.values()]
                gain, a, b = "", row["control, left to right"], row[ours]
                if a and b:
                    pairs = (a["nats"], a["tokens"]), (b["nats"], b["tokens"])
                    low, high = difference_interval(*pairs) or (0.0, 0.0)
                    gain = f"{ratio(*pairs[0]) - ratio(*pairs[1]):.2f} [{low:.2f}, {high:.2f}]"
                print(f"| {mean} at {share:.0%} | " + " | ".join((*shown, gain)) + " |")
    fills = [key.split(" | ")[1:] for key in cells if key.startswith("fills")]
    for text in sorted({text for text, _, _ in fills}):
        kinds = list(dict.fromkeys(kind for other, _, kind in fills if other == text))
        print(f"\n{text}: log-probability of the filled window under the base model\n")
        print(
            "| tokens in the hole | " + " | ".join(kinds) + " |\n" + "|---" * (len(kinds) + 1) + "|"
        )
        for hole in HOLES:
            values = [cells.get(f"fills | {text} | {hole} | {kind}") for kind in kinds]
            if any(values):
                shown = [
                    f"{np.mean(v):.1f} ± {(i := mean_interval(v) or (0, 0))[1] / 2 - i[0] / 2:.1f}"
                    if v
                    else ""
                    for v in values
                ]
                print(f"| {hole} | " + " | ".join(shown) + " |")


def main() -> None:
    """Run one part of the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="part", required=True)
    data = parts.add_parser("data", help="divide documents into training, validation and test data")
    data.add_argument("files", nargs="+", type=Path)
    data.add_argument("--out", type=Path, required=True)
    for name in ("nats", "fills"):
        part = parts.add_parser(name)
        part.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
        part.add_argument("--ours", default="", help="adapter of the new layout")
        part.add_argument("--control", default="", help="adapter that was trained left to right")
        part.add_argument("--windows", type=int, default=200)
        part.add_argument("--json", type=Path, required=True)
    parts.add_parser("table").add_argument("--json", type=Path, required=True)
    parts.add_parser("sentences").add_argument("--ours", required=True)
    arguments = parser.parse_args()
    keep_freed_memory()
    if arguments.part == "data":
        return write_data(arguments.files, arguments.out)
    if arguments.part == "sentences":
        lm = tracformer.load(arguments.ours)
        for sentence in SENTENCES:
            print(lm.infill(sentence, temperature=0.0)[0].text)
        return None
    path: Path = arguments.json
    cells: Cells = json.loads(path.read_text()) if path.is_file() else {}
    if arguments.part == "table":
        return show(cells)

    def save() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in cells.items()]
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")

    tokenizer = load_tokenizer(find_folder(BASE))
    named = (pair.split("=", 1) for pair in arguments.text)
    texts = {name: windows(tokenizer, Path(file), arguments.windows) for name, file in named}
    systems = Systems(arguments.ours, arguments.control)
    run = measure_nats if arguments.part == "nats" else measure_fills
    return run(systems, texts, cells, save)


if __name__ == "__main__":
    main()
