"""`tracformer score`, `sample` and `info`: what they say is what the model says."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.cli.helpers import Caller, save_model
from tests.generation.texts import metaspace_tokenizer
from tests.training.helpers import small, story_data
from tracformer import load
from tracformer.cli import main
from tracformer.data import char_tokenizer

COLOUR = re.compile("\033\\[[0-9;]*m")


def test_score_says_what_the_model_says(tracformer: Caller) -> None:
    text = "abc [[de]] f[[g]]h"
    expected = load(tracformer.model).score(text)
    [scored] = tracformer.json("score", text)
    assert scored["log_prob"] == pytest.approx(expected.log_prob)
    assert scored["bits_per_byte"] == pytest.approx(-expected.log_prob / math.log(2) / 3)
    assert scored["perplexity"] == pytest.approx(math.exp(-expected.log_prob / 3))
    assert (scored["line"], scored["tokens"], scored["kind"]) == (1, 3, "exact")
    out = tracformer("score", text)
    assert out.startswith("abc [[de]] f[[g]]h\n")
    rows = re.findall(r"'(\w)' +(-[\d.]+) +([\d.]+)", out)
    assert [row[0] for row in rows] == list("deg")
    assert math.fsum(float(row[1]) for row in rows) == pytest.approx(expected.log_prob, abs=3e-4)
    assert f"log p {expected.log_prob:.4f} nats (car: exact joint), 3 tokens" in out


def test_the_kind_of_a_score_is_said(tracformer: Caller) -> None:
    assert "(ac: sum of marginals" in tracformer("score", "abc [[de]]", "--mode", "ac")
    assert "(mode ar does not see what follows a hole)" in tracformer(
        "score", "abc [[de]]", "--mode", "ar"
    )
    ar = tracformer.json("score", "[[ab]]cd", "--mode", "ar")[0]["log_prob"]
    # nothing behind the hole is seen
    assert ar == pytest.approx(tracformer.json("score", "[[ab]]dc", "--mode", "ar")[0]["log_prob"])


def test_scores_of_many_lines(tracformer: Caller) -> None:
    objects = tracformer.json("score", "--batch", "2", stdin=b"a[[b]]\n\n[[c]]d\n[[e]]\n")
    assert [each["line"] for each in objects] == [1, 3, 4]
    assert [each["text"] for each in objects] == ["ab", "cd", "e"]
    assert objects[1]["log_prob"] == pytest.approx(
        tracformer.json("score", "[[c]]d")[0]["log_prob"], abs=1e-5
    )
    assert "line 2: " in tracformer.refused(
        "score", "-m", str(tracformer.model), stdin=b"a[[b]]\nc[[]]\n"
    )
    assert "line 2: " in tracformer.refused(
        "score", "-m", str(tracformer.model), stdin=b"a[[b]]\ncd\n"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"cd", "no blank found in the text"),
        (b"[[z]]", "character 'z'"),
        (b"[[" + b"a" * 80 + b"]]", "81 tokens"),
    ],
)
def test_every_line_is_checked_before_the_first_is_scored(
    tracformer: Caller, line: bytes, message: str
) -> None:
    told = tracformer.refused(
        "score", "-m", str(tracformer.model), "--batch", "1", stdin=b"a[[b]]\n\n" + line
    )
    assert "standard input, line 3: " in told
    assert message in told
    assert tracformer.refused(
        "score", "-m", str(tracformer.model), "a[[b]]", "a[[c]]", "--mode", "zz"
    ).startswith("tracformer score: mode is")


def test_samples_have_what_is_required(tracformer: Caller) -> None:
    for sample in tracformer.json("sample", "-n", "8", "--require", "h", "--max-tokens", "6"):
        assert "h" in sample["text"]


def test_words_stream_apart_from_their_prompt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = Caller(capsys, monkeypatch, save_model(tmp_path, metaspace_tokenizer()))
    words = ("sample", "--prompt", "the", "--require", "cat")
    assert (
        call(*words, "--max-tokens", "1")
        == call(*words, "--max-tokens", "1", "--stream")
        == "the cat\n"
    )
    assert call(*words, "--max-tokens", "6", "--stream") == call(*words, "--max-tokens", "6")


def test_samples(tracformer: Caller) -> None:
    words = ("sample", "-n", "3", "--prompt", "abc", "--max-tokens", "5", "--ban", "\n")
    drawn = tracformer.json(*words)
    assert all(each["text"].startswith("abc") and len(each["token_ids"]) <= 5 for each in drawn)
    assert len({each["seed"] for each in drawn}) == 3
    assert tracformer(*words) == "".join(each["text"] + "\n" for each in drawn)
    assert [each["text"] for each in tracformer.json(*words, "--batch", "2")] == [
        each["text"] for each in drawn
    ]
    one = ("sample", "--prompt", "abc", "--max-tokens", "20")
    assert tracformer(*one, "--stream") == tracformer(*one)


def test_samples_on_a_terminal(tracformer: Caller, terminal: None) -> None:
    words = ("sample", "--prompt", "abc", "--max-tokens", "5", "--ban", "\n")
    [drawn] = tracformer.json(*words)
    for out in (tracformer(*words), tracformer(*words, "--stream")):
        text, numbers = out.splitlines()
        assert text.startswith("abc\033[38;5;16;48;5;")
        assert COLOUR.sub("", text) == drawn["text"]
        assert f"log p {drawn['log_prob']:.3f}, " in numbers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--max-tokens", "65"], "max_tokens is 65, but only 64 fit"),
        (["--prompt", "xyz"], "character 'x'"),
        (
            ["--prompt", "ab" * 40],
            "the prompt has 80 tokens, which leaves no room: this model takes 64 tokens",
        ),
        (["--stream", "--json"], "--json"),
        (["--stream", "-n", "2"], "-n 2"),
        (["--greedy", "--min-p", "0.1"], "--min-p has no effect"),
    ],
)
def test_samples_refused(tracformer: Caller, words: list[str], message: str) -> None:
    assert message in tracformer.refused("sample", "-m", str(tracformer.model), *words)


def test_info_of_a_model(tracformer: Caller) -> None:
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
    for word in (f"{facts['parameters']:,}", "exact joint", "char", "does not see what follows"):
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
    """A run's folder is a model: `info` tells how it was trained, `infill` fills with it."""
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
    assert "2 steps of 6 x 32 tokens" in call("info")
    assert call("infill", "Mia [[4]].").startswith("Mia")
    assert main(["plot", "runs/first", "--json"]) == 0
    assert Path(json.loads(capsys.readouterr().out)["picture"]).is_file()
