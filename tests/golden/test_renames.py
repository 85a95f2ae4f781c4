"""Files written before a rename load after it, and results found before it are found after it."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tracformer
from tests.golden.figures import batch, model_folder, read_record, subject_of, task_of
from tracformer import Tracformer, TracformerConfig
from tracformer.devices import Ranks
from tracformer.evaluation.result_files import FORMAT, Result, weights_hash
from tracformer.evaluation.task import evaluate
from tracformer.model.batch import Batch
from tracformer.renames import first_names
from tracformer.reproduce.pilots import recipe_hash
from tracformer.training import train_config as training
from tracformer.training.checkpoint import CheckpointWriter, Reader, Shard, State
from tracformer.training.optimizer import build_optimizer
from tracformer.training.train_config import OptimizerConfig, canonical_recipe

ROOT = Path(__file__).parents[2]
OLD_KEYS = {"layers": "depth", "depth": "n_layer"}  # renamed twice
OLD_TENSORS = {
    "reading.*": "encoder.*",
    "encoder.*.att.weight": "encoder.*.qkv.weight",
    "table": "embedding.weight",
}
# What the first optimizer configurations had; later fields stand in `LATER_KEYS`.
FIRST_OPTIMIZER_KEYS = {
    *("name", "lr", "final_lr", "warmup", "beta1", "beta2", "weight_decay", "clip"),
    *("matrix_lr", "momentum", "nesterov"),
}


def old_name(name: str) -> str:
    """Return the name of a tensor before the renames of OLD_TENSORS."""
    name = "table" if name == "embedding.weight" else name
    name = re.sub(r"^encoder\.(\d+)\.qkv\.weight$", r"encoder.\1.att.weight", name)
    return name.replace("encoder.", "reading.")


@pytest.fixture
def old_folder(tmp_path: Path) -> Path:
    """The recorded folder, as a version with other names would have written it."""
    folder = tmp_path / "old"
    folder.mkdir()
    config = json.loads((model_folder("tracformer") / "config.json").read_text())
    config["layers"] = config.pop("n_layer")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(model_folder("tracformer") / "model.safetensors")
    tensors = {old_name(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracformer.training.checkpoint.OLD_KEYS", {"start": "seed"})
    monkeypatch.setattr(TracformerConfig, "old_config_keys", OLD_KEYS)
    monkeypatch.setattr(TracformerConfig, "old_tensor_names", OLD_TENSORS)


def logits_of(model: torch.nn.Module) -> list[float]:
    tokens, context, lengths = batch()
    with torch.no_grad():
        logits: Tensor = model(Batch(tokens, context, lengths), "car")
    return logits[0, 1, :3].tolist()


def test_the_recorded_folder_loads_and_answers_as_recorded() -> None:
    model = Tracformer.from_pretrained(model_folder("tracformer"), dtype=torch.float64)
    recorded = read_record()["families"]["tracformer"].figures
    assert logits_of(model) == pytest.approx(recorded["car logits"], rel=1e-6)


def test_old_names_are_refused_without_a_table(old_folder: Path) -> None:
    with pytest.raises(ValueError, match="unknown configuration keys: layers"):
        Tracformer.from_pretrained(old_folder)


@pytest.mark.usefixtures("renamed")
def test_old_names_load_through_the_tables(old_folder: Path) -> None:
    present = Tracformer.from_pretrained(model_folder("tracformer"), dtype=torch.float64)
    old = Tracformer.from_pretrained(old_folder, dtype=torch.float64)
    assert logits_of(old) == logits_of(present)
    assert weights_hash(old) == weights_hash(present)
    with pytest.raises(ValueError, match="'depth' is the old name of 'n_layer', and both are"):
        TracformerConfig.from_dict({"n_layer": 3, "layers": 3})
    assert TracformerConfig.preset("tiny", layers=8).n_layer == 8


@pytest.mark.usefixtures("renamed")
def test_transformers_reads_old_names_too(old_folder: Path) -> None:
    hf = pytest.importorskip("tracformer.hf")
    model = hf.TracformerModel.from_pretrained(old_folder).double()
    expected = Tracformer.from_pretrained(model_folder("tracformer"), dtype=torch.float64)
    assert logits_of(model.core) == pytest.approx(logits_of(expected))


def test_a_hash_depends_on_contents_and_not_on_names(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tracformer.from_pretrained(model_folder("tracformer"))
    before, tensors = weights_hash(model), model.tensors()
    last_first = sorted(tensors, reverse=True)
    moved = {f"x{number}": tensors[name] for number, name in enumerate(last_first)}
    monkeypatch.setattr(model, "tensors", lambda: moved)
    assert weights_hash(model) == before
    moved["x0"] = moved["x0"] + 1e-6
    assert weights_hash(model) != before


def test_a_hash_tells_configurations_apart() -> None:
    sizes = {"vocab_size": 7, "max_length": 8, "n_layer": 3, "n_head": 2, "d_model": 4}
    one, other = (Tracformer(TracformerConfig(**sizes, n_max=n_max)) for n_max in (3, 4))
    other.load_state_dict(one.state_dict())
    assert weights_hash(one) != weights_hash(other)


def state() -> State:
    model = Tracformer.from_pretrained(model_folder("tracformer"))
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(), fused=False)
    ranks, recipe = Ranks(0, 1, torch.device("cpu")), {"seed": 1}
    return State(model, optimizer, ranks, sharded=False, ema=0.9, data="", recipe=recipe)


def old_moment_name(name: str) -> str:
    moment, _, parameter = name.partition(".")
    return f"{moment}.{old_name(parameter)}"


@pytest.mark.usefixtures("renamed")
def test_a_checkpoint_with_old_names_resumes(tmp_path: Path) -> None:
    first = state()
    for parameter in first.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    first.optimizer.step()
    first.advance(1)
    writer = CheckpointWriter(tmp_path, 1)
    writer.begin()
    for kind, shard in first.shards().items():
        rename = old_moment_name if kind == "optimizer" else old_name
        tensors = {rename(name): tensor for name, tensor in shard.tensors.items()}
        rows = {rename(name): each for name, each in shard.rows.items()}
        writer.write_shard(kind, Shard(tensors, rows))
    described = first.describe()
    described["model"]["layers"] = described["model"].pop("n_layer")
    described["recipe"] = {"start": 1}
    reader = Reader(writer.finish(described))

    second = state()
    second.load(reader)
    for name, parameter in first.parameters.items():
        assert torch.equal(second.parameters[name], parameter)
        assert torch.equal(second.average[name], first.average[name])
    moments = [each.optimizer.tensors(each.names) for each in (first, second)]
    assert all(torch.equal(moments[1][name], value) for name, value in moments[0].items())


def test_recipes_of_all_versions_are_comparable(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {"seed": 1, "model": {"n_layer": 3}, "optimizer": {"lr": 0.1}}
    before, later = recipe_hash(first), {"schedule": "cosine", "decay": 0.5}
    now = {**first, "optimizer": {"lr": 0.1, **later}}
    assert recipe_hash(now) == before
    assert canonical_recipe(now) == canonical_recipe(first)
    assert recipe_hash({**now, "optimizer": {"lr": 0.1, "schedule": "wsd"}}) != before
    monkeypatch.setattr(training, "OLD_KEYS", {"optimizer.lr": "optimizer.rate", "seed": "start"})
    monkeypatch.setattr(TracformerConfig, "old_config_keys", {"n_layer": "layers"})
    renamed = {"start": 1, "model": {"layers": 3}, "optimizer": {"rate": 0.1, **later}}
    assert canonical_recipe(renamed) == canonical_recipe(first)
    assert recipe_hash(renamed) == before


def test_new_optimizer_keys_leave_recipes_as_they_were() -> None:
    """If this fails, name the new key in LATER_KEYS, with the value that runs had without it."""
    now = first_names({"optimizer": asdict(OptimizerConfig())}, training.OLD_KEYS)
    added = set(now["optimizer"]) - FIRST_OPTIMIZER_KEYS
    assert {f"optimizer.{key}" for key in added} <= set(training.LATER_KEYS)


def test_results_of_older_versions_keep_their_names() -> None:
    paths = sorted((ROOT / "results").rglob("*.json"))
    documents = {path: json.loads(path.read_text()) for path in paths}
    results = [path for path in paths if documents[path].get("format") == FORMAT]
    assert results
    for path in results:
        assert Result.load(path).file_name == path.name


MOVED = """
import json, sys
from pathlib import Path
import torch, tracformer
from tests.golden import figures
from tests.golden.test_renames import logits_of
from tracformer.evaluation.result_files import weights_hash
from tracformer.evaluation.task import evaluate

