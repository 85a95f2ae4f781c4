"""What a run with a budget leaves for its user: figures beside a simple model, a picture, commands.

`held_out_figures` compares three predictions on the same held-out rows: the model left to right
(`ar`), a simple model left to right, and on hidden spans the model with and without the text after
them (`car` against `ar`).
"""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracformer.contexts import draw_contexts
from tracformer.contexts import parse as parse_strategy
from tracformer.data import Tokenizer, name_of
from tracformer.data.examples import Examples
from tracformer.data.make_tokenizer import ALPHABETS
from tracformer.files import write_atomically
from tracformer.generation.token_text import spelled_bytes
from tracformer.model import ConditionalModel
from tracformer.model.base import EXACT
from tracformer.model.batch import Batch
from tracformer.options import to_yaml
from tracformer.training.clock import Clock
from tracformer.training.log import plot_runs
from tracformer.training.train_config import TrainConfig
from tracformer.training.validation import CONTEXT_SEED
from tracformer.training.yardstick import Yardstick

PLAN, SUMMARY, PICTURE = "plan.yaml", "summary.json", "curves.png"
SPANS = "span:p=0.15,mean=8"  # hidden spans of the comparison


@torch.no_grad()
def held_out_figures(
    model: ConditionalModel,
    tokenizer: Tokenizer,
    rows: Examples,
    yardstick: Yardstick,
    count: int,
    batch: int = 16,
) -> dict[str, Any]:
    """Return the figures of a model on held-out rows.

    Args:
        model: The trained model.
        tokenizer: Its tokenizer.
        rows: Held-out rows.
        yardstick: Simple model fitted on the training rows.
        count: Number of rows to use; all if there are fewer.
        batch: Rows per forward pass.

    Returns:
        `unit`, `ar`, `yardstick` and its `yardstick_name`; `span_left` and `span_both`, the figures
        of hidden spans given the text before them, and given all text around them. Figures of modes
        that the model lacks are left out.
    """
    model.eval()
    device = next(model.parameters()).device
    exact = {mode for mode in model.config.modes if model.answers[mode] == EXACT}
    nats = dict.fromkeys(("ar", "yardstick", "span_left", "span_both"), 0.0)
    units = spans = 0.0
    spelled = None if name_of(tokenizer) in ALPHABETS else spelled_bytes(tokenizer)
    # bytes of each token; residues of an alphabet, and tokens of unknown spelling, count once
    table = np.array([len(token) for token in spelled], float) if spelled is not None else None
    for start in range(0, min(count, len(rows)), batch):
        numbers = np.arange(start, min(start + batch, count, len(rows)))
        tokens, lengths = rows.get(numbers)
        hidden = ~draw_contexts(
            parse_strategy(SPANS), lengths, CONTEXT_SEED, numbers, width=tokens.shape[1]
        )
        inside = np.arange(tokens.shape[1]) < lengths[:, None]
        hidden &= inside
        sizes = table[tokens] if table is not None else np.ones(tokens.shape)
        units, spans = units + float(sizes[inside].sum()), spans + float(sizes[hidden].sum())
        nats["yardstick"] -= float(yardstick.log_probs(tokens, lengths).sum())
        parts = (torch.from_numpy(x).to(device) for x in (tokens, ~hidden & inside, lengths))
        ids, given, sizes_of_rows = parts
        if "ar" in exact:
            empty = Batch(ids, torch.zeros_like(given), sizes_of_rows)
            values = model.log_prob(empty, "ar").double().cpu().numpy()
            nats["ar"] -= float(values.sum())
            nats["span_left"] -= float(values[hidden].sum())
        if "car" in exact:
            values = model.log_prob(Batch(ids, given, sizes_of_rows), "car").double().cpu().numpy()
            nats["span_both"] -= float(values.sum())
    scale = math.log(2) if table is not None else 1.0
    plain = "nats per residue" if name_of(tokenizer) in ALPHABETS else "nats per token"
    figures: dict[str, Any] = {
        "unit": "bits per byte" if table is not None else plain,
        "yardstick_name": yardstick.name,
        "yardstick": nats["yardstick"] / scale / max(1.0, units),
        "rows": min(count, len(rows)),
    }
    if "ar" in exact:
        figures["ar"] = nats["ar"] / scale / max(1.0, units)
        figures["span_left"] = nats["span_left"] / scale / max(1.0, spans)
    if "car" in exact:
        figures["span_both"] = nats["span_both"] / scale / max(1.0, spans)
    return figures


