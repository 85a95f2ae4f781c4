"""Figures of every model family and task, from small fixed inputs, and their comparison with the record.

`figures.json` holds the recorded figures with their schemas. A change of the numbers fails the tests
until the schema of the family or task is raised and `python -m tests.golden.record` is run.

Weights are read from folders rather than drawn: neither a renamed nor a reordered parameter changes
a figure, and every family's folders are known to stay readable.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.data.test_split import family as protein_family
from tests.data.test_split import write_family
from tracformer.baselines import CAUSAL_LM, family_names, find_family, load_model, schema_of
from tracformer.data import Tokenizer, char_tokenizer
from tracformer.data.make_tokenizer import ALPHABETS
from tracformer.data.prepare import prepare
from tracformer.evaluation import Result, Subject, Task, make_task
from tracformer.evaluation.exact import UniformModel
from tracformer.evaluation.exact_sources import find_source
from tracformer.evaluation.task import Progress, task_class, task_names
from tracformer.model.base import BOUND, ConditionalModel
from tracformer.model.batch import Batch

FOLDER = Path(__file__).parent
RECORD = FOLDER / "figures.json"
MODELS = FOLDER / "models"
TEXTS = "texts"  # the model of the tasks
COMMAND = "python -m tests.golden.record"

TOLERANCE = 1e-6  # relative, of float64
LOOSE = {"bertscore": 1e-3, "mauve": 1e-3}  # of an encoder in float32
ROWS = 8  # of a task's result
SHOWN = 3  # differences in a message

# Of a model, where its configuration has these fields; 2 ** n_layer reaches max_length.
SIZES = {
    "vocab_size": 7,
    "max_length": 8,
    "n_layer": 3,
    "n_head": 2,
    "d_model": 4,
    "n_max": 3,
    "n_encoder": 2,
    "d_condition": 4,
    "d_embedding": 4,
    "n_step": 20,
}
GIVEN = ("#..#.#..", ".##..#..", "#.......")  # contexts of three sequences
LENGTHS = (8, 6, 3)
LETTERS = ALPHABETS["protein"] + " ."
WORDS = ("CAT", "SAT", "DEER", "RAN", "LIVE", "IN", "THE", "PARK", "AND", "SWIM", "FAST")

# Options of a task beyond COMMON; every other task runs under COMMON and its defaults.
COMMON = {"length": 12, "sequences": 6, "rounds": 1, "draws": 2, "rows": "packed"}
OPTIONS: dict[str, dict[str, Any]] = {
    "ratios": {"ratios": (0.3, 0.7), "mean": 3},
    "ranges": {"ranges": ("[0.25,0.75]", "[0.1,0.4]&[0.6,0.9]")},
    "contexts": {"contexts": ("span:p=0.5,mean=3",)},
    "infilling": {"length": 24, "contexts": ("[0.25,0.75]",), "samples": 2, "clusters": 3},
    "orders": {"length": 3, "text": "CAT"},
    "calibration": {"ratios": (0.5,), "mean": 3, "bins": 3},
    "exact": {"source": "hmm-4", "patterns": ("one", "middle-half"), "sequences": 4},
    "domains": {"hole": (3, 6), "sequences": 3},
}


@dataclass(frozen=True)
class Figures:
    """Figures by name, and the schemas of what they were computed with."""

    schemas: Mapping[str, int]
    figures: Mapping[str, list[float | None]]
    options: list[str] = dataclasses.field(default_factory=list)  # of a task, by name

    def differences(self, recorded: "Figures") -> list[str]:
        """Return a line for each figure or option that is not the recorded one."""
        added = [name for name in self.options if name not in recorded.options]
        lines = [f"option {name!r} is new: put it into `later_options`" for name in added]
        for name in {**recorded.figures, **self.figures}:
            now, before = self.figures.get(name), recorded.figures.get(name)
            if now is None or before is None or not _close(now, before, _tolerance(name)):
                lines.append(f"{name} was {before} and is now {now}")
        return lines


def subjects() -> Iterator[tuple[str, str]]:
    """Return ("families", name) and ("tasks", name) of all that is registered."""
    # a causal language model has no weights of its own: its figures are those of its network
    yield from (("families", name) for name in family_names() if name != CAUSAL_LM)
    yield from (("tasks", name) for name in task_names())


def compute(kind: str, name: str, folder: Path) -> Figures:
    """Return the figures of a family or a task; `folder` takes the data of a task."""
    return family_figures(name) if kind == "families" else task_figures(name, folder)


def read_record() -> dict[str, dict[str, Figures]]:
    document = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    entries = {kind: document.get(kind, {}) for kind in ("families", "tasks")}
    return {kind: {name: Figures(**each[name]) for name in each} for kind, each in entries.items()}


def problem_of(kind: str, name: str, found: Figures, recorded: Figures | None) -> str | None:
    """Return what is wrong with figures in view of the record and what to do, or None."""
    what = f"{'family' if kind == 'families' else 'task'} {name!r}"
    if recorded is None:
        return f"no figures of {what} are recorded; run `{COMMAND}`"
    if found.schemas != recorded.schemas:
        under = f"{recorded.schemas}, not {found.schemas}"
        return f"figures of {what} are recorded under {under}; run `{COMMAND}`"
    if lines := found.differences(recorded):
        where = "tracformer.baselines" if kind == "families" else task_class(name).__module__
        remedy = f"If this is intended, raise its schema in {where} and run `{COMMAND}`"
        return f"figures of {what} changed: {'; '.join(lines[:SHOWN])}. {remedy}"
    return None


# ---- families


def model_folder(name: str) -> Path:
    return MODELS / name


def write_model(name: str, folder: Path, **changes: Any) -> None:
    """Write the folder of a small model of a family, with large random weights."""
    kind = find_family(name).model_class
    fields = {field.name for field in dataclasses.fields(kind.config_class)}
    sizes = {key: value for key, value in {**SIZES, **changes}.items() if key in fields}
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.4 * torch.randn(parameter.shape)
            parameter.copy_(1.0 + noise if bool((parameter == 1).all()) else noise)
    model.save_pretrained(folder)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, context and lengths of three sequences."""
    row, place = torch.arange(3)[:, None], torch.arange(8)
    tokens = (3 * row + 5 * place + row * place) % SIZES["vocab_size"]
    context = torch.tensor([[sign == "#" for sign in signs] for signs in GIVEN])
    return tokens, context, torch.tensor(LENGTHS)


