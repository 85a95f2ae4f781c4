"""The commands prepare, train, plot, info, bench and completion: output, errors and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.test_suite import SCALE
from tests.bench.test_suite import here as measure_here
from tests.cli.helpers import Caller, save_model
from tests.training.helpers import SMALL, small, story_data
from tracformer import bench, load
from tracformer.bench import suite
from tracformer.cli import COMMANDS, main, parser_of
from tracformer.cli.completion import SHELLS
from tracformer.data import char_tokenizer
from tracformer.evaluation.flops import flops_per_token
from tracformer.evaluation.result_files import read_results


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the error of a call: one line, exit code 2."""
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return error


def test_training_needs_only_a_text_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tracformer train data=my.txt` chooses the rest and prints it."""
    story_data(here)
    assert main(["train", "data=stories.txt", "steps=2", "eval_sequences=2"]) == 0
    printed = capsys.readouterr()
    for word in ("tokenizer: byte", "preset: tiny", "run: runs/stories", "1.6M parameters"):
        assert word in printed.out
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
    counts = json.loads(capsys.readouterr().out)
    assert counts["tokenizer"]["kind"] == "char"
    assert sum(split["bytes"] for split in counts["splits"].values()) == len("MKV-LA") + len(
        "MKLLA"
    )
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
        ("short.txt", b"hi", [], "at least 1,000 are needed"),
        ("x.fasta", b"no header\n", [], "x.fasta"),
        ("y.fasta", b">a\nACGTJ\n", ["data.tokenizer=dna"], "'J'"),
        ("ok.txt", b"some text " * 200, ["stpes=3"], "did you mean 'steps'?"),
        ("ok.txt", b"some text " * 200, ["init=nowhere"], "nowhere"),
        ("ok.txt", b"some text " * 200, ["objective=mlm"], "objective is 'mlm'"),
        ("ok.txt", b"some text " * 200, ["device=cuda"], "no CUDA device"),
    ],
)
def test_wrong_input_of_train_is_an_error(
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


def test_missing_files_and_presets_are_errors(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no training data" in refused(capsys, "train")
    assert "nothere.txt" in refused(capsys, "train", "data=nothere.txt")
    assert "no log.jsonl" in refused(capsys, "plot", "nowhere")
    assert "'huge' is no file or folder here, no preset" in refused(
        capsys, "train", "huge", "data=x"
    )


def test_a_tokenizer_that_does_not_match_the_model_is_an_error(
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


def test_train_prints_its_outcome_as_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_info_shows_the_facts_of_a_model(tracformer: Caller) -> None:
    [facts] = tracformer.json("info")
    lm = load(tracformer.model)
    assert facts["parameters"] == lm.model.num_parameters()
    assert facts["modes"]["ac"]["answer"] == "marginal"
    assert facts["modes"]["ar"]["limit"]
    assert (
        facts["files"]["model.safetensors"]
        == (tracformer.model / "model.safetensors").stat().st_size
    )
    assert (facts["system"], facts["dtype"], facts["max_length"], facts["training"]) == (
        "tracformer",
        "float32",
        64,
        None,
    )
    assert facts["tokenizer"]["fingerprint"] == lm.tokenizer.fingerprint
    out = tracformer("info")
    for word in (f"{facts['parameters']:,}", "exact joint", "char", "text after a blank"):
        assert word in out
    code, positional, _ = tracformer.call("info", str(tracformer.model))
    assert (code, positional) == (0, out)
    assert "two models given" in tracformer.refused("info", "a", "--model", "b")


def test_info_names_modes_that_were_not_trained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = Caller(capsys, monkeypatch, save_model(tmp_path, char_tokenizer("ab"), modes=("ac",)))
    assert call.json("info")[0]["untrained_modes"] == ["car", "ar"]
    assert "not trained    car, ar" in call("info")
    assert call.json("infill", "a[[2]]b")[0]["mode"] == "ac"
    assert "these weights were trained for: ac" in call.refused(
        "infill", "-m", str(tmp_path), "--mode", "car", "a[[2]]b"
    )


def test_from_training_to_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder is a model: `info` shows how it was trained, and `infill` uses it."""
    monkeypatch.chdir(tmp_path)
    data = story_data(tmp_path)
    assert (
        main(
            [
                "train",
                f"data={data}",
                "run=runs/first",
                *small("steps=2", "eval_every=2", "eval_sequences=2"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    call = Caller(capsys, monkeypatch, Path("runs/first"))
    [facts] = call.json("info")
    assert facts["folder"].startswith("runs/first/")
    training = facts["training"]
    assert (training["steps"], training["last_step"], training["batch"], training["length"]) == (
        2,
        2,
        6,
        32,
    )
    assert training["held_out"]["step"] == 2
    shown = call("info")
    assert "2 of 2 steps of 6 x 32 tokens (384 with padding)" in shown
    assert "these weights  after step 2: 384 tokens of data without padding" in shown
    assert training["weights"]["machine"] in shown
    words = ("ratios:ratios=0.5", "--data", str(data), "--length", "32", "--sequences", "4")
    printed = call.call("eval", "runs/first", *words)[1]
    for word in ("parameters", "tokens seen", "384", "training FLOPs"):
        assert word in printed
    [result] = read_results(Path("results"))
    steps = result.manifest["training"]["step"], result.manifest["training"]["planned_steps"]
    assert steps == (2, 2)
    per_token = flops_per_token(load("runs/first").model.config, "all-modes", length=32)
    assert result.manifest["training"]["flops"] == pytest.approx(384 * per_token)
    assert call("infill", "Mia [[4]].").startswith("Mia")
    assert main(["plot", "runs/first", "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["picture"]).is_file()


def test_bench_writes_files_and_measures_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "QUICK", SCALE)
    monkeypatch.setattr(suite.run, "__defaults__", (measure_here,))
    words = ["bench", "--quick", "--only", "attention", "--out", str(tmp_path / "out")]
    extra = [
        "--json",
        str(tmp_path / "a.json"),
        "--markdown",
        str(tmp_path / "b.md"),
        "--plot",
        str(tmp_path / "c.svg"),
    ]
    assert main([*words, *extra]) == 0
    shown = capsys.readouterr()
    assert "encoder attention, native" in shown.out
    assert "[1/" in shown.err
    assert {row["part"] for row in json.loads((tmp_path / "a.json").read_text())["table"]} == {
        "machine",
        "attention",
    }
    assert "### Attention" in (tmp_path / "b.md").read_text()
    assert "<svg" in (tmp_path / "c.svg").read_text()
    assert (tmp_path / "out/results.json").exists()
    assert main(words) == 0
    again = capsys.readouterr()
    assert again.out == shown.out
    assert "[1/" not in again.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "speed"], "--only is 'speed'; allowed: machine, attention"),
        (["--device", "tpu"], "--device is 'tpu'; it must be cpu or cuda"),
        (["--device", "cuda"], "finds no GPU"),
        (["--plot", "x.gif"], "'x.gif'; it must end in one of"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_wrong_options_of_bench_are_errors(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---- completion in the shell


def complete(line: str, tmp_path: Path) -> list[str]:
    """Return what the shell offers after `line`."""
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "out"),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    code = "import sys, tracformer.cli; sys.modules['torch'] = None; tracformer.cli.main([])"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return [word.strip() for word in (tmp_path / "out").read_text().splitlines()]


def test_commands_flags_and_choices_are_offered(tmp_path: Path) -> None:
    assert complete("tracformer in", tmp_path) == ["infill", "info"]
    assert set(COMMANDS) <= set(complete("tracformer ", tmp_path))
    flags = complete("tracformer infill --be", tmp_path)
    assert "--best-of" in flags
    assert complete("tracformer infill --quality ", tmp_path) == ["best", "fast", "raw"]


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert "tracformer" in capsys.readouterr().out


def test_an_unknown_shell_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_parser_with_help(command: str) -> None:
    text = parser_of(command).format_help()
    assert text.startswith(f"usage: tracformer {command}")
    assert "--debug" in text
