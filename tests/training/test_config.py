import re

import pytest

from tracformer.training.train_config import (
    TrainConfig,
    from_dict,
    load_config,
    preset_names,
    read_preset,
)


def test_defaults_are_the_papers() -> None:
    optimizer = TrainConfig().optimizer
    assert (optimizer.lr, optimizer.final_lr, optimizer.beta1, optimizer.beta2) == (
        6e-4,
        pytest.approx(6e-5),
        0.9,
        0.95,
    )
    assert (optimizer.weight_decay, optimizer.clip) == (0.1, 1.0)


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_and_round_trip(name: str) -> None:
    config = load_config([], name)
    assert from_dict(config.to_dict()) == config
    config.model_config(vocab_size=100)


def test_the_papers_runs() -> None:
    assert {
        f"{data}-{mode}" for data in ("wikitext103", "lambada", "1bw") for mode in ("car", "ac")
    } <= set(preset_names())
    small = load_config([], "wikitext103-car")
    assert (small.steps, small.batch, small.length, small.optimizer.warmup) == (
        30000,
        256,
        1024,
        1000,
    )
    assert (
        small.model_config(50257).n_max,
        small.model_config(50257).dropout,
        small.model_config(50257).modes,
    ) == (16, 0.1, ("car",))
    large = load_config([], "openwebtext-mixed")
    assert (large.steps, large.batch, large.optimizer.warmup) == (600000, 480, 2000)
    # Table 3's trained tokens
    assert large.steps * large.batch * large.length == pytest.approx(295e9, rel=0.01)
    assert (large.model_config(50257).n_max, large.model_config(50257).dropout) == (32, 0.0)


def test_words_change_a_preset() -> None:
    config = load_config(
        [
            "steps=7",
            "optimizer.lr=1e-3",
            "model.d_model=96",
            "model.init_std=4e-2",
            "data=my=file.txt",
            "data.validation=0.10: held.txt",
            "compile=true",
            "run=runs/1",
        ],
        "tiny",
    )
    assert (config.steps, config.optimizer.lr, config.compile) == (7, 1e-3, True)
    assert (config.data.source, config.data.validation) == ("my=file.txt", "0.10: held.txt")
    assert config.run == "runs/1"
    # YAML reads 4e-2 as a string
    assert (config.model["d_model"], config.model["init_std"]) == (96, 0.04)
    assert config.model["preset"] == read_preset("tiny")["model"]["preset"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stpes=7", "unknown option 'stpes'; did you mean 'steps'?"),
        ("lr=1e-3", "unknown option 'lr'; did you mean 'optimizer.lr'?"),
        ("optimizer.warm_up=3", "did you mean 'optimizer.warmup'?"),
        ("model.d_modle=3", "did you mean 'model.d_model'?"),
        ("steps=many", "steps is 'many'; it must be an integer"),
        ("steps=-1", "steps is -1"),
        ("compile=7", "compile is 7; it must be true or false"),
        (
            "optimizer.schedule=linear",
            "optimizer.schedule is 'linear'; it must be one of cosine, wsd",
        ),
        (
            "optimizer.decay=0.2",
            "optimizer.decay is 0.2; leave it out unless optimizer.schedule is wsd",
        ),
        ("optimizer.lr=inf", "optimizer.lr is inf; it must be finite and more than 0"),
        ("model.vocab_size=3", "model.vocab_size is 3; the tokenizer decides it"),
        ("optimizer.lr=fast", "optimizer.lr is 'fast'; it must be a number"),
        ("optimizer=3", "optimizer is 3; it must be a group of options"),
        ("objective=mlm", "objective is 'mlm'; available: car"),
        ("contexts=spam:p=0.5", "spam"),
        ("keep=1", "keep is 1; it must be at least 2"),
        ("model.preset=huge", "model.preset is 'huge'"),
        ("model.dropout=much", "model.dropout is 'much'; it must be a number"),
        ("model.n_layer=2.5", "model.n_layer is 2.5; it must be an integer"),
        (
            "model={family: mdlm, time_conditioning: perhaps}",
            "model.time_conditioning is 'perhaps'; it must be true or false",
        ),
        ("steps", "'steps' is not of the form key=value"),
        ("eval_contexts=[middle", "eval_contexts=[middle is not YAML at line 1, column 8"),
        ("precision=int3", "precision is 'int3'"),
        ("optimizer.name=sgd", "optimizer.name is 'sgd'; it must be one of adamw, muon"),
        ("model.modes=3", "model.modes is 3; it must be a list"),
        ("eval_contexts=3", "eval_contexts is 3; it must be a list"),
        ("model.preset=[a]", "model.preset is ['a']; it must be a string"),
        (
            "optimizer.weight_decay=inf",
            "optimizer.weight_decay is inf; it must be finite and at least 0",
        ),
        (
            "optimizer.matrix_lr=0.02",
            "optimizer.matrix_lr is 0.02; leave it out unless optimizer.name is muon",
        ),
        ("optimizer.momentum=0.9", "optimizer.momentum is 0.9; leave it out"),
        (
            "data.validation=0.7",
            "validation is '0.7'; it must be a fraction from 0 to 0.5 to hold out, or a file",
        ),
        ("data.validation=", "validation is ''; it must be a fraction"),
    ],
)
def test_bad_words(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config([word])


@pytest.mark.parametrize(
    "contexts", ["[0.1,0.4]&[0.6,0.9]", "[0.25,0.75]", "0.5*[0.25,0.75]+0.5*uniform"]
)
def test_ranges_are_written_as_they_are_named(contexts: str) -> None:
    assert load_config([f"contexts={contexts}"]).contexts == contexts
    assert load_config([f'contexts="{contexts}"']).contexts == contexts


def test_a_key_is_given_once() -> None:
    with pytest.raises(
        ValueError, match=r"steps is given twice, as 'steps=3' and 'steps=4'; give it once$"
    ):
        load_config(["steps=3", "batch=4", "steps=4"])
    for second in ("data=b.txt", "data.source=b.txt"):
        with pytest.raises(
            ValueError,
            match=r"data\.source is given twice; .* write a glob, or run `tracformer prepare A B --out FOLDER`",
        ):
            load_config(["data=a.txt", second])
    # what a preset says may change
    assert load_config(["batch=7", "model.d_model=48"], "tiny").batch == 7


def test_muon() -> None:
    config = load_config(["optimizer.name=muon", "optimizer.lr=1e-3"])
    assert (
        config.optimizer.rate_of_matrices,
        config.optimizer.momentum,
        config.optimizer.nesterov,
    ) == (1e-3, 0.95, True)
    assert from_dict(config.to_dict()) == config
    assert (
        load_config(["optimizer.name=muon", "optimizer.matrix_lr=0.02"]).optimizer.matrix_lr == 0.02
    )
    with pytest.raises(
        ValueError, match=r"optimizer\.matrix_lr is 0\.0; it must be finite and more than 0"
    ):
        load_config(["optimizer.name=muon", "optimizer.matrix_lr=0"])


def test_bad_presets() -> None:
    with pytest.raises(ValueError, match=r"preset is 'wikitext'; available: .*wikitext103-car"):
        load_config([], "wikitext")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        load_config([], "nowhere.yaml")
