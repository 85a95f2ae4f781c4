"""BART, BERT and GPT-2 equal the networks of `transformers`; published GPT-2 weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.toys import random_batch, random_question, small_baseline
from tracformer.baselines import load_model
from tracformer.baselines import transformer as dense
from tracformer.baselines.bart import Bart
from tracformer.baselines.bert import Bert
from tracformer.baselines.gpt2 import GPT2, GPT2Fim
from tracformer.model.batch import Batch

# ---- GPT-2 that fills in the middle, and published weights

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 12,
}


def masked_batch(length: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, context, and the tokens with every target replaced by the mask, 7."""
    tokens, context, _ = random_question(3, length)
    return tokens, context, tokens.masked_fill(~context, 7)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("tied", [True, False])
def test_bart(tied: bool, norm: str) -> None:
    ours = small_baseline("bart", tied=tied, norm=norm)
    assert isinstance(ours, Bart)
    kind = "MBart" if norm == "pre" else "Bart"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=8,
        d_model=8,
        max_position_embeddings=12,
        **{
            f"{half}_{what}": n
            for half in ("encoder", "decoder")
            for what, n in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
        },
        decoder_start_token_id=7,
        pad_token_id=None,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config).double().eval()
    weights = {f"model.{name}": tensor for name, tensor in ours.network.state_dict().items()}
    head = torch.cat((ours.head, torch.zeros(1, 8)))  # a row for the mask, which we never predict
    missing, unexpected = theirs.load_state_dict(
        {**weights, "lm_head.weight": ours.network.shared.weight if tied else head}, strict=False
    )
    assert missing == ["final_logits_bias"]
    assert not unexpected
    tokens, context, masked = masked_batch()
    start = torch.full((3, 1), 7)
    expected = theirs(
        input_ids=masked, decoder_input_ids=torch.cat((start, tokens[:, :-1]), 1)
    ).logits[..., :7]
    torch.testing.assert_close(
        ours(Batch(tokens, context), "car")[~context], expected[~context], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("tied", [True, False])
def test_bert(tied: bool, norm: str) -> None:
    ours = small_baseline("bert", tied=tied, norm=norm)
    assert isinstance(ours, Bert)
    kind = "RobertaPreLayerNorm" if norm == "pre" else "Bert"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=8,
        intermediate_size=32,
        type_vocab_size=1,
        tie_word_embeddings=tied,
        pad_token_id=None,
        attn_implementation="eager",
        **SHAPE,
    )
    theirs = getattr(transformers, f"{kind}ForMaskedLM")(config).double().eval()
    theirs.load_state_dict(ours.network.state_dict())
    tokens, context, masked = masked_batch()
    places = torch.arange(masked.shape[1])[None]
    expected = theirs(
        input_ids=masked, attention_mask=torch.ones_like(masked), position_ids=places
    ).logits[..., :7]
    torch.testing.assert_close(
        ours(Batch(tokens, context), "ac")[~context], expected[~context], rtol=0, atol=1e-6
    )


def bare_gpt2(ours: GPT2) -> torch.nn.Module:
    shape = {**SHAPE, "max_position_embeddings": ours.config.positions}
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=ours.config.rows, attn_implementation="eager", **shape)
    )
    theirs.transformer.load_state_dict(ours.network.state_dict())
    return theirs.double().eval()


def test_gpt2() -> None:
    ours = small_baseline("gpt2", bos_id=4)
    assert isinstance(ours, GPT2)
    tokens, context, _ = masked_batch()
    expected = bare_gpt2(ours)(
        input_ids=torch.cat((torch.full((3, 1), 4), tokens[:, :-1]), 1)
    ).logits
    torch.testing.assert_close(ours(Batch(tokens, context), "ar"), expected, rtol=0, atol=1e-6)


def test_gpt2_fim() -> None:
    """The example in the module's docstring, written by hand."""
    ours = small_baseline("gpt2-fim")
    assert isinstance(ours, GPT2Fim)
    a, b, c, d, e, f, g, h = 3, 1, 4, 1, 5, 2, 6, 5
    bos, hole, opening = 6, 7, 8
    tokens = torch.tensor([[a, b, c, d, e, f, g, h]])
    context = torch.tensor([[True, True, False, False, True, True, False, True]])
    reading = [bos, a, b, hole, e, f, hole, h, opening, c, d, opening, g]
    made, slots = ours.reorder(Batch(tokens, context))
    assert made.tolist() == [reading[:-1]]
    assert slots[~context].tolist() == [9, 10, 12]
    logits = bare_gpt2(ours)(input_ids=torch.tensor([reading])).logits[0, :, :7]
    log_prob = ours.log_prob(Batch(tokens, context), "car")
    for position, slot in ((2, 9), (3, 10), (6, 12)):
        expected = logits[slot - 1].log_softmax(-1)[tokens[0, position]]
        assert abs(float((log_prob[0, position] - expected).detach())) < 1e-6
    plain = bare_gpt2(ours)(input_ids=torch.tensor([[bos, a, b, c, d, e, f, g]])).logits[..., :7]
    torch.testing.assert_close(ours(Batch(tokens, context), "ar"), plain, rtol=0, atol=1e-6)


TRAINED = ["bart", "bert", "bert-bidir", "gpt2", "gpt2-fim", "mdlm"]


def loss_and_gradients(family: str, used: str) -> tuple[float, list[torch.Tensor]]:
    model = small_baseline(family)
    mode = model.config.modes[0]
    tokens, context, lengths = random_batch(model, 3, 12, seed=4)
    torch.manual_seed(0)  # diffusion draws its noise
    loss = model.loss(Batch(tokens, context, lengths), mode)
    loss.backward()
    if family != "mdlm":
        assert model.network.config._attn_implementation == used
    return float(loss.detach()), [
        parameter.grad for parameter in model.parameters() if parameter.grad is not None
    ]


@pytest.mark.parametrize("family", TRAINED)
def test_plain_and_fused_attention_agree(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, plain_gradients = loss_and_gradients(family, "eager")
    monkeypatch.setattr(dense, "SHORT", 0)
    fused, fused_gradients = loss_and_gradients(family, "sdpa")
    assert plain == pytest.approx(fused, abs=1e-10)
    assert len(plain_gradients) == len(fused_gradients) > 0
    for one, other in zip(plain_gradients, fused_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_plain_attention_only_for_short_training_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert dense.trains_faster_plain(cpu, dense.SHORT)
    assert not dense.trains_faster_plain(cpu, dense.SHORT + 1)
    assert not dense.trains_faster_plain(torch.device("cuda"), 8)
    with torch.no_grad():
        assert not dense.trains_faster_plain(cpu, 8)


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
