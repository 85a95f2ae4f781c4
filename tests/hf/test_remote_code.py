"""The code in model folders computes what this library computes, without this library."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tracformer
from tests.toys import random_batch, small_model
from tracformer import Batch, Tracformer
from tracformer.cli import main
from tracformer.data import Tokenizer
from tracformer.model import storage
from tracformer.model.modeling_tracformer import (
    TracformerHubConfig,
    TracformerHubForMaskedLM,
    TracformerHubModel,
)

VARIANTS = [
    {},
    {"n_layer": 5, "n_max": 4},
    {"key_set": "rounded", "n_max": 3, "n_layer": 5},
    {"encoder": "full"},
    {"decoder": "dense"},
    {"decoder": "neighbours"},
    {"rotary_base": 100.0, "n_head": 1, "max_length": 13},
    {"columns": True, "max_length": 13},
]
# The library must not be importable; nor may the code reach it through an installed package.
ALONE = """
import sys
sys.modules["tracformer"] = None
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, pipeline

folder = sys.argv[1]
saved = torch.load(folder + "/expected.pt", weights_only=True)
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    logits = model(saved["tokens"], mode="ac", context=saved["context"]).logits
    states = AutoModel.from_pretrained(folder, trust_remote_code=True)(saved["tokens"]).last_hidden_state
