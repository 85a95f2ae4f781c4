"""Trained on a source whose conditionals are known, the models find them."""

import json
from pathlib import Path

import pytest
from benchmarks.take_off import GATE, SYSTEMS, measure, table

ROOT = Path(__file__).parents[2]

ONE_EACH = {(system.family, system.mode): name for name, system in SYSTEMS.items()}.values()


@pytest.mark.soak
@pytest.mark.parametrize("name", ["tracformer-car", "tracformer-ac"])
def test_tracformer_takes_off(name: str) -> None:
    holes = measure(name, steps=600, sequences=300)["holes"]
    assert holes["one"]["gain"] > 1.4 * GATE * holes["one"]["exact"]
    assert 0 < holes["half"]["kl"] < 0.2


@pytest.mark.parametrize("name", ONE_EACH)
def test_every_system_can_be_measured(name: str) -> None:
    """A short run of each:

    figures are finite, and no answer is nearer to the data than the truth by more than the sample's
    noise.
    """
    result = measure(name, steps=2, sequences=32)
    for figures in result["holes"].values():
        assert -10.0 < figures["gain"] < figures["exact"] + 0.15
        assert figures["kl"] > -0.15
    assert not result["took_off"]


def test_the_document_shows_the_recorded_table() -> None:
    results = json.loads((ROOT / "results/take-off/hmm-16.json").read_text())
    assert set(results) == set(SYSTEMS)
    assert table(results) in (ROOT / "docs/peers.md").read_text()
