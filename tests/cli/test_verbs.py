"""The command line as a user meets it: what it says, what it refuses, and with which
code it leaves.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.helpers import SMALL, story_data
from tracformer.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Exit code 2 and one paragraph."""
    assert main(words) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "Traceback" not in told
    return told


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "prepare" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("0.")


def test_importing_the_command_line_loads_no_torch() -> None:
    code = "import sys, tracformer, tracformer.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_but_a_text_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tracformer train data=my.txt`: the rest is chosen and said aloud.

    (Few steps, to be quick.)
    """
    story_data(here)
    assert main(["train", "data=stories.txt", "steps=2", "eval_sequences=2"]) == 0
    told = capsys.readouterr()
    for word in ("tokenizer: byte", "preset: tiny", "run: runs/stories", "1.6M parameters"):
        assert word in told.out
    assert (here / "runs/stories/model/model.safetensors").exists()
    assert (here / "runs/stories/model/tokenizer.json").exists()
    assert main(["plot", "runs/stories"]) == 0
    assert (here / "runs/stories/curves.png").stat().st_size > 10_000
    other = here / "other" / "stories.txt"
    other.parent.mkdir()
    other.write_text("another text " * 100)
    assert "prepared from other data" in refused(
        capsys, "train", f"data={other}", "run=runs/stories"
    )


def test_prepare(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.fasta").write_text(">x\nMKV-LA\n>y\nMKLLA\n")
    assert (
        main(
            [
                "prepare",
                "a.fasta",
                "--out",
                "out",
                "--gaps",
                "keep",
                "--tokenizer",
                "protein-aligned",
                "--json",
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["tokenizer"]["kind"] == "char"
    assert sum(split["bytes"] for split in told["splits"].values()) == len("MKV-LA") + len("MKLLA")
    assert "exists" in refused(capsys, "prepare", "a.fasta", "--out", "out")


def test_prepare_with_a_validation_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my.jsonl").write_text('{"body": "first"}\n{"body": "second"}\n')
    (here / "held.jsonl").write_text('{"body": "other"}\n')
    words = ["prepare", "my.jsonl", "--field", "body", "--out", "out"]
    assert main([*words, "--validation", "held.*", "--json"]) == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert {name: (split["documents"], split["bytes"]) for name, split in splits.items()} == {
        "train": (2, 11),
        "validation": (1, 5),
    }
    words[-1] = "other"
    assert "validation is 'nothere.txt': no such file" in refused(
        capsys, *words, "--validation", "nothere.txt"
    )
    assert "validation is '0.6'; it must be a fraction from 0 to 0.5" in refused(
        capsys, *words, "--validation", "0.6"
    )
    assert "my.jsonl is given both for training and for validation" in refused(
        capsys, *words, "--validation", "./*.jsonl"
    )
    assert not (here / "other").exists()


@pytest.mark.parametrize(
    ("name", "content", "words", "message"),
    [
        ("empty.txt", b"", [], "no text"),
        ("bad.txt", b"abc\xffdef", [], "bad.txt is not UTF-8 text: byte 0xff at offset 3"),
        ("short.txt", b"hi", [], "fewer than one block"),
        ("x.fasta", b"no header\n", [], "x.fasta"),
        ("y.fasta", b">a\nACGTJ\n", ["data.tokenizer=dna"], "'J'"),
        ("ok.txt", b"some text " * 200, ["stpes=3"], "did you mean 'steps'?"),
        ("ok.txt", b"some text " * 200, ["init=nowhere"], "nowhere"),
        ("ok.txt", b"some text " * 200, ["objective=mlm"], "objective is 'mlm'"),
        ("ok.txt", b"some text " * 200, ["device=cuda"], "no CUDA device"),
    ],
)
def test_bad_input(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes,
    words: list[str],
    message: str,
) -> None:
    (here / name).write_bytes(content)
    assert message in refused(capsys, "train", f"data={name}", *words)
    assert not (here / "runs" / name.split(".")[0] / "model").exists()


def test_missing_things(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no data" in refused(capsys, "train")
    assert "nothere.txt" in refused(capsys, "train", "data=nothere.txt")
    assert "no log.jsonl" in refused(capsys, "plot", "nowhere")
    assert "preset is 'huge'" in refused(capsys, "train", "huge", "data=x")


def test_a_tokeniser_that_does_not_match_the_model(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = story_data(here)
    assert main(["train", f"data={data}", "run=first", *SMALL, "steps=1"]) == 0
    (here / "z.txt").write_text("abcdefgh " * 300)
    assert main(["prepare", "z.txt", "--out", "chars", "--tokenizer", "char"]) == 0
    capsys.readouterr()
    assert "tokenizer" in refused(
        capsys, "train", "data=chars", "run=second", "init=first/model", *SMALL, "steps=1"
    )
    assert not (here / "second").exists()


def test_train_tells_its_end_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my.txt").write_text("the cat sat on the mat . " * 60)
    words = [
        "data=my.txt",
        "run=run",
        "steps=2",
        "batch=2",
        "length=16",
        "model.max_length=16",
        "model.n_layer=4",
        "eval_sequences=1",
    ]
    assert main(["train", "tiny", *words, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"run": "run", "step": 2, "finished": True, "signal": None}
    assert "finished at step 2" in printed.err
