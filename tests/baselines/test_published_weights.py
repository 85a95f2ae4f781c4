"""Published weights and training checkpoints of SEDD and MDLM."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

import tracformer
from tests.baselines.literal import dit_logits, sedd_loss, sigma_of
from tests.baselines.test_pickle_reader import (
    OMEGACONF,
    Calls,
    foreign,
    omegaconf_nodes,
    with_state,
)
from tests.toys import random_question, small_diffusion
from tracformer.baselines import load_model
from tracformer.baselines.diffusion import DiffusionModel
from tracformer.baselines.mdlm import MDLMConfig
from tracformer.baselines.published import load_mdlm, load_sedd
from tracformer.data import build_tokenizer
from tracformer.model.batch import Batch

SHAPE = {"hidden_size": 8, "cond_dim": 6, "length": 12, "n_blocks": 2, "n_heads": 2, "dropout": 0.1}

SEDD_CONFIG: dict[str, Any] = {
    "ngpus": 1,
    "tokens": 7,
    "training": {"batch_size": 512, "ema": 0.9999},
    "graph": {"type": "absorb", "file": "data", "report_all": False},
    "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20},
    "model": {"name": "small", "type": "ddit", "scale_by_sigma": True, **SHAPE},
}

MDLM_CONFIG: dict[str, Any] = {
    "architectures": ["MDLM"],
    "model_type": "mdlm",
    "vocab_size": 8,
    "mask_index": 7,
    "model_length": 12,
    "hidden_dim": 8,
    "cond_dim": 6,
    "n_blocks": 2,
    "n_heads": 2,
    "dropout": 0.1,
    "time_conditioning": False,
    "torch_dtype": "float32",
}

# The tree that MDLM's code keeps in `hyper_parameters`, of its many values those that matter.
MDLM_TREE: dict[str, Any] = {
    "backbone": "dit",
    "parameterization": "subs",
    "time_conditioning": False,
    "T": 0,
    "data": {"train": "text", "tokenizer_name_or_path": "some/tokenizer"},
    "model": {"name": "small", "type": "ddit", "scale_by_sigma": True, **SHAPE},
    "noise": {"type": "loglinear"},
    "training": {"ema": 0.9999, "change_of_variables": False},
    "loader": {"batch_size": "${div_up:${.global_batch_size}, 8}"},
    "wandb": {"tags": ["a", "${noise.type}"], "name": None},
}

LETTERS = {"a": 0, "b": 1, "[MASK]": 2, "c": 3, "d": 4, "e": 5, "f": 6, "[PAD]": 7}


def published(model: DiffusionModel, prefix: str = "") -> dict[str, Tensor]:
    """Weights in float32 and the published order, with the buffer that comes before the blocks."""
    weights: dict[str, Tensor] = {}
    for name, tensor in model.backbone.state_dict().items():
        if name == "blocks.0.norm1.weight":
            frequencies = 1.0 / 10000 ** (torch.arange(0, 4, 2).float() / 4)
            weights[prefix + "rotary_emb.inv_freq"] = frequencies
        weights[prefix + name] = tensor.detach().float()
    return weights


def averages(model: DiffusionModel) -> dict[str, Any]:
    shadow = [parameter.detach().float() for parameter in model.backbone.parameters()]
    return {"decay": 0.9999, "num_updates": 5, "shadow_params": shadow}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_sedd(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    write_config(folder, {**SEDD_CONFIG, **changes})
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def write_mdlm(folder: Path, weights: dict[str, Tensor], **changes: Any) -> Path:
    write_config(folder, {**MDLM_CONFIG, **changes})
    save_file(weights, folder / "model.safetensors")
    return folder


def write_lightning(
    file: Path,
    raw: DiffusionModel,
    averaged: DiffusionModel | None = None,
    tokenizer: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """As MDLM's code writes it: OmegaConf nodes, the tokenizer itself, optimizer and loops."""
    state = {0: {"step": torch.tensor(5.0), "exp_avg": torch.ones(3)}}
    document = {
        "epoch": 0,
        "global_step": 5,
        "pytorch-lightning_version": "2.2.1",
        "state_dict": published(raw, "backbone."),
        "loops": {"fit_loop": {"epoch_progress": {"current": {"completed": 0}}}},
        "optimizer_states": [{"state": state, "param_groups": [{"lr": 3e-4}]}],
        "hparams_name": "kwargs",
        "sampler": {"random_state": torch.get_rng_state()},
    }
    if averaged is not None:
        document["ema"] = averages(averaged)
    with foreign(*OMEGACONF, "dataloader.SomeTokenizer") as (*kinds, some_tokenizer):
        hyper = {"config": omegaconf_nodes({**MDLM_TREE, **changes}, kinds)}
        if tokenizer is not None:
            hyper["tokenizer"] = with_state(some_tokenizer, **tokenizer)
        torch.save({**document, "hyper_parameters": hyper}, file)
    return file


