"""What a run with a budget leaves for its user: figures beside a simple model, a picture, commands.

`held_out_figures` compares three predictions on the same held-out rows: the model left to right
(`ar`), a simple model left to right, and on hidden spans the model with and without the text after
them (`car` against `ar`). `fit_yardstick` fits the simple model: a trigram model, or a profile of
an aligned family.
"""

import json
import math
import shlex
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tracformer.contexts import draw_contexts
from tracformer.contexts import parse as parse_strategy
from tracformer.data import PreparedData, Tokenizer, name_of
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

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_TOKENS = 20_000_000  # that a trigram model counts; more would take minutes


class Yardstick(Protocol):
    """A model that is fitted in seconds."""

    name: str

    def log_probs(self, tokens: Ints, lengths: Ints) -> Floats:
        """Return the log-probability of each token given those before it, (B, T); 0 in padding."""
        ...


def fit_yardstick(data: PreparedData, rows: Examples) -> Yardstick:
    """Return a site profile if the rows are an aligned family, else a trigram model.

    Args:
        data: Prepared data; the split `train` is used.
        rows: Its training rows.
    """
    split = data.split("train")
    if name_of(data.tokenizer).endswith("-aligned") and len(rows) < 200_000:
        tokens, lengths = rows.get(np.arange(len(rows)))
        if (lengths == lengths[0]).all():
            return SiteProfile(tokens[:, : lengths[0]], data.tokenizer.vocab_size)
    count = min(len(split.tokens), MOST_TOKENS)
    return KneserNey(split.tokens.read(0, count).astype(np.int64), data.tokenizer.vocab_size)


class SiteProfile:
    """The frequency of each token at each position, with one pseudocount per position.

    Args:
        tokens: Rows of an alignment, (N, T).
        vocab_size: Number of tokens.
    """

    name = "site profile"

    def __init__(self, tokens: Ints, vocab_size: int) -> None:
        background = np.bincount(tokens.ravel(), minlength=vocab_size) + 1.0
        background /= background.sum()
        counts = np.stack([np.bincount(column, minlength=vocab_size) for column in tokens.T])
        # (T, V); the pseudocount is divided as the whole alignment's tokens are
        self.table = np.log((counts + background) / (len(tokens) + 1.0))

    def log_probs(self, tokens: Ints, lengths: Ints) -> Floats:
        """Return the log-probability of each token at its position, (B, T); 0 in padding."""
        sites = np.arange(tokens.shape[1]).clip(max=len(self.table) - 1)
        inside = np.arange(tokens.shape[1]) < lengths[:, None]
        return np.where(inside, self.table[sites, tokens], 0.0)


class KneserNey:
    """Interpolated Kneser-Ney trigrams (Chen and Goodman 1998), one discount per order.

    With counts c and a discount D,
    p(w | u v) = (c(u v w) - D)+ / c(u v) + D n(u v) / c(u v) p(w | v), where n(u v) is the number
    of different words after u v; the lower orders count different words before, not occurrences.

    Args:
        tokens: Training text, one array with an end of text between documents.
        vocab_size: Number of tokens.
    """

    name = "Kneser-Ney trigram"

    def __init__(self, tokens: Ints, vocab_size: int) -> None:
        self.size = vocab_size
        pairs = tokens[:-1] * vocab_size + tokens[1:]
        triples, counts = np.unique(pairs[:-1] * vocab_size + tokens[2:], return_counts=True)
        self.three = _Order(triples, counts, vocab_size)
        # different words before each pair: the number of different triples that end in it
        twos, counts = np.unique(triples % vocab_size**2, return_counts=True)
        self.two = _Order(twos, counts, vocab_size)
        ones, counts = np.unique(twos % vocab_size, return_counts=True)
        self.one = _Order(ones, counts, vocab_size)

    def log_probs(self, tokens: Ints, lengths: Ints) -> Floats:
        """Return the log-probability of each token given up to two before it, (B, T)."""
        wide = np.pad(tokens, ((0, 0), (2, 0)), constant_values=-1)  # -1: no token
        first, second = wide[:, :-2], wide[:, 1:-1]
        found = self.one.share(np.zeros_like(tokens), tokens, np.full(tokens.shape, 1 / self.size))
        found = np.where(second >= 0, self.two.share(second, tokens, found), found)
        pair = first * self.size + second
        found = np.where(first >= 0, self.three.share(pair, tokens, found), found)
        inside = np.arange(tokens.shape[1]) < lengths[:, None]
        return np.where(inside, np.log(found), 0.0)


class _Order:
    """Discounted counts of n-grams.

    Args:
        keys: n-grams as numbers, sorted: history * vocab_size + word.
        counts: How often each occurs.
        vocab_size: Number of tokens.
    """

    def __init__(self, keys: Ints, counts: Ints, vocab_size: int) -> None:
        self.keys, self.counts, self.size = keys, counts, vocab_size
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        self.discount = once / (once + 2 * twice) if once else 0.5
        self.histories, starts = np.unique(keys // vocab_size, return_index=True)
        self.totals = np.add.reduceat(counts, starts) if len(keys) else counts
        self.different = np.diff(np.append(starts, len(keys)))

    def share(self, history: Ints, word: Ints, lower: Floats) -> Floats:
        """Return the probability of words after histories; `lower` is that of the lower order."""
        if len(self.keys) == 0:
            return lower
        where, known = _find(self.histories, history)
        place, seen = _find(self.keys, history * self.size + word)
        count = np.where(seen, self.counts[place], 0)
        total = self.totals[where]
        own = np.maximum(count - self.discount, 0.0) * (count > 0)
        mixed = (own + self.discount * self.different[where] * lower) / total
        return np.where(known, mixed, lower)


def _find(table: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Return places in a sorted table, and which values are there."""
    places = np.searchsorted(table, wanted).clip(max=len(table) - 1)
    return places, table[places] == wanted


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
