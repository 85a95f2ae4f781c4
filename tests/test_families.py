"""A new system is one file: once registered, it is trained, loaded, asked and listed without a
change elsewhere.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tracformer
from tests.training.helpers import losses, story_data
from tracformer import baselines as families
from tracformer.baselines import Family, find_family, register
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
    """Each target by the letters' frequencies alone."""

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
    assert scored.log_prob == pytest.approx(float(expected), abs=1e-4)
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
        "does not see what follows a hole",
    ):
        assert words in out


def test_unknown_systems_are_told() -> None:
    with pytest.raises(ValueError, match="unknown system 'gpt9'; did you mean 'gpt2'"):
        find_family("gpt9")