def slow_tokenizer(mask: Any = "[MASK]", **changes: Any) -> dict[str, Any]:
    """The state of a tokenizer such as MDLM's for text8."""
    reverse = {i: token for token, i in LETTERS.items()}
    return {
        "characters": list("abcdef"),
        "_vocab_str_to_int": dict(LETTERS),
        "_vocab_int_to_str": reverse,
        "_added_tokens_encoder": {"[MASK]": 2},
        "_mask_token": mask,
        "model_max_length": 10**30,
        **changes,
    }


def fast_tokenizer(mask: Any, tokens: int = 8) -> dict[str, Any]:
    """The state of a fast tokenizer of transformers 5, around a real one of tokenizers."""
    ids = dict(list(LETTERS.items())[:tokens])
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="a"))
    inner.add_special_tokens(["[PAD]"])  # adds an id if the vocabulary has none
    return {"_tokenizer": inner, "_special_tokens_map": {"bos_token": "a", "mask_token": mask}}


def same(found: DiffusionModel, expected: DiffusionModel) -> bool:
    tokens, context, lengths = random_question(2, 6)

    def values(model: DiffusionModel) -> Tensor:
        return model.double().log_prob(Batch(tokens, context, lengths), "diffusion", draws=3)

    return torch.allclose(values(found), values(expected), atol=1e-5)


def test_published_folders(tmp_path: Path) -> None:
    sedd, mdlm = small_diffusion("sedd"), small_diffusion("mdlm")
    found = load_sedd(write_sedd(tmp_path / "sedd", published(sedd)))
    assert same(found, sedd)
    config = found.config
    assert (config.vocab_size, config.max_length, config.dropout) == (7, 12, 0.1)
    folder = write_mdlm(tmp_path / "mdlm", published(mdlm, "backbone."))
    again = load_mdlm(folder, dtype=torch.float64)
    assert same(again, mdlm)
    assert again.config.modes == ("diffusion", "ac")
    again.save_pretrained(tmp_path / "ours")  # from then on it is a folder like any other
    assert same(type(again).from_pretrained(tmp_path / "ours"), mdlm)


def test_text_level_loading_of_published_folders(tmp_path: Path) -> None:
    """The vocabulary is seven tokens: six letters and the end of text."""
    build_tokenizer("char:abcdef").save(tmp_path / "letters")
    sedd, mdlm = small_diffusion("sedd"), small_diffusion("mdlm")
    for folder, model in (
        (write_sedd(tmp_path / "sedd", published(sedd)), sedd),
        (write_mdlm(tmp_path / "mdlm", published(mdlm, "backbone.")), mdlm),
    ):
        lm = tracformer.load(folder, tokenizer=tmp_path / "letters")
        assert same(lm.model, model)  # type: ignore[arg-type]
        assert len(lm.infill("ab[[3]]cd")[0].text) == 7
        assert lm.score("ab[[fed]]c", mode="diffusion").kind == "bound"
        with pytest.raises(FileNotFoundError, match="has no tokenizer"):
            tracformer.load(folder)


def test_the_published_vocabulary_needs_no_mask(tmp_path: Path) -> None:
    """MDLM's published `config.json` does not name the mask; GPT-2's 50257 tokens imply it."""
    model = small_diffusion("mdlm", vocab_size=50257)
    changes = {"vocab_size": 50258, "mask_index": None}
    folder = write_mdlm(tmp_path, published(model, "backbone."), **changes)
    found = load_model(folder)
    assert found.config.vocab_size == 50257
    assert same(found, model)  # type: ignore[arg-type]


