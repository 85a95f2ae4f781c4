"""`tracformer eval`: tables, result files, errors, and the same figures from one process and two."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import Caller, save_model
from tests.training.helpers import environment
from tracformer.baselines.mdlm import MDLM, MDLMConfig
from tracformer.cli import main
from tracformer.data import byte_tokenizer, char_tokenizer
from tracformer.evaluation import Result, ResultRow, read_results
from tracformer.report import printed_tables

LIMITS = ["--length", "16", "--sequences", "70", "--out", "out"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = random.Random(0)
    (tmp_path / "text.txt").write_text("".join(rng.choice("abcdefgh .\n") for _ in range(1300)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluated(tracformer: Caller, *words: str) -> str:
    code, out, err = tracformer.call("eval", *words, "--data", "text.txt", *LIMITS)
    assert (code, err) == (0, "")
    return out


def test_models_side_by_side(here: Path, tracformer: Caller, model: Path) -> None:
    out = evaluated(
        tracformer,
        f"ours={model}@car",
        f"{model}@ac",
        "ratios:mean=3,ratios=0.2/0.8",
        "--task",
        "ranges:ranges=[0.5,1]",
    )
    assert "ratios: perplexity; text.txt, T = 16, spans Geometric(3), 70 sequences" in out
    assert "ours (car), exact" in out
    assert "letters (ac), marginal" in out
    assert "ratios: differences in perplexity, paired by sequence; text.txt" in out
    assert "letters (ac) less ours (car), marginal" in out
    assert "less ours (car): marginal less exact: not the same kind of number" in out
    files = sorted(path.name for path in (here / "out").iterdir())
    assert [name.rpartition("-")[0] for name in files] == [
        "letters-ac-ranges",
        "letters-ac-ratios",
        "ours-car-ranges",
        "ours-car-ratios",
    ]
    again = evaluated(
        tracformer,
        f"ours={model}@car",
        f"{model}@ac",
        "ratios:mean=3,ratios=0.2/0.8",
        "ranges:ranges=[0.5,1]",
        "--batch",
        "5",
    )
    assert again == out
    assert sorted(path.name for path in (here / "out").iterdir()) == files


def test_stored_results_are_compared_with_new_ones(
    here: Path, tracformer: Caller, model: Path
) -> None:
    words = ("ratios:mean=3,ratios=0.2/0.8", "ranges:ranges=[0.5,1]/[0,0.5]")
    evaluated(tracformer, f"ours={model}@car", *words)
    out = evaluated(tracformer, f"ours={model}@car", f"theirs={model}@ac", *words)
    assert out.count(": perplexity;") == 2
    assert out.count("differences in perplexity, paired by sequence") == 2


def test_bounds_are_compared_with_exact_answers(
    here: Path, tracformer: Caller, model: Path, tmp_path: Path
) -> None:
    tokenizer = char_tokenizer("abcdefgh .\n")
    shape = {
        "vocab_size": tokenizer.vocab_size,
        "max_length": 16,
        "n_layer": 1,
        "n_head": 1,
        "d_model": 4,
        "d_condition": 2,
    }
    MDLM(MDLMConfig(**shape)).save_pretrained(tmp_path / "noisy")
    tokenizer.save(tmp_path / "noisy")
    out = evaluated(
        tracformer, str(model), "noisy@diffusion", "ranges:ranges=[0.5,1]", "--draws", "2"
    )
    assert out.count(": perplexity;") == 1
    assert "noisy (diffusion): 2 draws, standard error" in out
    assert "less letters (car): bound less exact: not the same kind of number" in out


def test_a_model_without_a_metric_is_not_in_its_table() -> None:
    def made(model: str, metric: str) -> Result:
        return Result(
            model,
            "mdlm",
            "ac",
            "exact",
            {},
            (ResultRow(metric, {"pattern": "one"}, 0.5, 0.4, 0.6, kind="marginal"),),
        )

    first, second = printed_tables([made("ours", "kl"), made("theirs", "excess")])
    shown = first.to_text(turned=True)
    assert "ours" in shown
    assert "theirs" not in shown
    assert second.title.startswith("exact: the bound's excess")


def test_json(here: Path, tracformer: Caller, model: Path) -> None:
    lines = evaluated(
        tracformer,
        str(model),
        "prefixes:fractions=0/0.5",
        "unconditional",
        "--mode",
        "ar",
        "--json",
    ).splitlines()
    prefixes, whole = map(json.loads, lines)
    assert (prefixes["task"], whole["task"], whole["mode"], whole["details"]) == (
        "prefixes",
        "unconditional",
        "ar",
        {},
    )
    perplexity = [
        row["value"]
        for result in (prefixes, whole)
        for row in result["rows"]
        if row["metric"] == "perplexity"
    ]
    # no given tokens, and no end of text in this file
    assert perplexity[0] == pytest.approx(perplexity[2])


def test_rounded_weights_side_by_side(here: Path, tracformer: Caller, model: Path) -> None:
    out = evaluated(
        tracformer,
        str(model),
        "ranges:ranges=[0.5,1]",
        "--mode",
        "car",
        "--weights",
        "float32,bfloat16,int8",
    )
    assert "differences in bits per byte, paired by sequence" in out
    assert "letters-bfloat16 (car), exact" in out
    found = {result.model: result for result in read_results("out")}
    bits = {
        name: next(row.value for row in result.rows if row.metric == "bits_per_byte")
        for name, result in found.items()
    }
    assert len(set(bits.values())) == 3
    assert bits == pytest.approx(dict.fromkeys(bits, bits["letters"]), rel=0.02)


def test_models_with_different_tokenizers_are_compared_per_byte(
    here: Path, tracformer: Caller, model: Path, tmp_path: Path
) -> None:
    save_model(tmp_path / "bytes", byte_tokenizer())
    out = evaluated(tracformer, str(model), "bytes", "ranges:ranges=[0.5,1]", "--mode", "car")
    assert "ranges: bits per byte" in out
    assert "bytes (car) less letters (car)" in out
    texts = [result.manifest["data"]["windows"] for result in read_results("out")]
    assert texts == [
        "text windows of the first model's tokenizer, read in its own tokens",
        "its own tokens",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ranges"], "no model given"),
        (["MODEL"], "(read as models: "),
        (["MODEL", "ratoos"], "ratoos); tasks: ratios, ranges"),
        (["MODEL", "ranges"], "no data given; name a folder, files or a data set by --data"),
        (["MODEL", "ranges", "--data", "nothing.txt"], "nothing.txt"),
        (["MODEL", "--task", "rangse", "--data", "text.txt"], "did you mean 'ranges'?"),
        (
            ["MODEL", "ranges", "--data", "text.txt", "--mode", "diffusion"],
            "letters: mode is 'diffusion'; allowed for tracformer: car, ac, ar",
        ),
        (
            ["MODEL", "ranges", "--data", "text.txt", "--length", "100", "--sequences", "2"],
            "have up to 100 tokens in letters, which takes at most 64",
        ),
        (
            ["MODEL", "ranges", "--data", "text.txt", "--length", "16"],
            "sequences is 1000, but text.txt holds only 81 windows of 16 tokens",
        ),
        (
            ["MODEL", "MODEL", "ranges", "--data", "text.txt"],
            "two models are called 'letters' in mode car; give them different names by NAME=FOLDER",
        ),
        (
            [
                "MODEL",
                "proteins",
                "ranges",
                "--data",
                "text.txt",
                "--length",
                "16",
                "--sequences",
                "2",
            ],
            "proteins cannot read text.txt: character 'g' at offset 0",
        ),
        (["nowhere", "ranges", "--data", "text.txt"], "nowhere does not exist"),
        (
            ["MODEL", "ranges", "--data", "text.txt", "--weights", ","],
            "--weights is ','; it must be one or several of float32",
        ),
        (
            ["MODEL", "ranges", "--data", "text.txt", "--mode", ","],
            "--mode is ',', which names no mode",
        ),
        (
            ["MODEL", "calibration", "--data", "text.txt", "--draws", "5"],
            "--draws has no effect on calibration; leave it out",
        ),
        (
            ["MODEL", "exact", "--data", "nothing.txt", "--length", "7"],
            "--data has no effect on exact; leave it out",
        ),
        (
            ["MODEL", "exact", "speed", "--count-eos"],
            "--count-eos has no effect on exact, speed; leave it out",
        ),
    ],
)
def test_wrong_usage_is_an_error(
    here: Path, tracformer: Caller, model: Path, words: list[str], message: str
) -> None:
    assert message in tracformer.refused(
        "eval", *(str(model) if word == "MODEL" else word for word in words)
    )


def test_tasks_are_listed(tracformer: Caller) -> None:
    code, out, _ = tracformer.call("eval", "--tasks")
    assert code == 0
    assert out.startswith("ratios: Perplexity against the share of targets")
    assert "ratios=0.1/0.2/0.3" in out


def test_two_processes_give_the_figures_of_one(
    here: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_model(tmp_path / "m", char_tokenizer("abcdefgh .\n"), max_length=16, n_layer=4)
    words = ["tracformer", "eval", "m", "ratios:mean=3,ratios=0.5", "--data", "text.txt"]
    words += ["--dtype", "float64", *LIMITS[:4], "--out"]
    monkeypatch.setattr(sys, "argv", [*words, "one"])
    assert main() == 0
    alone = capsys.readouterr().out
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", *words, "two"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for out in (alone, done.stdout):
        assert out.count("ratios: perplexity") == 1  # one rank prints
    [one], [two] = read_results("one"), read_results("two")
    assert (one.manifest["processes"], two.manifest["processes"]) == (1, 2)
    for name in ("weights", "tokenizer", "data", "contexts"):
        assert one.manifest["hashes"][name] == two.manifest["hashes"][name]
    assert one.manifest["command"].startswith(
        "tracformer eval m ratios:mean=3,ratios=0.5 --data text.txt"
    )
    assert [row.value for row in two.rows] == pytest.approx(
        [row.value for row in one.rows], rel=1e-10
    )
    assert [row.low for row in two.rows] == pytest.approx([row.low for row in one.rows], rel=1e-10)
