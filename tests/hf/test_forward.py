"""Logits and losses of the `transformers` classes equal the core's; training with Trainer."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import tracformer.hf as hf
from tests.toys import random_batch, small_model
from tracformer import Tracformer
from tracformer.model.batch import Batch

MASK = 7  # the id after the vocabulary of `small_model`


def wrap(core: Tracformer, kind: type = hf.TracformerForMaskedLM) -> hf.TracformerForMaskedLM:
    """The core's weights under transformers' class, in their precision."""
    model = kind(hf.TracformerPretrainedConfig(**core.config.to_dict()), attention="blocked").to(
        core.embedding.weight.dtype
    )
    model.load_state_dict(core.state_dict())
    return model.eval()


def question(core: Tracformer, mode: str) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """A random batch for the core, and the same for transformers."""
    tokens, context, lengths = random_batch(core, 4, 11)
    if mode == "ar":
        context = torch.zeros_like(context)
    inside = torch.arange(11) < lengths[:, None]
    ids, labels = tokens.masked_fill(~context, MASK), tokens.masked_fill(context | ~inside, -100)
    return (
        tokens,
        context,
        lengths,
        {
            "input_ids": ids.masked_fill(~inside, 0),
            "attention_mask": inside.long(),
            "labels": labels,
        },
    )


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_logits_are_the_cores_bit_for_bit(mode: str) -> None:
    core = small_model()
    tokens, context, lengths, inputs = question(core, mode)
    output = wrap(core)(**inputs, mode=mode)
    assert torch.equal(output.logits, core(Batch(tokens, context, lengths), mode))
    assert torch.allclose(output.loss, core.loss(Batch(tokens, context, lengths), mode), rtol=1e-12)


def test_context_names_targets_that_are_spelled_out() -> None:
    core = small_model()
    tokens, context, lengths, inputs = question(core, "car")
    logits = wrap(core)(tokens, inputs["attention_mask"], context=context, mode="car").logits
    assert torch.equal(logits, core(Batch(tokens, context, lengths), "car"))


@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_loss_has_the_cores_gradients(mode: str) -> None:
    core = small_model()
    tokens, context, lengths, inputs = question(core, mode)
    model = wrap(core)
    model(**inputs, mode=mode).loss.backward()
    core.loss(Batch(tokens, context, lengths), mode).backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(
            parameter.grad, core.get_parameter(name).grad, rtol=1e-9, atol=1e-12
        ), name


def test_a_padded_row_equals_the_row_alone() -> None:
    core = small_model()
    *_, lengths, inputs = question(core, "ac")
    model = wrap(core)
    together = model(**inputs).logits
    hidden = wrap(core, hf.TracformerModel)(
        inputs["input_ids"], inputs["attention_mask"]
    ).last_hidden_state
    for row, length in enumerate(lengths.tolist()):
        alone = inputs["input_ids"][row : row + 1, :length]
        assert torch.allclose(
            together[row, :length], model(alone).logits[0], rtol=1e-12, atol=1e-12
        )
        assert torch.allclose(
            hidden[row, :length],
            wrap(core, hf.TracformerModel)(alone).last_hidden_state[0],
            rtol=1e-12,
            atol=1e-12,
        )
        assert not together[row, length:].any()
        assert not hidden[row, length:].any()


def test_hidden_states_give_the_logits() -> None:
    core = small_model()
    *_, inputs = question(core, "ac")
    output = wrap(core, hf.TracformerModel)(inputs["input_ids"], inputs["attention_mask"])
    assert output.last_hidden_state.shape == (4, 11, 8)
    logits = wrap(core)(inputs["input_ids"], inputs["attention_mask"]).logits
    assert torch.allclose(output.last_hidden_state @ core.head.T, logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("modes", "expected"), [(("car", "ac", "ar"), "ac"), (("car", "ar"), "car"), (("ar",), "ar")]
)
def test_default_mode_follows_the_training(modes: tuple[str, ...], expected: str) -> None:
    core = small_model(modes=modes)
    ids = torch.tensor([[1, 2, MASK, 3, 4]])
    logits = wrap(core)(ids).logits
    # whatever stands under the mask, its own logits do not see it
    truth = ids.masked_fill(ids == MASK, 5)
    assert torch.allclose(
        logits[0, 2], core(Batch(truth, ids != MASK), expected)[0, 2], rtol=1e-12, atol=1e-12
    )
    with pytest.raises(ValueError, match="trained for"):
        wrap(small_model(modes=("car",)))(ids, mode="ac")


def test_car_answers_up_to_the_first_unknown_token_and_no_further() -> None:
    model = wrap(small_model(modes=("car",)))
    logits = model(torch.tensor([[1, 2, MASK, 3, 4]])).logits[0]
    assert logits[:3].any(dim=1).all()
    assert not logits[3:].any()
    with pytest.raises(ValueError, match="position 4 of row 0 follows a mask without a label"):
        model(torch.tensor([[1, 2, MASK, 3, MASK]]))
    with pytest.raises(ValueError, match="position 4 of row 0 follows a mask without a label"):
        model(
            torch.tensor([[1, 2, MASK, 3, MASK]]),
            labels=torch.tensor([[-100, -100, -100, -100, 5]]),
        )
    both = model(
        torch.tensor([[1, 2, MASK, 3, MASK]]), labels=torch.tensor([[-100, -100, 6, -100, 5]])
    )
    assert torch.isfinite(both.loss)


def test_loss_is_divided_by_the_labels_of_the_whole_step() -> None:
    core = small_model()
    *_, inputs = question(core, "ac")
    model, count = wrap(core), int((inputs["labels"] != -100).sum())
    whole = model(**inputs, num_items_in_batch=torch.tensor(count)).loss
    parts = [
        model(**{k: v[i : i + 2] for k, v in inputs.items()}, num_items_in_batch=count).loss
        for i in (0, 2)
    ]
    assert torch.allclose(whole, model(**inputs).loss)
    assert torch.allclose(whole, sum(parts))


def test_no_label_is_no_loss() -> None:
    model = wrap(small_model())
    loss = model(torch.tensor([[1, MASK]]), labels=torch.tensor([[-100, -100]])).loss
    loss.backward()
    assert loss == 0.0
    assert not model.norm.weight.grad.any()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"attention_mask": [[0, 1, 1, 1]]},
            "excludes position 0 of row 0.*padding_side = 'right'",
        ),
        ({"attention_mask": [[1, 0, 1, 1]]}, "excludes position 1 of row 0"),
        ({"attention_mask": [[0, 0, 0, 0]]}, "lengths range from 0"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask has shape"),
        ({"labels": [[-100, -100, 7, -100]]}, "label 7 is out of range"),
        (
            {"labels": [[1, -100, 3, -100]]},
            "position 0 of row 0, which is given or padding.*mask_replace_prob",
        ),
        (
            {"labels": [[-100, -100, 3, 1]], "attention_mask": [[1, 1, 1, 0]]},
            "position 3 of row 0, which is given or padding",
        ),
        (
            {"context": [[True, True, True, True]]},
            "context gives position 2 of row 0, where input_ids holds the mask 7",
        ),
        ({"input_ids": [[1, 2, 8, 4]]}, "token id 8 is out of range"),
        ({"mode": "mlm"}, "mode is 'mlm'"),
        ({"token_type_ids": [[0, 0, 1, 1]]}, "no segments"),
        ({"output_attentions": True}, "output_attentions is not supported"),
    ],
)
def test_wrong_inputs_are_named(inputs: dict[str, object], message: str) -> None:
    tensors = {
        name: torch.tensor(value) if isinstance(value, list) else value
        for name, value in inputs.items()
    }
    with pytest.raises(ValueError, match=message):
        wrap(small_model())(**{"input_ids": torch.tensor([[1, 2, MASK, 4]]), **tensors})


def test_return_dict_false_gives_a_tuple() -> None:
    model, ids = wrap(small_model()), torch.tensor([[1, MASK, 2]])
    (logits,) = model(ids, return_dict=False)
    assert torch.equal(logits, model(ids).logits)


def test_core_is_the_same_model() -> None:
    core = small_model()
    tokens, context, lengths, _ = question(core, "car")
    model = wrap(core)
    assert torch.equal(
        model.core.log_prob(Batch(tokens, context, lengths), "car"),
        core.log_prob(Batch(tokens, context, lengths), "car"),
    )
    assert model.core.embedding is model.embedding
    assert model.train().core.training
    assert not model.eval().core.training


def test_fill_mask_pipeline(folder: Path, core: Tracformer) -> None:
    fill = transformers.pipeline(
        "fill-mask", model=str(folder), model_kwargs={"attention": "blocked"}
    )
    (best, *_), ids = fill("ab<|mask|>d", top_k=3), torch.tensor([[0, 1, MASK, 3]])
    probabilities = (
        core(Batch(ids.masked_fill(ids == MASK, 0), ids != MASK), "ac")[0, 2].detach().softmax(-1)
    )
    assert best["token"] == int(probabilities.argmax())
    assert best["score"] == pytest.approx(float(probabilities.max()), rel=1e-4)
    assert best["sequence"] == f"ab{best['token_str']}d"
    first, second = fill("a<|mask|>b<|mask|>", top_k=1)
    assert "<|mask|>" in first[0]["sequence"]
    assert "<|mask|>" in second[0]["sequence"]


def load(folder: Path) -> hf.TracformerForMaskedLM:
    return transformers.AutoModelForMaskedLM.from_pretrained(folder, attention="blocked")


def test_checkpointed_gradients_are_equal(folder: Path, core: Tracformer) -> None:
    tokens, context, _ = random_batch(core, 2, 9)
    inputs = {
        "input_ids": tokens.masked_fill(~context, core.config.mask_id),
        "labels": tokens.masked_fill(context, -100),
    }
    plain, sparing = load(folder).train(), load(folder).train()
    sparing.gradient_checkpointing_enable()
    runs: list[object] = []
    sparing.decoder[0].register_forward_pre_hook(lambda *_: runs.append(None))
    for model in (plain, sparing):
        model(**inputs).loss.backward()
    assert len(runs) == 2  # forward, and again in the backward pass
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, sparing.get_parameter(name).grad), name
    sparing.gradient_checkpointing_disable()
    sparing(**inputs).loss.backward()
    assert len(runs) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_layers": 2},
        {"offload": True},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
)
def test_other_kinds_of_checkpointing_are_refused(folder: Path, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="takes no options"):
        load(folder).gradient_checkpointing_enable(**options)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(folder: Path, tmp_path: Path, checkpointing: bool) -> None:
    """Three steps on eight short texts change the weights and lower the loss; the core reads what
    Trainer saved.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    collator = transformers.DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.5, mask_replace_prob=1.0, random_replace_prob=0.0, seed=0
    )
    data = [
        {"input_ids": tokenizer(text)["input_ids"]}
        for text in ["aaaa", "aaaaaaaa", "aaaaaa", "aaa"] * 2
    ]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.05,
        warmup_steps=0,
        gradient_checkpointing=checkpointing,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    model = load(folder)
    trainer = transformers.Trainer(
        model,
        arguments,
        collator,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.8 * before
    trainer.save_model(str(tmp_path / "out"))
    # Trainer adds its own keys
    assert "use_cache" in json.loads((tmp_path / "out" / "config.json").read_text())
    trained = Tracformer.from_pretrained(tmp_path / "out")
    assert torch.equal(trained.embedding.weight, model.embedding.weight)
    assert torch.equal(load(tmp_path / "out").embedding.weight, model.embedding.weight)