def test_training_files_of_sedd(tmp_path: Path) -> None:
    raw, averaged = small_diffusion("sedd", seed=1), small_diffusion("sedd", seed=2)
    file = write_config(tmp_path, SEDD_CONFIG) / "checkpoint.pth"
    rate = 3e-4 * np.minimum(5 / 2500, 1.0)  # as SEDD's warmup computes it: a numpy.float64
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": rate}]}
    document = {"optimizer": optimizer, "model": published(raw), "step": 5}
    torch.save({**document, "ema": averages(averaged)}, file)
    with pytest.raises(Exception, match="numpy"):
        torch.load(file, weights_only=True)
    reports: list[str] = []
    assert same(load_sedd(file, report=reports.append), averaged)
    assert same(load_sedd(file, ema=False, report=reports.append), raw)
    torch.save(document, file)
    assert same(load_sedd(file, report=reports.append), raw)
    fewer = averages(averaged)["shadow_params"][1:]
    torch.save({**document, "ema": {"shadow_params": fewer}}, file)
    with pytest.raises(ValueError, match=r"checkpoint\.pth: expected .* 30 tensors.*ema=False"):
        load_sedd(file)
    assert same(load_sedd(file, ema=False), raw)
    assert [line.split(": loaded ")[1] for line in reports] == [
        "EMA weights",
        "raw weights",
        "raw weights (the file has no EMA weights)",
    ]


def test_the_log_names_the_weights_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tracformer"):
        load_model(write_sedd(tmp_path, published(small_diffusion("sedd"))))
    assert caplog.messages[0].endswith("loaded raw weights (the file has no EMA weights)")


def test_the_configuration_of_a_run(tmp_path: Path) -> None:
    """Hydra keeps it in the run's folder; files are in `checkpoints` below."""
    for name in (".hydra", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text(yaml.safe_dump(SEDD_CONFIG))
    model = small_diffusion("sedd")
    torch.save({"model": published(model), "step": 5}, tmp_path / "checkpoints" / "c.pth")
    assert same(load_sedd(tmp_path / "checkpoints" / "c.pth"), model)
    (tmp_path / ".hydra" / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config\.yaml is not valid YAML"):
        load_sedd(tmp_path / "checkpoints" / "c.pth")


def test_lightning_files(tmp_path: Path) -> None:
    """All that is needed is in the file: the tree, and a tokenizer without a mask token."""
    raw, averaged = small_diffusion("mdlm", seed=1), small_diffusion("mdlm", seed=2)
    tokenizer = fast_tokenizer(None, tokens=7)
    file = write_lightning(tmp_path / "last.ckpt", raw, averaged, tokenizer)
    with pytest.raises(Exception, match="GLOBAL omegaconf"):
        torch.load(file, weights_only=True)
    found = load_mdlm(file)
    config = MDLMConfig(7, 12, n_layer=2, n_head=2, d_model=8, d_condition=6, dropout=0.1)
    assert found.config == config
    assert same(found, averaged)
    assert same(load_mdlm(file, ema=False), raw)
    assert same(load_mdlm(file, config=config), averaged)
    conditioned = write_lightning(
        tmp_path / "conditioned.ckpt", raw, None, tokenizer, time_conditioning=True
    )
    assert load_mdlm(conditioned).config.time_conditioning


def test_files_without_a_configuration(tmp_path: Path) -> None:
    model = small_diffusion("mdlm")
    file = tmp_path / "last.ckpt"
    torch.save({"state_dict": published(model, "backbone."), "hyper_parameters": {}}, file)
    with pytest.raises(ValueError, match=r"last\.ckpt holds weights without.*pass config="):
        load_mdlm(file)
    assert same(load_mdlm(file, config=model.config), model)  # type: ignore[arg-type]
    sedd = small_diffusion("sedd")
    for document in ({"model": published(sedd)}, {"state_dict": published(sedd, "backbone.")}):
        torch.save(document, file)
        assert same(load_sedd(file, config=sedd.config), sedd)  # type: ignore[arg-type]


def test_sedd_of_mdlms_code(tmp_path: Path) -> None:
    raw, averaged = small_diffusion("sedd", seed=1), small_diffusion("sedd", seed=2)
    changes = {"parameterization": "sedd", "time_conditioning": True, "mask_index": 7}
    file = write_lightning(tmp_path / "last.ckpt", raw, averaged, **changes)
    assert same(load_sedd(file), averaged)
    with pytest.raises(ValueError, match=r"last\.ckpt: hyper_parameters are SEDD's; expected MDLM"):
        load_mdlm(file)
    with pytest.raises(ValueError, match="hyper_parameters are SEDD's; expected MDLM"):
        load_mdlm(file, config=small_diffusion("mdlm").config)  # type: ignore[arg-type]
    write_config(tmp_path, MDLM_CONFIG)
    with pytest.raises(ValueError, match="hyper_parameters are SEDD's; expected MDLM"):
        load_mdlm(file)


def literal_logits(weights: dict[str, Tensor], tokens: list[int], sigma: float) -> Tensor:
    """(T, V) of the network as it was trained, the mask among its V tokens."""
    own = {name.removeprefix("backbone."): value.double() for name, value in weights.items()}
    return dit_logits(own, 2, tokens, sigma)


def literal_log_prob(weights: dict[str, Tensor], tokens: list[int], hidden: list[bool]) -> Tensor:
    """(T,) MDLM's SUBS with mask token 2: its logit to minus infinity, then log-softmax."""
    read = [2 if masked else token for token, masked in zip(tokens, hidden, strict=True)]
    logits = literal_logits(weights, read, 0.0)
    logits[:, 2] = -math.inf
    values = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)]
    return torch.where(torch.tensor(hidden), values, 0.0)


