"""Parameter counts: the paper's, and those that make the small presets comparable.

`docs/peers.md` tells of the differences.
"""

from typing import Any

import pytest
import torch

from tracformer.baselines import find_family

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
    """All parameters, and those that are not in embeddings; nothing is allocated."""
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
def test_small_presets_are_alike(family: str) -> None:
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
