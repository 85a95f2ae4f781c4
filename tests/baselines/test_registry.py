"""A registered system is trained, loaded and listed; sizes of the presets.

`docs/peers.md` explains the differences between sizes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracformer
from tests.toys import SYSTEMS
from tests.training.helpers import losses, story_data
from tracformer import baselines as families
from tracformer.baselines import Family, find_family, register
from tracformer.baselines.plaid import Plaid, PlaidConfig
from tracformer.cli import main
from tracformer.model.base import MARGINAL, ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig


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


pytest.importorskip("transformers")

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