TOKENS = torch.tensor([[0, 7, 3, 1, 6, 4, 2]])  # ids on both sides of the mask's, and its own

CONTEXT = torch.tensor([[True, False, False, True, False, False, True]])


@pytest.mark.parametrize("source", ["slow", "added", "fast", "config", "argument"])
def test_a_mask_token_of_the_tokenizer(source: str, tmp_path: Path) -> None:
    """All ids keep their meaning, and log-probabilities are those of the literal computation."""
    model = small_diffusion("mdlm")  # 8 rows, here all tokens of the tokenizer
    made = {
        "slow": slow_tokenizer(),
        "added": slow_tokenizer(tokenizers.AddedToken("[MASK]", special=True)),
        "fast": fast_tokenizer("[MASK]"),
    }
    changes = {"mask_index": 2} if source == "config" else {}
    file = write_lightning(tmp_path / "last.ckpt", model, None, made.get(source), **changes)
    given = {"mask_token_id": 2} if source == "argument" else {}
    found = load_mdlm(file, dtype=torch.float64, **given)  # type: ignore[arg-type]
    assert found.config.vocab_size == 8
    weights = published(model, "backbone.")
    expected = literal_log_prob(weights, TOKENS[0].tolist(), (~CONTEXT[0]).tolist())
    values = found.log_prob(Batch(TOKENS, CONTEXT), "ac")[0].detach()
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-9)
    everything = found.logits_at(Batch(TOKENS, CONTEXT), "ac", ~CONTEXT).softmax(-1)
    assert everything.shape == (4, 8)
    assert not everything[:, 2].any()
    filled = found.ancestral(Batch(TOKENS.repeat(50, 1), CONTEXT.repeat(50, 1))).tokens
    assert not (filled[:, :6] == 2).any()
    if source == "argument":  # with the last row as the mask it would be another model
        wrong = load_mdlm(file, dtype=torch.float64, mask_token_id=7)
        shown = TOKENS.clamp(max=6)
        assert (wrong.log_prob(Batch(shown, CONTEXT), "ac")[0] - values).abs().max() > 0.1


def test_a_model_with_its_own_mask_is_saved_and_read_in_narrow_types(tmp_path: Path) -> None:
    model = small_diffusion("mdlm")
    file = write_lightning(tmp_path / "last.ckpt", model, None, slow_tokenizer())
    found = load_mdlm(file)
    found.save_pretrained(tmp_path / "ours")
    again = load_model(tmp_path / "ours").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in found.state_dict().items())
    for dtype in (torch.bfloat16, torch.float16):
        narrow = load_mdlm(file, dtype=dtype)
        assert torch.isfinite(narrow.head_bias).all()  # type: ignore[arg-type]
        probabilities = narrow.logits_at(Batch(TOKENS, CONTEXT), "ac", ~CONTEXT).float().softmax(-1)
        assert not probabilities[:, 2].any()


