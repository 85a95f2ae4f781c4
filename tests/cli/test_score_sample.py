"""`tracformer score` and `tracformer sample` print what the model returns."""

import math
import re
from pathlib import Path

import pytest

from tests.cli.helpers import Caller, save_model
from tests.toys import metaspace_tokenizer
from tracformer import load

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
    assert "(mode ar does not see the text after a blank)" in tracformer(
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
