import json
from pathlib import Path

import pytest
import torch
import transformers

import tracformer.hf as hf
from tests.helpers import random_batch
from tracformer import Tracformer


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
    # Trainer leaves keys of its own
    assert "use_cache" in json.loads((tmp_path / "out" / "config.json").read_text())
    trained = Tracformer.from_pretrained(tmp_path / "out")
    assert torch.equal(trained.embedding.weight, model.embedding.weight)
    assert torch.equal(load(tmp_path / "out").embedding.weight, model.embedding.weight)