def test_a_mask_token_that_is_the_last(tmp_path: Path) -> None:
    """Both readings give the same probabilities, but the tokenizer has one id more."""
    model = small_diffusion("mdlm")
    last = {**LETTERS, "[MASK]": 7, "[PAD]": 2}
    tokenizer = slow_tokenizer(_vocab_str_to_int=last)
    own = load_mdlm(write_lightning(tmp_path / "a.ckpt", model, None, tokenizer))
    appended = load_mdlm(write_lightning(tmp_path / "b.ckpt", model), mask_token_id=7)
    assert (own.config.vocab_size, appended.config.vocab_size) == (8, 7)
    assert same(own, model)
    assert same(appended, model)


def test_sedd_with_a_mask_token_of_the_tokenizer(tmp_path: Path) -> None:
    """Its scores are normalised by the number of real tokens: 7 of 8 rows."""
    model, t = small_diffusion("sedd"), 0.4
    changes = {"parameterization": "sedd", "time_conditioning": True}
    file = write_lightning(tmp_path / "last.ckpt", model, None, slow_tokenizer(), **changes)
    found = load_sedd(file, dtype=torch.float64)
    read = torch.where(CONTEXT, TOKENS, 2)[0].tolist()
    logits = literal_logits(published(model, "backbone."), read, sigma_of(t))
    order = [0, 1, 3, 4, 5, 6, 7, 2]  # the literal loss has the mask last
    time = torch.tensor([t], dtype=torch.float64)
    costs = found.costs(TOKENS, ~CONTEXT, torch.tensor([7]), time)[0].detach()
    for position in (1, 2, 4, 5):
        target = order.index(int(TOKENS[0, position]))
        expected = sedd_loss(logits[position][order], target, t)
        assert abs(float(costs[position]) / t - float(expected)) < 1e-9


@pytest.mark.parametrize(
    ("tokenizer", "changes", "given", "message"),
    [
        (None, {}, None, "does not say which of its 8 rows is the mask. Pass mask_token_id="),
        (slow_tokenizer(), {}, 3, "its tokenizer gives 2; the argument mask_token_id gives 3"),
        (slow_tokenizer(), {"mask_index": 7}, None, "tokenizer gives 2; mask_index of .* gives 7"),
        (None, {}, 8, "expected one row in 0..7: the argument mask_token_id gives 8"),
        (None, {"mask_index": "2"}, None, "gives '2'"),
        (slow_tokenizer(None), {}, None, r"8 tokens, mask token None\) calls for 9"),
        (fast_tokenizer(None, 5), {}, None, r"has 8 rows .*5 tokens, .* calls for 6"),
        (fast_tokenizer("[MASK]", 7), {}, None, r"7 tokens, mask token 2\) calls for 7"),
        (None, {"data": {"tokenizer_name_or_path": "gpt2"}}, None, "calls for 50258"),
        (None, {"data": {"tokenizer_name_or_path": "bert-base-uncased"}}, None, "calls for 30522"),
        (slow_tokenizer("[ABSENT]"), {}, None, "does not say which"),
    ],
)
def test_an_unclear_mask_is_refused(
    tokenizer: dict[str, Any] | None,
    changes: dict[str, Any],
    given: int | None,
    message: str,
    tmp_path: Path,
) -> None:
    model = small_diffusion("mdlm")
    file = write_lightning(tmp_path / "last.ckpt", model, None, tokenizer, **changes)
    with pytest.raises(ValueError, match=rf"last\.ckpt.*{message}"):
        load_mdlm(file, mask_token_id=given)


def test_a_tokenizer_known_by_its_name(tmp_path: Path) -> None:
    model = small_diffusion("mdlm", vocab_size=34)
    changes = {"data": {"tokenizer_name_or_path": "text8"}}
    found = load_mdlm(write_lightning(tmp_path / "last.ckpt", model, **changes))
    assert found.config.vocab_size == 35
    table = found.dit.vocab_embed.embedding
    assert torch.equal(table[-1], table[4])


