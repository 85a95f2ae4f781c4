"""Systems are registered, listed and trained; sizes of the presets.

`docs/peers.md` explains the differences between sizes."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracformer
from tests.toys import FAMILIES, OWN, SYSTEMS
from tests.training.helpers import SMALL, losses, small, story_data
from tracformer import baselines as families
from tracformer.baselines import Family, find_family, load_model, register
from tracformer.baselines.plaid import Plaid, PlaidConfig
from tracformer.cli import main
from tracformer.model.base import MARGINAL, ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig
from tracformer.training.log import read_log
from tracformer.training.objectives import MaskSampler, parse_objective

pytest.importorskip("transformers")


@dataclass(frozen=True)
class LettersConfig(ModelConfig):
    model_type = "letters"
    possible_modes = ("ac",)
    presets = {"tiny": {"vocab_size": 256, "max_length": 32}}  # noqa: RUF012


class Letters(ConditionalModel):
    """Token frequencies."""

    config_class = LettersConfig
    answers = {"ac": MARGINAL}  # noqa: RUF012

    def __init__(self, config: LettersConfig) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Linear(1, config.vocab_size)

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        rows = wanted.flatten().nonzero()[:, 0]
        return self.table.weight.new_ones(len(rows), 1), rows

    @property
    def head(self) -> Tensor:
        return self.table.weight

    @property
    def head_bias(self) -> Tensor:
        return self.table.bias

    def blocks(self) -> list[nn.Module]:
        return [self.table]

    def embedding_tables(self) -> list[Tensor]:
        return []


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(families, "_families", dict(families._families))
    register(Family("letters", __name__, "Letters", "ac", "letters alone"))
    return "letters"


def test_a_new_system_from_outside(
    registered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = story_data(tmp_path, stories=20), tmp_path / "run"
    words = [
        "model.preset=tiny",
        "length=32",
        "batch=8",
        "steps=30",
        "log_every=1",
        "optimizer.lr=0.1",
        "optimizer.warmup=1",
    ]
    assert (
        main(
            [
                "train",
                f"data={data}",
                f"run={run}",
                f"model.family={registered}",
                "eval_sequences=4",
                *words,
            ]
        )
        == 0
    )
    found = losses(run)
    assert found[-1] < found[0] - 0.5
    lm = tracformer.load(run)
    assert isinstance(lm.model, Letters)
    assert len(lm.infill("to the [[4]] and")[0].spans[0].token_ids) == 4
    scored = lm.score("to the [[king]]")
    assert scored.kind == "marginal"
    expected = torch.log_softmax(lm.model.table.weight[:, 0] + lm.model.table.bias, 0)[
        lm.tokenizer.encode("king")
    ].sum()
    assert scored.log_prob == pytest.approx(expected.item(), abs=1e-4)
    capsys.readouterr()
    assert main(["models", "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert listed[-1]["name"] == registered
    assert listed[-1]["modes"] == {"ac": "marginal"}


def test_systems_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    for words in (
        "tracformer",
        "108.7M",
        "car (exact)",
        "diffusion (bound)",
        "does not see the text after a blank",
    ):
        assert words in out


def test_unknown_systems_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown system 'gpt9'; did you mean 'gpt2'"):
        find_family("gpt9")


PAPER = {  # family: ours and its part without embeddings, the paper's figure in millions
    "bart": (137_656_960, 107_526_400, 138),
    "bert": (149_506_130, 71_522_642, 149),
    "bert-bidir": (170_119_680, 92_137_728, 170),
    "gpt2": (124_439_808, 85_056_000, 124),
    "gpt2-fim": (125_227_776, 85_056_000, None),
    "bart-modern": (103_416_192, 74_467_584, None),
    "bert-modern": (109_478_400, 70_880_256, None),
    "bert-bidir-modern": (130_737_408, 92_139_264, None),
    "ac-gpt": (123_654_912, 85_056_000, None),
    "as-arm": (123_654_144, 85_056_000, None),
    "sigma-gpt": (125_228_544, 85_056_000, None),
    "compact": (123_655_680, 85_056_768, None),
    "aligned": (124_247_040, 85_648_128, None),
}

TIED = {"bert": 110_907_986, "bert-bidir": 131_522_304}


def count(family: str, preset: str, **changes: Any) -> tuple[int, int]:
    """Return the number of all parameters, and of those that are not in embeddings."""
    kind = find_family(family).model_class
    with torch.device("meta"):
        model = kind(kind.config_class.preset(preset, **changes))
    return model.num_parameters(), model.num_parameters(embeddings=False)


@pytest.mark.parametrize("family", PAPER)
def test_paper_sizes(family: str) -> None:
    ours, inner, paper = PAPER[family]
    assert count(family, "paper") == (ours, inner)
    if family in TIED:
        assert count(family, "paper", tied=True) == (TIED[family], inner)
        assert abs(ours / 1e6 - paper) < abs(TIED[family] / 1e6 - paper)  # untied comes nearer


def test_two_separate_encoders_count_as_one_of_twice_the_depth() -> None:
    assert count("bert-bidir", "paper-separate") == (170_121_216, 92_139_264)


@pytest.mark.parametrize("family", ["tracformer", *PAPER])
def test_small_presets_have_equal_sizes(family: str) -> None:
    assert abs(count(family, "tiny")[0] / 1.5e6 - 1) < 0.1
    assert abs(count(family, "mini")[1] / 2.0e6 - 1) < 0.1
    assert abs(count(family, "laptop")[0] / 8.0e6 - 1) < 0.1
    presets = find_family(family).config_class.presets
    for name, vocab_size, length in (
        ("tiny", 256, 128),
        ("mini", 4096, 256),
        ("laptop", 4096, 256),
    ):
        assert (presets[name]["vocab_size"], presets[name]["max_length"]) == (vocab_size, length)


@pytest.mark.parametrize("system", SYSTEMS)
def test_sizes_of_masked_diffusion(system: str) -> None:
    kind = find_family(system).model_class

    def count(preset: str) -> tuple[int, int]:
        with torch.device("meta"):
            model = kind(kind.config_class.preset(preset))
        return model.num_parameters(), model.num_parameters(embeddings=False)

    assert count("paper")[0] == 169_627_218
    assert abs(count("laptop")[0] / 8e6 - 1) < 0.05
    assert abs(count("mini")[1] / 2e6 - 1) < 0.1
    assert kind.config_class.preset("mini").max_length == 256


def test_sizes_of_plaid() -> None:
    def count(preset: str) -> tuple[int, int]:
        with torch.device("meta"):
            model = Plaid(PlaidConfig.preset(preset))
        return model.num_parameters(), model.num_parameters(embeddings=False)

    assert abs(count("laptop")[0] / 8e6 - 1) < 0.05
    assert abs(count("mini")[1] / 2e6 - 1) < 0.1
    assert (PlaidConfig.preset("mini").vocab_size, PlaidConfig.preset("mini").max_length) == (
        4096,
        256,
    )


# ---- every system through `tracformer train`


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return story_data(tmp_path_factory.mktemp("stories"), stories=40)


@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_a_short_run(family: str, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    schedule = ("eval_every=12", "ema=0.5", "steps=12", "optimizer.lr=1e-2")
    assert (
        main(
            [
                "train",
                f"data={data}",
                f"run={run}",
                *small(f"model.family={family}", "model.n_layer=2", *schedule),
            ]
        )
        == 0
    )
    found = losses(run)
    assert len(found) == 12
    assert sum(found[-3:]) < sum(found[:3])
    evaluation = next(record for record in read_log(run / "log.jsonl") if record["kind"] == "eval")
    model = load_model(run / "model")
    assert model.config.model_type == family
    for mode in model.config.modes:
        figures = [value for key, value in evaluation.items() if key.split()[0] == mode]
        assert figures
        assert all(1 < value < math.inf for value in figures)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    words = [
        "train",
        f"data={data}",
        f"run={tmp_path / 'more'}",
        *SMALL[6:],
        f"model.family={family}",
        f"init={run / 'model'}",
        "steps=1",
    ]
    assert main(words) == 0
    assert losses(tmp_path / "more")[0] < found[0]


@pytest.mark.parametrize("family", OWN)
def test_every_verb(
    family: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert (
        main(
            [
                "train",
                f"data={data}",
                f"run={run}",
                *small(f"model.family={family}", "model.n_layer=2", "steps=2"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["infill", "--model", str(run), "to the [[4]] and", "--json"]) == 0
    filled = json.loads(capsys.readouterr().out.splitlines()[0])
    assert filled["log_prob"] < 0
    marked = (
        filled["text"][: filled["spans"][0]["start"]]
        + f"[[{filled['spans'][0]['text']}]]"
        + filled["text"][filled["spans"][0]["stop"] :]
    )
    assert main(["score", "--model", str(run), marked, "--json"]) == 0
    scored = json.loads(capsys.readouterr().out.splitlines()[0])
    # bytes of half a character may be spelled otherwise
    if scored["kind"] == "exact" and scored["tokens"] == 4:
        assert scored["log_prob"] == pytest.approx(filled["log_prob"], abs=1e-3)
    tasks = ["--task", f"ratios:data={data},ratios=0.5,length=32,sequences=4"]
    assert main(["eval", f"m={run}", *tasks, "--out", str(tmp_path / "results")]) == 0
    assert len(list((tmp_path / "results").glob("*.json"))) == 1


@pytest.mark.parametrize(
    "words",
    [
        "sedd model.n_layer=2",
        "mdlm model.n_layer=2",
        "d3pm model.n_layer=2",
        "mdlm model.backbone=tracformer model.n_layer=5 model.n_max=8",
    ],
)
def test_a_short_run_of_masked_diffusion(words: str, data: Path, tmp_path: Path) -> None:
    family, *others = words.split()
    run = tmp_path / "run"
    schedule = (
        "batch=12",
        "steps=20",
        "optimizer.lr=1e-2",
        "eval_every=20",
        "eval_sequences=4",
        "eval_contexts=span:p=0.5,mean=5",
        "ema=0.5",
    )
    assert (
        main(
            [
                "train",
                f"data={data}",
                f"run={run}",
                *small(f"model.family={family}", *others, *schedule),
            ]
        )
        == 0
    )
    found = losses(run)
    assert len(found) == 20
    assert sum(found[-5:]) < sum(found[:5])
    evaluation = next(record for record in read_log(run / "log.jsonl") if record["kind"] == "eval")
    for mode in ("diffusion", "ac"):
        assert 1 < evaluation[f"{mode} span:p=0.5,mean=5"] < math.inf
    model = load_model(run / "model")
    assert (model.config.model_type, model.config.modes) == (family, ("diffusion", "ac"))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_the_same_command_trains_the_same_model(data: Path, tmp_path: Path) -> None:
    """Noise is a function of the step, so a run repeats itself."""
    for name in ("a", "b"):
        words = [
            "train",
            f"data={data}",
            f"run={tmp_path / name}",
            *small("model.family=sedd", "model.n_layer=1", "steps=3"),
        ]
        assert main(words) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_all_tokens_are_targets_unless_contexts_are_given() -> None:
    question = MaskSampler(parse_objective("denoise"), seed=0).draw(3, 10)
    assert question.mode == "diffusion"
    assert (question.count, question.context.any()) == (10, False)
    named = MaskSampler(parse_objective("denoise", "random:0.5"), seed=0).draw(3, 10)
    assert (named.mode, named.count) == ("diffusion", 5)


def test_a_short_run_of_plaid(tmp_path: Path) -> None:
    data, run = story_data(tmp_path, stories=40), tmp_path / "run"
    words = small(
        "model.family=plaid",
        "model.n_layer=2",
        "batch=16",
        "steps=40",
        "optimizer.lr=1e-2",
        "eval_every=40",
        "ema=0.5",
    )
    assert (
        main(["train", f"data={data}", f"run={run}", *words, "eval_contexts=span:p=0.5,mean=5"])
        == 0
    )
    found = losses(run)
    assert len(found) == 40
    assert sum(found[-10:]) < 0.9 * sum(found[:10])
    evaluation = next(record for record in read_log(run / "log.jsonl") if record["kind"] == "eval")
    assert 1 < evaluation["diffusion span:p=0.5,mean=5"] < 256
    model = load_model(run / "model")
    assert (model.config.model_type, model.config.modes, find_family("plaid").objective) == (
        "plaid",
        ("diffusion",),
        "denoise",
    )
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    # the ends are learned
    assert not torch.equal(model.schedule.bounds, torch.tensor([-3.0, 6.0]) / 7)