task = figures.task_of("ratios", Path(sys.argv[1]))
kind = type(task)
kind.run = None  # computing it again fails
[result] = evaluate([figures.subject_of(task)], [task], sys.argv[2])
model = figures.load_model(figures.model_folder("tracformer"), dtype=torch.float64)
code = [tracformer.__file__, kind.__module__, kind.__name__, sorted(model.tensors())]
print(json.dumps([code, result.file_name, weights_hash(model), logits_of(model)]))
"""


def test_renamed_code_finds_its_results_and_reads_its_models(tmp_path: Path) -> None:
    """Rename two modules, a class, a configuration key and tensors in a copy of the package."""
    task = task_of("ratios", tmp_path)
    [cached] = evaluate([subject_of(task)], [task], tmp_path / "out")
    package = tmp_path / "src" / "tracformer"
    left_out = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(Path(tracformer.__file__).parent, package, ignore=left_out)
    words = {r"\bn_max\b": "n_keys", r"\bnorm_query\b": "query_norm", r"\bRatios\b": "ByRatio"}
    for module in (type(task).__module__, Tracformer.__module__):
        path = package.parent / (module.replace(".", "/") + ".py")
        path.rename(path.with_stem(f"moved_{path.stem}"))
        words[rf"\b{re.escape(module)}\b(?!\.)"] = moved(module)
        # the table of public names leaves out the package
        short = module.removeprefix("tracformer.")
        words[rf'"{re.escape(short)}(?=[":])'] = '"' + moved(module).removeprefix("tracformer.")
    keys, tensors = {"n_max": "n_keys"}, {"*.norm_query.*": "*.query_norm.*"}
    tables = f"    old_config_keys = {keys}\n    old_tensor_names = {tensors}\n"
    config = "class TracformerConfig(ModelConfig):\n"
    words[re.escape(config)] = config + tables
    for path in package.rglob("*.py"):
        text = path.read_text()
        for word, other in words.items():
            text = re.sub(word, other, text)
        path.write_text(text)

    paths = os.pathsep.join([str(package.parent), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", MOVED, str(tmp_path), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (file, module, kind, tensors), file_name, weights, logits = json.loads(done.stdout)
    assert file.startswith(str(package))
    assert (module, kind) == (moved(type(task).__module__), "ByRatio")
    assert any(".query_norm." in name for name in tensors)
    assert file_name == cached.file_name
    model = Tracformer.from_pretrained(model_folder("tracformer"), dtype=torch.float64)
    assert weights == weights_hash(model)
    assert logits == pytest.approx(logits_of(model))


def moved(module: str) -> str:
    folder, _, name = module.rpartition(".")
    return f"{folder}.moved_{name}"