def write_plan(run: Path, config: TrainConfig, clock: Clock, step: int, data: Path) -> Path:
    """Write the realised plan of a run as a preset, which trains the same weights again.

    Args:
        run: Folder of the run.
        config: Final configuration of the run.
        clock: Its clock, with the decays.
        step: Its last step.
        data: Folder of the prepared data.
    """
    values = config.to_dict()
    values |= {"steps": step, "minutes": 0.0, "run": "", "until": 0}
    values["data"] = {**values["data"], "source": str(data), "validation": "0.05"}
    values["optimizer"] = {**values["optimizer"], "decays": ",".join(map(str, clock.decays))}
    name = shlex.quote(str(run / PLAN))
    head = f"# {run} as it was realised; `tracformer train {name} run=FOLDER` repeats it.\n"
    write_atomically(run / PLAN, head + to_yaml(values) + "\n")
    return run / PLAN


def write_summary(run: Path, facts: dict[str, Any]) -> list[str]:
    """Write summary.json and the picture of a run; return the lines that its user sees.

    Args:
        run: Folder of the run.
        facts: Figures of `held_out_figures`, and `step`, `tokens`, `seconds`, `example`.
    """
    write_atomically(run / SUMMARY, json.dumps(facts, indent=1) + "\n")
    lines = [
        f"trained {facts['step']:,} steps, {facts['tokens']:,} tokens, in "
        f"{facts['seconds'] / 60:.1f} minutes; model in {run / 'model'}"
    ]
    if "yardstick" in facts:
        unit, name = facts["unit"], facts["yardstick_name"]
        left = f"{facts['ar']:.3f} (ar), " if "ar" in facts else ""
        lines.append(f"held out, left to right: {left}{facts['yardstick']:.3f} ({name}) {unit}")
    if {"span_left", "span_both"} <= facts.keys():
        left, both = facts["span_left"], facts["span_both"]
        lines.append(
            f"hidden spans: {left:.3f} {facts['unit']} given what is before (ar), {both:.3f} given "
            f"both sides (car): {1 - both / left:.0%} less"
        )
    try:
        plot_runs([run], run / PICTURE)
        lines.append(f"learning curve: {run / PICTURE}")
    except ImportError:
        lines.append(f"learning curve: `tracformer plot {run}`, once matplotlib is installed")
    place = shlex.quote(str(run))
    before, middle, after = facts["example"]
    return [
        *lines,
        "go on with:",
        f"  tracformer infill -m {place} {shlex.quote(f'{before}[[]]{after}')}",
        f"  tracformer score -m {place} {shlex.quote(f'{before}[[{middle}]]{after}')}",
        f"  tracformer serve {place}",
    ]


def example_of(tokenizer: Tokenizer, rows: Examples) -> tuple[str, str, str]:
    """Return the text before, in and after a short part of a held-out row, on one line."""
    tokens, lengths = rows.get(np.array([0]))
    ids = [token for token in tokens[0, : lengths[0]].tolist() if token != tokenizer.eot_id][:48]
    third = max(1, len(ids) // 3)
    cut = (ids[:third], ids[third : third + 4], ids[third + 4 : third + 24])
    return tuple(  # type: ignore[return-value]
        tokenizer.decode(part, inside=i > 0).replace("\n", " ") for i, part in enumerate(cut)
    )
