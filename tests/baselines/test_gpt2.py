"""GPT-2 that fills in the middle, and published GPT-2 weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.toys import random_question, small_baseline
from tracformer.baselines import load_model
from tracformer.baselines.bart import Bart
from tracformer.baselines.gpt2 import GPT2, GPT2Fim
from tracformer.model.batch import Batch


def test_one_hole_is_prefix_suffix_middle() -> None:
    model = small_baseline("gpt2-fim")
    assert isinstance(model, GPT2Fim)
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    for first, last, reading in (
        (1, 3, [6, 1, 7, 4, 5, 8, 2]),
        (0, 2, [6, 7, 3, 4, 5, 8, 1]),
        (3, 5, [6, 1, 2, 3, 7, 8, 4]),
        (0, 5, [6, 7, 8, 1, 2, 3, 4]),
    ):
        context = (torch.arange(5) < first) | (torch.arange(5) >= last)
        assert model.reorder(Batch(tokens, context[None]))[0].tolist() == [reading]


def test_readings_of_a_batch_are_those_of_its_rows() -> None:
    model = small_baseline("gpt2-fim")
    assert isinstance(model, GPT2Fim)
    tokens, context, lengths = random_question(20, 12)
    context[1] = True  # a row without targets
    made, slots = model.reorder(Batch(tokens, context, lengths))
    for row, length in enumerate(lengths.tolist()):
        alone, own = model.reorder(
            Batch(tokens[row : row + 1, :length], context[row : row + 1, :length])
        )
        assert made[row, : alone.shape[1]].tolist() == alone[0].tolist()
        target = ~context[row, :length]
        assert slots[row, :length][target].tolist() == own[0][target].tolist()


def test_the_length_of_a_hole_is_not_visible_inside_it() -> None:
    model = small_baseline("gpt2-fim")
    short, long = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[1, 2, 3, 6, 6, 4, 5]])
    first = model(Batch(short, torch.tensor([[True, False, False, True, True]])), "car")[0, 1:3]
    second = model(
        Batch(long, torch.tensor([[True, False, False, False, False, True, True]])), "car"
    )[0, 1:3]
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_every_pattern_has_positions_by_default_and_too_many_holes_are_refused() -> None:
    tokens = torch.zeros(1, 11, dtype=torch.int64)
    context = torch.arange(11)[None] % 2 == 1
    small_baseline("gpt2-fim", max_length=11).log_prob(Batch(tokens, context), "car")
    model = small_baseline("gpt2-fim", max_length=11, max_holes=5)
    with pytest.raises(
        ValueError,
        match=r"11 tokens with 6 holes takes 23 positions; this model has 21 \(max_length 11 \+ 2 max_holes 5\)",
    ):
        model.log_prob(Batch(tokens, context), "car")
    # a shorter text leaves room for its markers
    model.log_prob(Batch(tokens[:, :9], context[:, :9]), "car")


transformers = pytest.importorskip("transformers")


def publish(folder: Path, **changes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    values = {
        "vocab_size": 7,
        "n_positions": 12,
        "n_embd": 8,
        "n_layer": 2,
        "n_head": 2,
        "initializer_range": 0.4,
        "bos_token_id": 6,
    }
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**values, **changes})).eval()
    model.save_pretrained(folder)
    return model


def edit_config(folder: Path, **changes: Any) -> None:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, **changes}))


def edit_weights(folder: Path, **changes: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **changes}, folder / "model.safetensors", metadata={"format": "pt"})


def unprefixed(folder: Path) -> dict[str, torch.Tensor]:
    """As in the first published files: no prefix, and the causal mask beside the weights."""
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 12, 12).tril()
        tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    return tensors


@pytest.mark.parametrize("layout", ["as written", "no prefix", "pickle", "pickle with head"])
def test_published_folders_give_the_same_logits(layout: str, tmp_path: Path) -> None:
    theirs = publish(tmp_path)
    file = tmp_path / "model.safetensors"
    if layout == "no prefix":
        save_file(unprefixed(tmp_path), file, metadata={"format": "pt"})
    elif layout == "pickle":
        torch.save(unprefixed(tmp_path), tmp_path / "pytorch_model.bin")
        file.unlink()
    elif layout == "pickle with head":
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
        file.unlink()
    ours = load_model(tmp_path)
    assert isinstance(ours, GPT2)
    assert ours.config.modes == ("ar",)
    tokens, context, _ = random_question(3, 12)
    with torch.no_grad():  # the same attention in both
        expected = theirs(input_ids=torch.cat((torch.full((3, 1), 6), tokens[:, :-1]), 1)).logits
        torch.testing.assert_close(ours(Batch(tokens, context), "ar"), expected, rtol=0, atol=1e-6)


def test_published_weights_are_saved_in_our_format(tmp_path: Path) -> None:
    publish(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    ours.save_pretrained(tmp_path / "ours")
    again = load_model(tmp_path / "ours")
    assert again.config == ours.config
    tokens, context, _ = random_question(2, 12)
    assert torch.equal(again(Batch(tokens, context), "ar"), ours(Batch(tokens, context), "ar"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"activation_function": "relu"},
            "activation_function is 'relu'; only 'gelu_new' is supported",
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"n_inner": 20}, r"n_inner is 20; only 4 \* n_embd = 32"),
        ({"n_layer": "two"}, "n_layer is 'two'; it must be a positive integer"),
        (
            {"vocab_size": 9},
            r"wte.weight has shape \(7, 8\) where the configuration calls for \(9, 8\)",
        ),
        ({"n_layer": 3}, "h.2.ln_1.weight is missing"),
        ({"bos_token_id": 50256}, "bos_id is 50256; it must lie in 0..6"),
    ],
)
def test_unsupported_configurations_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    publish(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_unknown_tensors_and_another_head_are_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    edit_weights(tmp_path, **{"score.weight": torch.zeros(2, 8)})
    with pytest.raises(ValueError, match=r"score.weight is unexpected"):
        load_model(tmp_path)
    publish(tmp_path)
    edit_weights(tmp_path, **{"lm_head.weight": torch.zeros(7, 8)})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from wte.weight"):
        load_model(tmp_path)


def test_other_systems_refuse_a_published_gpt2(tmp_path: Path) -> None:
    publish(tmp_path)
    for kind in (Bart, GPT2Fim):
        with pytest.raises(ValueError, match=r"model of type 'gpt2'; expected '(bart|gpt2-fim)'"):
            kind.from_pretrained(tmp_path)


class RunsCode:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code ran",)


def test_damaged_or_unsafe_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "aside")
    with pytest.raises(
        FileNotFoundError, match=r"no weights: there is no model.safetensors or pytorch_model.bin"
    ):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="split into parts"):
        load_model(tmp_path)
    torch.save({"wte.weight": RunsCode()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError,
        match=r"could then run code when read.*best as model.safetensors.*Reason: .*GLOBAL print",
    ):
        load_model(tmp_path)
    assert "code ran" not in capsys.readouterr().out
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="does not hold tensors by name"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(ValueError, match="damaged"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        load_model(tmp_path)