def test_a_given_configuration_says_where_the_mask_is(tmp_path: Path) -> None:
    model = small_diffusion("mdlm")
    file = write_lightning(tmp_path / "last.ckpt", model)
    assert same(load_mdlm(file, config=MDLMConfig.from_dict(model.config.to_dict())), model)
    changed = MDLMConfig.from_dict({**model.config.to_dict(), "vocab_size": 8})
    assert load_mdlm(file, config=changed, mask_token_id=2).config.vocab_size == 8
    with pytest.raises(ValueError, match="does not say"):
        load_mdlm(file, config=changed)
    with pytest.raises(ValueError, match="ambiguous"):
        load_mdlm(file, config=model.config, mask_token_id=2)  # type: ignore[arg-type]
    changed = MDLMConfig.from_dict({**model.config.to_dict(), "vocab_size": 9})
    with pytest.raises(ValueError, match=r"has 8 rows in vocab_embed\.embedding; config calls"):
        load_mdlm(file, config=changed, mask_token_id=2)


def test_another_family_is_refused(tmp_path: Path) -> None:
    sedd = write_sedd(tmp_path / "sedd", published(small_diffusion("sedd")))
    mdlm = write_mdlm(tmp_path / "mdlm", published(small_diffusion("mdlm"), "backbone."))
    with pytest.raises(ValueError, match=r"config\.json is MDLM's; expected SEDD's"):
        load_sedd(mdlm)
    with pytest.raises(ValueError, match=r"config\.json is SEDD's; expected MDLM's"):
        load_mdlm(sedd)
    small_diffusion("sedd").save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"another system .*model_type='sedd'\); expected SEDD's"):
        load_sedd(tmp_path / "ours")
    with pytest.raises(ValueError, match=r"\.bin: expected names without 'backbone\.'; found back"):
        load_sedd(write_sedd(tmp_path / "a", published(small_diffusion("sedd"), "backbone.")))
    with pytest.raises(ValueError, match=r"expected names under 'backbone\.'; found blocks"):
        load_mdlm(write_mdlm(tmp_path / "b", published(small_diffusion("mdlm"))))
    file = write_lightning(tmp_path / "d3pm.ckpt", small_diffusion("mdlm"), parameterization="d3pm")
    with pytest.raises(ValueError, match="parameterization='d3pm'"):
        load_mdlm(file)


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("graph", "type", "uniform"),
        ("noise", "type", "geometric"),
        ("model", "scale_by_sigma", False),
    ],
)
def test_another_process_is_refused(group: str, key: str, value: object, tmp_path: Path) -> None:
    changes = {group: {**SEDD_CONFIG[group], key: value}}
    folder = write_sedd(tmp_path, published(small_diffusion("sedd")), **changes)
    with pytest.raises(ValueError, match=f"{group}.{key} is {value!r}; only"):
        load_sedd(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "dimamba"}, "backbone is 'dimamba'; only 'dit'"),
        ({"noise": {"type": "cosine"}}, r"noise\.type is 'cosine'; only 'loglinear'"),
        ({"parameterization": "sedd"}, "time_conditioning is False; only True"),
        (
            {"time_conditioning": True, "training": {"change_of_variables": True}},
            r"training\.change_of_variables is True; only False",
        ),
        ({"model": {"hidden_size": 8}}, r" has no model\.length"),
        ({"model": {**MDLM_TREE["model"], "length": "${x}"}}, r"max_length is '\$\{x\}'"),
    ],
)
def test_another_training_is_refused(changes: Any, message: str, tmp_path: Path) -> None:
    sedd = changes.get("parameterization") == "sedd"
    file = write_lightning(tmp_path / "last.ckpt", small_diffusion("mdlm"), mask_index=7, **changes)
    with pytest.raises(ValueError, match=rf"last\.ckpt: hyper_parameters.*{message}"):
        (load_sedd if sedd else load_mdlm)(file)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    weights = published(small_diffusion("sedd"))
    with pytest.raises(ValueError, match=r"\.bin has 8 rows in .*tokens of .* calls for 10, the"):
        load_sedd(write_sedd(tmp_path, weights, tokens=9))
    with pytest.raises(ValueError, match=r"\.bin does not .*output_layer\.extra is unexpected"):
        load_sedd(write_sedd(tmp_path, {**weights, "output_layer.extra": torch.ones(1)}))
    for name in ("blocks.1.attn_out.weight", "vocab_embed.embedding"):
        some = {other: tensor for other, tensor in weights.items() if other != name}
        with pytest.raises(ValueError, match=rf"\.bin.*{name}"):
            load_sedd(write_sedd(tmp_path, some))
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.0\.bias has shape \(3,\) where"):
        load_sedd(write_sedd(tmp_path, {**weights, "blocks.0.mlp.0.bias": torch.ones(3)}))
    for key, value, message in (
        ("n_heads", 4, "is n_heads right"),
        ("n_heads", None, r"has no model\.n_heads"),
        ("n_blocks", 10**9, "n_layer is 1000000000; it must be at most 1024"),
    ):
        model = {**SEDD_CONFIG["model"], key: value}
        with pytest.raises(ValueError, match=message):
            load_sedd(write_sedd(tmp_path, weights, model=model))