def family_figures(name: str) -> Figures:
    """Return logits, log-probabilities, training loss and the norm of its gradient, by mode."""
    model = load_model(model_folder(name), dtype=torch.float64)
    figures: dict[str, list[float | None]] = {}
    for mode in model.config.modes:
        figures |= {f"{mode} {key}": each for key, each in _mode_figures(model, mode).items()}
    return Figures({"family": schema_of(name)}, figures)


def _mode_figures(model: ConditionalModel, mode: str) -> dict[str, list[float | None]]:
    tokens, context, lengths = batch()
    figures: dict[str, list[float | None]] = {}
    with torch.no_grad():
        if model.answers[mode] != BOUND:
            figures["logits"] = model(Batch(tokens, context, lengths), mode)[0, 1, :3].tolist()
        log_probs = model.log_prob(Batch(tokens, context, lengths), mode, draws=2, seed=1)
        figures["log_prob"] = log_probs.sum(1).tolist()
    copies = 8 if model.answers[mode] == BOUND else 1  # draws of noise
    tokens, context, lengths = (torch.cat([each] * copies) for each in (tokens, context, lengths))
    torch.manual_seed(1)
    model.train().zero_grad()
    total, count = model.nll(Batch(tokens, context, lengths), mode)
    total.backward()
    model.eval()
    squares = [float((p.grad**2).sum()) for p in model.parameters() if p.grad is not None]
    figures["loss"] = [total.item() / count]
    figures["gradient"] = [math.sqrt(math.fsum(squares))]
    return figures


# ---- tasks


def tokenizer() -> Tokenizer:
    return char_tokenizer(LETTERS)


def write_text(folder: Path) -> Path:
    """Write sentences of WORDS."""
    numbers = [[7 * row + 3 * place + row * place for place in range(6)] for row in range(24)]
    lines = [" ".join(WORDS[number % len(WORDS)] for number in row) + "." for row in numbers]
    path = folder / "sentences.txt"
    path.write_text("<|endoftext|>".join(lines))
    return path


def task_of(name: str, folder: Path) -> Task:
    """Return the task with small options on data that is written to the folder."""
    options = dict(OPTIONS.get(name, {}))
    if name == "domains":
        (folder / "pfam").mkdir()
        rows = protein_family(20, 8, width=24, seed=2, conserved=0.7)
        write_family(folder / "pfam" / "family.fasta", rows)
        how = {"validation": 0.1, "identity": 0.6, "quiet": True}
        prepare(folder / "data", folder / "pfam", "protein", **how)
        options |= {"data": str(folder / "data"), "alignments": str(folder / "pfam")}
    return make_task(name, options, {**COMMON, "data": str(write_text(folder))})


def subject_of(task: Task) -> Subject:
    """Return the model on which a task is run."""
    mode = task.modes[0] if task.modes else "car"
    if task.name == "exact":
        return Subject(UniformModel(find_source(task.options["source"])), None, "uniform", mode)
    model = load_model(model_folder(TEXTS), dtype=torch.float64)
    return Subject(model, tokenizer(), "golden", mode)


def task_figures(name: str, folder: Path) -> Figures:
    """Return value and interval of the first rows; names alone where the machine is measured."""
    task = task_of(name, folder)
    result = task.run(subject_of(task), Progress())
    return Figures(result.manifest["schemas"], rows_of(result, task.lasting), sorted(task.options))


def rows_of(result: Result, lasting: bool) -> dict[str, list[float | None]]:
    rows = {}
    for row in result.rows[:ROWS]:
        setting = " ".join(f"{key}={value}" for key, value in row.setting.items())
        rows[f"{row.metric} {setting}".strip()] = [row.value, row.low, row.high] if lasting else []
    return rows


# ---- numbers


def _tolerance(name: str) -> float:
    return next((loose for metric, loose in LOOSE.items() if name.startswith(metric)), TOLERANCE)


def _close(now: list[float | None], before: list[float | None], tolerance: float) -> bool:
    def close(a: float | None, b: float | None) -> bool:
        if a is None or b is None:
            return a is b
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-9)

    return len(now) == len(before) and all(map(close, now, before))