assert (logits - saved["logits"]).abs().max() < 1e-5, (logits - saved["logits"]).abs().max()
assert states.shape == (*saved["tokens"].shape, model.config.d_model)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
ids = tokenizer("ab" + 3 * tokenizer.mask_token + "f", return_tensors="pt").input_ids
filled = model.infill(ids, temperature=0, forbidden=[tokenizer.eos_token_id])
assert filled.sequences.tolist() == saved["filled"].tolist()
assert (filled.log_probs - saved["log_prob"]).abs().max() < 1e-5
guesses = pipeline("fill-mask", model=folder, trust_remote_code=True)("ab<|mask|>f", top_k=2)
assert len(guesses) == 2
model.save_pretrained(folder + "/again")
"""


def hub_model(core: Tracformer) -> TracformerHubForMaskedLM:
    """Return the model of the code in folders, with the weights of `core`."""
    model = TracformerHubForMaskedLM(TracformerHubConfig(**core.config.to_dict())).double()
    model.load_state_dict(core.state_dict())
    return model.eval()


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_logits_loss_and_gradients_equal_the_reference(changes: dict, mode: str) -> None:
    core = small_model("reference", **changes)
    tokens, context, lengths = random_batch(core, 3, 13)
    lengths = torch.full_like(lengths, 13) if core.config.columns else lengths
    batch = Batch(tokens, context, lengths)
    model = hub_model(core)
    inside = torch.arange(13) < lengths[:, None]
    labels = tokens.masked_fill(context | ~inside, -100)
    hidden = tokens.masked_fill(~context & inside, core.config.mask_id)
    out = model(hidden, attention_mask=inside, labels=labels, mode=mode)
    torch.testing.assert_close(
        out.logits[inside], core(batch, mode=mode)[inside], rtol=0, atol=1e-12
    )
    out.loss.backward()
    loss = core.loss(batch, mode=mode)
    loss.backward()
    torch.testing.assert_close(out.loss, loss)
    for name, parameter in model.named_parameters():
        expected = core.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=1e-10)


def test_greedy_fills_and_their_probability_equal_the_library(core: Tracformer) -> None:
    core = core.double()
    tokens, context, lengths = random_batch(core, 4, 11, seed=5)
    inside = torch.arange(11) < lengths[:, None]
    hidden = tokens.masked_fill(~context & inside, core.config.mask_id)
    sampler = tracformer.Sampler(temperature=0.0)
    model = hub_model(core)
    filled = model.infill(hidden, inside, temperature=0)
    expected = tracformer.fill(core, Batch(tokens, context, lengths), mode="car", sampler=sampler)
    assert torch.equal(filled.sequences[inside], expected.tokens[inside])
    probability = core.log_prob(Batch(filled.sequences, context, lengths), mode="car")
    torch.testing.assert_close(filled.log_probs.double(), probability.sum(1), rtol=0, atol=1e-5)


def test_samples_follow_the_distribution(core: Tracformer) -> None:
    model = hub_model(core)
    row = torch.tensor([[1, 2, core.config.mask_id, 4]])
    with torch.no_grad():
        p = model(row, mode="car").logits[0, 2].softmax(-1)
    drawn = model.infill(row.repeat(4000, 1), generator=torch.Generator().manual_seed(0))
    shares = drawn.sequences[:, 2].bincount(minlength=7) / 4000
    torch.testing.assert_close(shares.double(), p, rtol=0, atol=0.03)
    best = int(p.argmax())
    assert set(model.infill(row.repeat(50, 1), top_p=0.01).sequences[:, 2].tolist()) == {best}
    assert best not in model.infill(row.repeat(50, 1), forbidden=[best, None]).sequences[:, 2]


def test_bad_inputs_are_errors(core: Tracformer) -> None:
    model = hub_model(small_model(modes=("ac",)))
    mask = model.config.mask_id
    ids = torch.tensor([[1, mask, mask, 2]])
    with pytest.raises(ValueError, match="mode is 'car'; trained modes: ac"):
        model.infill(ids, mode="car")
    with pytest.raises(ValueError, match=r"T in 1\.\.16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="padding must be on the right"):
        model(ids, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    with pytest.raises(ValueError, match="top_p 0; temperature"):
        model.infill(ids, top_p=0)
    with pytest.raises(ValueError, match="labels must be -100"):
        model(ids, labels=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="call infill"):
        hub_model(core)(ids, mode="car")


def test_an_export_works_where_tracformer_is_not_importable(
    folder: Path, core: Tracformer, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    target = tmp_path / "export"
    assert main(["export", str(folder), "--hf", str(target), "--license", "mit"]) == 0
    assert "license: mit" in (target / "README.md").read_text()
    assert (target / storage.CODE_FILE).stat().st_size < 100_000
    tokens, context, _ = random_batch(core, 3, 13)
    ids = torch.tensor([[*tokenizer.encode("ab"), 0, 0, 0, *tokenizer.encode("f")]])
    given = torch.tensor([[True, True, False, False, False, True]])
    sampler = tracformer.Sampler(temperature=0.0, banned=(tokenizer.eot_id,))
    filled = tracformer.fill(core, Batch(ids, given), mode="car", sampler=sampler).tokens
    with torch.no_grad():
        expected = {
            "tokens": tokens,
            "context": context,
            "logits": core(Batch(tokens, context), mode="ac"),
            "filled": filled,
            "log_prob": core.log_prob(Batch(filled, given), mode="car").sum(),
        }
    torch.save(expected, target / "expected.pt")
    environment = {"HF_HOME": str(tmp_path), "PATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(target)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # what transformers writes with the code, this library reads
    again = Tracformer.from_pretrained(target / "again")
    assert again.config == core.config
    assert all(
        torch.equal(a, b) for a, b in zip(again.parameters(), core.parameters(), strict=True)
    )


def test_saved_folders_have_the_code(folder: Path, core: Tracformer) -> None:
    document = json.loads((folder / "config.json").read_text())
    names = {name.removeprefix("modeling_tracformer.") for name in document["auto_map"].values()}
    assert names == {
        kind.__name__
        for kind in (TracformerHubConfig, TracformerHubModel, TracformerHubForMaskedLM)
    }
    assert (folder / storage.CODE_FILE).read_bytes() == storage.CODE.read_bytes()


def test_only_tracformers_are_exported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["export", str(folder), "--hf", str(tmp_path / "full")]) == 2
    assert "is not an empty folder; give a new folder" in capsys.readouterr().err
    document = json.loads((folder / "config.json").read_text())
    for family, instead in (("mdlm", "for tracformer.load"), ("llama", "AutoModel reads")):
        changed = {**document, "model_type": family, "architectures": []}
        (folder / "config.json").write_text(json.dumps(changed))
        assert main(["export", str(folder), "--hf", str(tmp_path / "new")]) == 2
        error = capsys.readouterr().err
        assert f"is a model of type '{family}'; only Tracformers can be exported" in error
        assert instead in error
        assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