@pytest.mark.parametrize("place", ["state_dict", "hyper_parameters", "extra", "ema"])
def test_code_in_a_checkpoint_is_not_run(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights beside it are read, unless it stands in the place of one of them."""
    monkeypatch.chdir(tmp_path)
    model, trap = small_diffusion("mdlm"), Calls(os.system, "touch sprung")
    document: dict[str, Any] = {
        "state_dict": published(model, "backbone."),
        "hyper_parameters": {"config": {**MDLM_TREE, "mask_index": 7}},
        "ema": averages(model),
        "extra": {},
    }
    if place == "ema":
        document[place]["shadow_params"][3] = trap
    else:
        document[place]["backbone.trap"] = trap
    torch.save(document, "last.ckpt")
    torch.load("last.ckpt", weights_only=False)
    assert Path("sprung").exists()  # it is a trap
    Path("sprung").unlink()
    if place == "state_dict":
        with pytest.raises(ValueError, match=r"last\.ckpt: .*backbone\.trap is <posix\.system>"):
            load_mdlm("last.ckpt")
    elif place == "ema":
        with pytest.raises(ValueError, match="ema=False"):
            load_mdlm("last.ckpt")
        assert same(load_mdlm("last.ckpt", ema=False), model)
    else:
        assert same(load_mdlm("last.ckpt"), model)
    assert not Path("sprung").exists()


def test_non_tensors_are_refused(tmp_path: Path) -> None:
    weights = published(small_diffusion("sedd"))
    folder = write_sedd(tmp_path, weights)
    for listed in ([1, 2], ["a"] * len(weights), "none", [torch.zeros(1)]):
        document = {"model": weights, "ema": {"shadow_params": listed}}
        torch.save(document, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match="pass ema=False"):
            load_sedd(folder)
    for strange in ({1: torch.zeros(1)}, {"a": 1}, [weights]):
        torch.save(strange, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin.* expected .*tensors"):
            load_sedd(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("vocab_size", "8", "vocab_size is '8'; it must be a positive integer"),
        ("vocab_size", True, "vocab_size is True; it must be a positive integer"),
        ("dropout", "x", "dropout is 'x'; it must be a number"),
        ("time_conditioning", "no", "time_conditioning is 'no'; it must be true or false"),
        ("hidden_dim", 8.5, "d_model is 8.5"),
    ],
)
def test_values_that_make_no_sense_are_refused(
    key: str,
    value: object,
    message: str,
    tmp_path: Path,
) -> None:
    weights = published(small_diffusion("mdlm"), "backbone.")
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        load_mdlm(write_mdlm(tmp_path, weights, **{key: value}))


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no"):
        load_sedd(tmp_path / "nowhere")
    folder = write_mdlm(tmp_path / "mdlm", published(small_diffusion("mdlm"), "backbone."))
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        load_mdlm(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        load_mdlm(folder)
    file = write_lightning(tmp_path / "last.ckpt", small_diffusion("mdlm"), mask_index=7)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged or cut short.*Reason: \w"):
        load_mdlm(file)
