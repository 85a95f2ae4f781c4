"""tracformer adapt: adapters for causal language models, by the training loop of tracformer train."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

import tracformer
from tests.baselines.test_causal_lm import write_speaker
from tests.training.helpers import weights_of
from tracformer import Batch
from tracformer.cli import main
from tracformer.training.log import read_log
from tracformer.training.train_config import load_config

OPTIONS = (
    "length=24",
    "batch=4",
    "precision=float32",
    "model.rank=4",
    "optimizer.warmup=2",
    "optimizer.lr=0.01",
    "contexts=span:p=0.3,mean=3",
    'eval_contexts=["span:p=0.3,mean=3"]',
    "eval_sequences=8",
    "log_every=1",
)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request, tmp_path_factory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("base") / "base", request.param)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Sentences whose words are decided by what follows them."""
    generator = random.Random(1)
    path = tmp_path_factory.mktemp("data") / "text.txt"
    pairs = (("fox", "ran"), ("cafe", "closed"), ("apple", "fell"))
    lines = (f"The {a} {b}." for a, b in (generator.choice(pairs) for _ in range(400)))
    path.write_text("\n".join(lines))
    return path


def adapt(base: Path, data: Path, out: Path, *words: str) -> int:
    named = {word.split("=")[0] for word in words}
    options = [option for option in OPTIONS if option.split("=")[0] not in named]
    return main(["adapt", str(base), "--data", str(data), "--out", str(out), *options, *words])


def test_an_adapter_learns_and_the_base_stays_as_it_is(base, data, tmp_path, capsys):
    assert adapt(base, data, tmp_path / "run", "steps=25", "eval_every=25") == 0
    losses = [r["loss"] for r in read_log(tmp_path / "run" / "log.jsonl") if r["kind"] == "train"]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    with safe_open(tmp_path / "run" / "best" / "model.safetensors", "pt") as file:
        assert all(".lora_" in name for name in file.keys())  # noqa: SIM118
    card = (tmp_path / "run" / "best" / "README.md").read_text()
    lm = tracformer.load(tmp_path / "run")
    assert lm.model.config.base_fingerprint in card
    assert str(base) in card
    assert "25 steps of 4 x 24 tokens" in card
    [fill] = lm.infill("The [[1-3]] closed.")
    assert (fill.mode, fill.text[:4]) == ("car", "The ")
    tokens = torch.randint(300, (2, 10))
    batch = Batch(tokens, torch.zeros_like(tokens, dtype=torch.bool))
    network = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        ids = torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=0)
        expected = network(input_ids=ids).logits[..., : lm.model.config.vocab_size]
        torch.testing.assert_close(lm.model(batch, "ar"), expected, atol=1e-6, rtol=1e-6)
    # trained further, on other data or with other settings
    words = ["adapt", str(tmp_path / "run"), "--data", str(data), "--out", str(tmp_path / "more")]
    assert main([*words, "length=24", "batch=4", "steps=2"]) == 0
    more = tracformer.load(tmp_path / "more").model.config
    assert (more.base, more.rank) == (str(base), 4)
    capsys.readouterr()
    assert adapt(tmp_path / "run", data, tmp_path / "wide", "model.rank=8", "steps=2") == 2
    assert "model.rank is 8, but the adapter to start from has 4" in capsys.readouterr().err


def test_an_interrupted_run_ends_with_the_same_weights(base, data, tmp_path):
    words = ("steps=6", "save_every=2")
    assert adapt(base, data, tmp_path / "whole", *words) == 0
    assert adapt(base, data, tmp_path / "parts", *words, "until=3") == 0
    assert weights_of(tmp_path / "parts") != weights_of(tmp_path / "whole")
    assert adapt(base, data, tmp_path / "parts", *words) == 0
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole")


def test_the_layout_is_an_option_and_is_kept(base, data, tmp_path):
    words = ("model.body=full", "model.prefix=causal", "steps=2", "checkpoint_activations=true")
    assert adapt(base, data, tmp_path / "run", *words) == 0
    config = tracformer.load(tmp_path / "run").model.config
    assert (config.body, config.prefix, config.adapted) == ("full", "causal", ("car",))


def test_all_weights_or_left_to_right_can_be_trained(base, data, tmp_path):
    """The latter is the control of a comparison: adapted to the data, but not to the layout."""
    assert adapt(base, data, tmp_path / "ar", "objective=ar", "contexts=", "steps=2") == 0
    config = tracformer.load(tmp_path / "ar").model.config
    assert (config.modes, config.adapted) == (("ar",), ("ar",))
    words = ["adapt", str(base), "--data", str(data), "--out", str(tmp_path / "full"), "--full"]
    assert main([*words, "length=24", "batch=4", "precision=float32", "steps=2"]) == 0
    lm = tracformer.load(tmp_path / "full")
    assert (lm.model.config.modes, lm.model.config.rank) == (("car",), 0)
    with safe_open(tmp_path / "full" / "model" / "model.safetensors", "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = dict(lm.model.named_parameters())
    assert saved.keys() == weights.keys()
    assert any("embed" in name or "wte" in name for name in saved)


def test_wrong_use_is_one_clear_error(base, data, tmp_path, capsys):
    assert main(["train", f"data={data}", "model.family=causal-lm", f"run={tmp_path}"]) == 2
    assert "use `tracformer adapt`" in capsys.readouterr().err
    assert adapt(base, data, tmp_path / "a", "objective=all-modes", "contexts=") == 2
    assert "causal-lm supports car, ar" in capsys.readouterr().err
    assert adapt(base, data, tmp_path / "b", "model.body=half") == 2
    assert "body is 'half'" in capsys.readouterr().err
    assert main(["adapt", "stories", "--data", str(data), "--out", str(tmp_path / "c")]) == 2
    assert "not a causal language model of transformers" in capsys.readouterr().err


def test_the_preset_is_the_default_of_the_command():
    config = load_config(["init=x", "data=y"], "adapt")
    assert (config.model["family"], config.objective, config.steps) == ("causal-lm", "car", 2000)
    assert json.loads(json.dumps(config.to_dict()))["optimizer"]["schedule"] == "wsd"
