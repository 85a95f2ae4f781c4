from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.test_split import family, write_family
from tracformer import Tracformer, TracformerConfig
from tracformer.data import char_tokenizer, prepare
from tracformer.data.alignment import read_alignment
from tracformer.data.make_tokenizer import ALPHABETS
from tracformer.evaluation.domains import Domains, Holes, _of_profile
from tracformer.evaluation.task import Silent, Subject, parse_task

pytest.importorskip("pyhmmer")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Domains:
    folder = tmp_path_factory.mktemp("domains")
    (folder / "pfam").mkdir()
    for name, width, seed in (("one", 30, 1), ("two", 24, 2)):
        write_family(
            folder / "pfam" / f"{name}.fasta", family(20, 8, width=width, seed=seed, conserved=0.7)
        )
    prepare(folder / "data", folder / "pfam", "protein", validation=0.1, identity=0.6)
    found = parse_task(f"domains:data={folder / 'data'},alignments={folder / 'pfam'},hole=3/6")
    assert isinstance(found, Domains)
    return found


def subject(mode: str) -> Subject:
    tokenizer = char_tokenizer(ALPHABETS["protein"])
    torch.manual_seed(0)
    shape = TracformerConfig(
        vocab_size=tokenizer.vocab_size,
        max_length=32,
        n_layer=5,
        n_head=2,
        d_model=16,
        n_max=4,
        modes=("car", "ac"),
    )
    return Subject(Tracformer(shape, "blocked").eval(), tokenizer, "untrained", mode)


@pytest.mark.parametrize("mode", ["car", "ac"])
def test_every_system_answers_the_same_holes(task: Domains, mode: str) -> None:
    result = task.run(subject(mode), Silent())
    for name in ("one", "two"):
        holes = next(each for each in task.families() if each.family == name)
        targets = int((holes.stop - holes.start).sum())
        perplexity = {}
        for system in ("model", "profile", "hmm", "hmm-counts"):
            row = result.find("perplexity", family=name, system=system)
            assert (row.kind, row.targets) == ("exact" if mode == "car" else "marginal", targets)
            perplexity[system] = row.value
            assert 0.0 <= result.find("accuracy", family=name, system=system).value <= 1.0
        assert 20 < perplexity["model"] < 34  # of 26 tokens, untrained
        assert max(perplexity["profile"], perplexity["hmm"], perplexity["hmm-counts"]) < 20
        gap = result.find("nll_difference", family=name, system="model - hmm").value
        assert gap == pytest.approx(np.log(perplexity["model"] / perplexity["hmm"]))
        first = result.details[name]["fills"][0]
        assert first["sequence"][first["start"] :].startswith(first["was"])
        assert len(first["filled"]) == len(first["was"])
    assert str(task.data) not in str(result.to_dict()["options"])


def test_fills_are_shown_after_a_resume_too(task: Domains, tmp_path: Path) -> None:
    asked = replace(subject("car"), scratch=tmp_path)
    first, again = (task.run(asked, Silent()).details["one"]["fills"] for _ in range(2))
    assert len(first) > 0
    assert again == first


def test_holes_lie_inside_and_repeat(task: Domains) -> None:
    for holes in task.families():
        widths = holes.stop - holes.start
        lengths = np.array([len(record.sequence) for record in holes.held.records])
        assert widths.min() >= 3
        assert widths.max() <= 6
        assert (holes.stop <= lengths).all()
        trained = {record.sequence for record in holes.training.records}
        assert not trained & {record.sequence for record in holes.held.records}


def test_profile_by_hand(tmp_path: Path) -> None:
    training = read_alignment(write_family(tmp_path / "t.fasta", ["AC", "AD", "A-"]))
    held = read_alignment(write_family(tmp_path / "h.fasta", ["-C", "AW"]))
    found = _of_profile(Holes("x", training, held, np.array([0, 0]), np.array([1, 2])))
    # 3, 1 and 0 of 5, one more of each of the twenty
    background = {"A": 4 / 25, "C": 2 / 25, "W": 1 / 25}
    assert found.nll[0] == pytest.approx(-np.log((1 + 5 * background["C"]) / (2 + 5)))
    assert found.nll[1] == pytest.approx(
        -np.log((3 + 5 * background["A"]) / (3 + 5)) - np.log(5 * background["W"] / (2 + 5))
    )
    assert found.right.tolist() == [1.0, 1.0]


def test_wrong_options_are_told() -> None:
    with pytest.raises(ValueError, match="hole is"):
        parse_task("domains:hole=9/3")
    with pytest.raises(ValueError, match="needs data=FOLDER"):
        Domains().families()
