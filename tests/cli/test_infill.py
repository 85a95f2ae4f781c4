"""`tracformer infill`, `score` and `sample` print what the model returns."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.cli.helpers import Caller, save_model
from tests.toys import metaspace_tokenizer
from tracformer import load
from tracformer.cli import infill, main
from tracformer.cli import output as show
from tracformer.data import byte_tokenizer, char_tokenizer, train_bpe

# ---- score and sample

COLOUR = re.compile("\033\\[[0-9;]*m")


def test_the_completed_text_and_nothing_else(tracformer: Caller) -> None:
    out = tracformer("infill", "abc [[3]] def[[2]].")
    assert re.fullmatch(r"abc [a-h .\n]{3} def[a-h .\n]{2}\.\n", out)
    assert tracformer("infill", "--seed", "1", "abc [[3]] def[[2]].") != out


def test_marks_can_be_scored_again(tracformer: Caller) -> None:
    """`score` gives a fill the probability that `infill` reports."""
    words = ("abc [[3]] def[[2]].", "--ban", "\n")
    [filled] = tracformer.json("infill", *words)
    marked = tracformer("infill", *words, "--marks")
    [scored] = tracformer.json("score", marked.removesuffix("\n"))
    assert scored["text"] == filled["text"]
    assert scored["log_prob"] == pytest.approx(filled["log_prob"], abs=1e-4)
    assert scored["kind"] == "exact"


def test_rounded_weights_fill_and_score_as_one_model(tracformer: Caller, model: Path) -> None:
    """The step reads packed weights, the score reads them widened: the same numbers,
    and not those of float32.
    """
    words = ("abc [[3]] def[[2]].", "--ban", "\n", "--weights", "int8")
    [filled] = tracformer.json("infill", *words)
    marked = tracformer("infill", *words, "--marks").removesuffix("\n")
    [scored], [unrounded] = (
        tracformer.json("score", marked, "--weights", "int8"),
        tracformer.json("score", marked),
    )
    assert scored["log_prob"] == pytest.approx(filled["log_prob"], abs=1e-4)
    assert scored["log_prob"] != pytest.approx(unrounded["log_prob"], abs=1e-4)
    code, _, complaint = tracformer.call(
        "infill", "abc [[3]]", "--model", str(model), "--weights", "int4"
    )
    assert code != 0
    assert "'int4'; allowed: float32, bfloat16, int8" in complaint


def test_brackets_of_the_text_survive_the_marks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = Caller(capsys, monkeypatch, save_model(tmp_path, char_tokenizer("ab[]")))
    words = ("infill", r"a\[[b]][[3]]", "--ban", "[", "--ban", "]")
    [scored] = call.json("score", call(*words, "--marks").removesuffix("\n"))
    [filled] = call.json(*words)
    assert scored["text"] == filled["text"]
    assert scored["text"].startswith("a[[b]]")
    assert call(*words, "--marks", "--stream") == call(*words, "--marks")
    assert scored["spans"][0]["token_ids"] == filled["spans"][0]["token_ids"]


def test_arguments_file_and_standard_input_agree(tracformer: Caller, tmp_path: Path) -> None:
    """Each text gets alone what it gets among others, in whatever batch."""
    texts = ["abc [[3]]", "[[2]] def", "a[[1]]b[[4]]c", "[[5]]"]
    alone = [tracformer.json("infill", text)[0]["text"] for text in texts]
    file = tmp_path / "texts.txt"
    file.write_bytes("\r\n".join(texts).encode())
    for words in (texts, ["--file", str(file)], ["--file", str(file), "--batch", "3"]):
        objects = tracformer.json("infill", *words)
        assert [each["text"] for each in objects] == alone
        assert [each["line"] for each in objects] == [1, 2, 3, 4]
    assert [
        each["text"] for each in tracformer.json("infill", stdin="\n".join(texts).encode())
    ] == alone
    assert [
        each["text"] for each in tracformer.json("infill", "--file", "-", stdin=file.read_bytes())
    ] == alone


def test_blanks_of_other_programs_are_filled_and_named(tracformer: Caller) -> None:
    own = tracformer("infill", "ab[[]]", "--ban", "\n")
    words = ("infill", "ab[MASK]", "-m", str(tracformer.model), "--ban", "\n")
    code, out, err = tracformer.call(*words)
    assert (code, out) == (0, own)
    assert err == "no [[...]] in the text; read as blanks of any length: [MASK]\n"
    code, out, err = tracformer.call(*words, "--json")
    assert "[MASK]" in json.loads(out)["note"]


def test_empty_lines_keep_their_places(tracformer: Caller) -> None:
    text = b"\nab[[2]]\n\n[[2]]cd\n"
    lines = tracformer("infill", "--ban", "\n", stdin=text).split("\n")
    assert [line[:2] if number == 1 else line[2:] for number, line in enumerate(lines)] == [
        "",
        "ab",
        "",
        "cd",
        "",
    ]
    assert tracformer("infill", "--ban", "\n", "-n", "3", stdin=text).count("\n") == 4 * 3
    assert [each["line"] for each in tracformer.json("infill", stdin=text)] == [2, 4]
    # one filling, three times
    fewer = ("infill", "--ban", "\n", "-n", "3", "--best-of", "3", "--greedy")
    lines = tracformer(*fewer, stdin=text).split("\n")
    assert [bool(line) for line in lines] == [i in (3, 9) for i in range(13)]
    assert len(tracformer.json(*fewer, stdin=text)) == 2


def test_a_whole_file_is_one_text(tracformer: Caller) -> None:
    [only] = tracformer.json("infill", "--whole-file", stdin=b"ab\n[[2]]\ncd\n")
    assert re.fullmatch(r"ab\n[a-h .\n]{2}\ncd", only["text"])


def test_several_fillings(tracformer: Caller) -> None:
    drawn = tracformer.json("infill", "ab[[4]]cd", "-n", "6")
    assert len({each["seed"] for each in drawn}) == 6
    best = tracformer.json("infill", "ab[[4]]cd", "--best-of", "6")
    assert [each["text"] for each in best] == [
        max(drawn, key=lambda each: each["log_prob"])["text"]
    ]
    [found] = tracformer.json("infill", "ab[[4]]cd", "--search", "best-first:5000")
    assert found["log_prob"] >= best[0]["log_prob"] - 1e-5
    assert "proven" in found["note"]


def test_candidates_are_read_again(tracformer: Caller) -> None:
    for words in (["--search", "beam:6"], ["--best-of", "6"]):
        found = tracformer.json("infill", "ab[[4]]cd", "-n", "6", *words)
        [best] = tracformer.json("infill", "ab[[4]]cd", "--reread", *words)
        assert best["text"] in [each["text"] for each in found]
        assert f"of {len(found)} candidates" in best["note"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--order", "random"],
        ["--order", "entropy", "--per-step", "2"],
        ["--order", "margin", "--threshold", "0.4"],
        ["--steps", "3"],
    ],
)
def test_orders(tracformer: Caller, words: list[str]) -> None:
    [filled] = tracformer.json("infill", "ab[[6]]cd", "--mode", "ac", *words)
    assert filled["mode"] == "ac"
    assert [len(span["token_ids"]) for span in filled["spans"]] == [6]


def test_options_reach_the_sampler(tracformer: Caller) -> None:
    greedy = tracformer("infill", "ab[[6]]cd", "--greedy")
    assert (
        greedy
        == tracformer("infill", "ab[[6]]cd", "--top-k", "1", "--seed", "5")
        == tracformer("infill", "ab[[6]]cd", "--temperature", "0")
    )
    assert (
        greedy
        == tracformer("infill", "ab[[6]]cd", "--top-p", "1e-9")
        == tracformer("infill", "ab[[6]]cd", "--min-p", "1")
    )
    fill = tracformer.json("infill", "ab[[6]]cd", "--greedy")[0]["spans"][0]["text"]
    assert (
        fill[0]
        not in tracformer.json("infill", "ab[[6]]cd", "--greedy", "--ban", fill[0])[0]["spans"][0][
            "text"
        ]
    )
    absent = next(letter for letter in "abcdefgh" if letter not in fill)
    assert (
        absent
        in tracformer.json("infill", "ab[[6]]cd", "--greedy", "--require", absent)[0]["spans"][0][
            "text"
        ]
    )
    twice = tracformer.json("infill", ".[[30]]", "--no-repeat-ngram", "2", "--fragment")[0]["text"]
    assert len({twice[i : i + 2] for i in range(len(twice) - 1)}) == len(twice) - 1


def test_unknown_lengths(tracformer: Caller) -> None:
    [filled] = tracformer.json("infill", "ab[[2-4]]cd", "--lengths", "rank")
    choice = filled["length_choice"]
    assert choice["lengths"] == [[2], [3], [4]]
    best = max(range(3), key=choice["log_weights"].__getitem__)
    assert choice["chosen"] == choice["lengths"][best] == [len(filled["spans"][0]["token_ids"])]
    [short] = tracformer.json("infill", "ab[[]]cd", "--max-blank", "2")
    assert len(short["spans"][0]["token_ids"]) <= 2


def test_on_a_terminal(tracformer: Caller, terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("infill", "abc [[3]] def", "--ban", "\n")
    [filled] = tracformer.json(*words)
    text, numbers = tracformer(*words).splitlines()
    assert text.startswith("abc \033[")
    assert COLOUR.sub("", text) == filled["text"]
    assert f"log p {filled['log_prob']:.3f}, " in numbers
    assert "3 tokens, car, seed 0" in numbers
    for plain in (
        tracformer(*words, "--no-color"),
        _with(monkeypatch, "NO_COLOR", "1", tracformer, *words),
    ):
        assert plain == COLOUR.sub("", text) + "\n" + COLOUR.sub("", numbers) + "\n"
    assert "\033" not in _with(monkeypatch, "TERM", "dumb", tracformer, *words)


def _with(monkeypatch: pytest.MonkeyPatch, name: str, value: str, call: Caller, *words: str) -> str:
    with monkeypatch.context() as patch:
        patch.setenv(name, value)
        return call(*words)


@pytest.mark.parametrize("words", [[], ["--mode", "ac"], ["--order", "random"], ["--marks"]])
def test_streams_end_as_the_whole_text(tracformer: Caller, words: list[str]) -> None:
    text = "abc [[3]] d[[1-2]]ef[[2]]"
    assert tracformer("infill", text, "--stream", *words) == tracformer("infill", text, *words)


@pytest.mark.usefixtures("terminal")
def test_a_stream_in_any_order_is_drawn_in_place(tracformer: Caller) -> None:
    words = ("infill", "abc [[3]] def", "--order", "random", "--ban", "\n")
    *drawings, last = tracformer(*words, "--stream").split("\r\033[J")[1:]
    assert [COLOUR.sub("", drawn)[4:7].count("_") for drawn in drawings] == [2, 1, 0]
    assert last == tracformer(*words)


def test_bytes_stream_by_whole_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = Caller(capsys, monkeypatch, save_model(tmp_path, byte_tokenizer()))
    text = "aé[[8]]ß"
    assert call("infill", text, "--stream") == call("infill", text)


CONTRADICTIONS = [
    (["--mode", "car", "--order", "random"], "mode 'car' goes from left to right"),
    (["--mode", "car", "--per-step", "2"], "mode 'car' goes from left to right"),
    (["--greedy", "--temperature", "0.5"], "--temperature has no effect"),
    (["--greedy", "--top-p", "0.5"], "--top-p has no effect"),
    (["--search", "beam:4", "--best-of", "3"], "leave one of them out"),
    (["--search", "beam:4", "--top-k", "3"], "search does not sample"),
    (["--search", "beam:4", "--greedy"], "search does not sample"),
    (["--search", "widest"], "search is 'widest'"),
    (["--reread"], "reread ranks candidates: ask for several with best_of"),
    (["--reread", "--search", "best-first:9"], "or with search beam:WIDTH"),
    (["--stream", "--json"], "--json"),
    (["--stream", "-n", "2"], "-n 2"),
    (["--stream", "--best-of", "2"], "--best-of"),
    (["--stream", "b[[1]]"], "there are 2"),
    (["--json", "--marks"], "--marks is for plain text"),
    (["--file", "x"], "leave one or the other out"),
    (["--order", "sideways"], "order is 'sideways'"),
    (["--order", "random", "--threshold", "0.5"], "a threshold goes with an order by confidence"),
    (["--order", "random", "--steps", "5"], "steps go with the order 'ancestral'"),
    (["--steps", f"{10**22}"], f"--steps is {10**22}; it must be in [1, "),
    (["-n", "0"], "-n is 0"),
    (["-n", "few"], "invalid int value: 'few'"),
    (["--batch", "-1"], "--batch is -1"),
    (["--top-p", "2"], "--top-p is 2.0; it must be in (0, 1]"),
    (["--temperature", "nan"], "--temperature is nan; it must be finite and at least 0"),
    (["--lengths", "long"], "--lengths is 'long'; it must be one of sample, rank"),
    (["--nonsense"], "unrecognized arguments: --nonsense; tracformer infill --help lists all"),
    (["--temprature", "2"], "arguments: --temprature 2; did you mean --temperature?"),
    (["--mode", "mlm"], "mode is 'mlm'"),
    (["--ban", "abc"], "--ban 'abc'"),
    (["--ban", ""], "--ban is empty"),
    (["--ban", "\udcff"], "--ban is not UTF-8 text: byte 0xff"),
    (["--require", "z"], "--require 'z'"),
    (["--order", "entropy", "--threshold", "nan"], "threshold is nan"),
    (["--require", "a", "--ban", "a"], "both required and banned"),
]


@pytest.mark.parametrize(
    ("words", "message"), CONTRADICTIONS, ids=[" ".join(words) for words, _ in CONTRADICTIONS]
)
def test_contradictions_are_errors_of_one_line(
    tracformer: Caller, words: list[str], message: str
) -> None:
    assert message in tracformer.refused("infill", "a[[1]]", "-m", str(tracformer.model), *words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"ab[[2", "not closed"),
        (b"ab", "no blank found"),
        (b"ab[[two]]", "'two'"),
        (b"ab[[3-2]]", "smaller number first"),
        (b"a[[1]]\nb[[1]]\n\ncd\n", "standard input, line 4: no blank found"),
        (b"a[[1]]\nbz[[1]]\n", "standard input, line 2: character 'z'"),
        (
            b"a[[1]]\n\xff[[1]]\n",
            "standard input is not UTF-8 text: byte 0xff at offset 7 (line 2)",
        ),
        (b"a[[64]]", "the blanks ask for 64 tokens where 62 fit"),
        (b"a" * 80 + b"[[1]]", "81 tokens"),
        (b"", "standard input holds no text"),
        (b"\n\n", "standard input holds no text"),
    ],
)
def test_bad_texts(tracformer: Caller, text: bytes, message: str) -> None:
    assert message in tracformer.refused("infill", "-m", str(tracformer.model), stdin=text)


@pytest.mark.parametrize(
    ("line", "words", "message"),
    [
        (b"a" * 80 + b"[[1]]", [], "81 tokens"),
        (b"a[[64]]", [], "the blanks ask for 64 tokens where 62 fit"),
        (b"bz[[1]]", [], "character 'z'"),
        (b"a[[1]]", ["--require", "a", "--require", "b"], "2 tokens are required"),
    ],
)
def test_every_line_is_checked_before_the_first_is_filled(
    tracformer: Caller, line: bytes, words: list[str], message: str
) -> None:
    """`refused` means that nothing was printed."""
    reported = tracformer.refused(
        "infill",
        "-m",
        str(tracformer.model),
        "--batch",
        "1",
        *words,
        stdin=b"a[[2]]\nb[[2]]\n" + line,
    )
    assert f"standard input, line 3: {message}" in reported or (
        reported.count("line 3: ") == 1 and message in reported
    )


def test_output_before_a_failing_line_is_kept(tracformer: Caller) -> None:
    text, words = (
        b"a[[1]]\nabcdefgh .[[1]]\nb[[1]]\n",
        ("--no-repeat-ngram", "1", "--ban", "\n", "--fragment"),
    )
    code, out, err = tracformer.call("infill", "-m", str(tracformer.model), *words, stdin=text)
    assert (code, out.count("\n")) == (2, 1)
    assert "standard input, line 2: no token is left to choose from" in err


@pytest.mark.parametrize("words", [["--mode", "zz"], ["--mode", "ac", "--search", "beam:4"]])
@pytest.mark.parametrize("batch", ["1", "16"])
def test_a_wrong_option_is_not_reported_for_a_line(
    tracformer: Caller, words: list[str], batch: str
) -> None:
    reported = tracformer.refused(
        "infill", "-m", str(tracformer.model), "a[[1]]", "b[[1]]", *words, "--batch", batch
    )
    assert reported.startswith("tracformer infill: mode is")


def test_help_says_which_blanks_are_bounded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["infill", "--help"])
    assert "most tokens of a blank [[]]" in capsys.readouterr().out


def test_an_empty_file_is_no_text_even_as_a_whole(tracformer: Caller) -> None:
    assert "standard input holds no text" in tracformer.refused(
        "infill", "-m", str(tracformer.model), "--whole-file", stdin=b""
    )


@pytest.mark.parametrize("verb", ["infill", "score"])
def test_an_empty_argument_is_no_text(tracformer: Caller, verb: str) -> None:
    assert "the text is empty" in tracformer.refused(verb, "-m", str(tracformer.model), "")
    assert "the text is empty" in tracformer.refused(verb, "-m", str(tracformer.model), "", "")


def test_a_required_word_is_named_with_its_space(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = Caller(
        capsys,
        monkeypatch,
        save_model(tmp_path, train_bpe(["a cat", "a cow", "a cup", "a c"] * 9, 266)),
    )
    reported = call.refused("infill", "-m", str(call.model), "a [[2]]", "--require", "cat")
    assert "--require ' cat', with the space before it, is one" in reported
    assert " cat" in call("infill", "a [[2]]", "--require", " cat")


def test_a_text_may_begin_with_a_dash(tracformer: Caller) -> None:
    assert "character '-' at offset 0" in tracformer.refused(
        "infill", "-m", str(tracformer.model), "--", "-[[1]]"
    )


def test_bad_files(tracformer: Caller, tmp_path: Path) -> None:
    words = ("infill", "-m", str(tracformer.model), "--file")
    assert "there is no file nothere.txt" in tracformer.refused(*words, "nothere.txt")
    assert "is a folder" in tracformer.refused(*words, str(tmp_path))
    (tmp_path / "x.txt").write_bytes(b"abc [[1]]\nab\xc3(")
    assert "x.txt is not UTF-8 text: byte 0xc3 at offset 12 (line 2)" in tracformer.refused(
        *words, str(tmp_path / "x.txt")
    )


@pytest.mark.parametrize("verb", ["infill", "score", "sample", "info"])
def test_bad_models(tracformer: Caller, tmp_path: Path, verb: str) -> None:
    words = ["[[a]]"] if verb == "score" else ["[[1]]"] if verb == "infill" else []

    def reported(folder: Path) -> str:
        return tracformer.refused(verb, *words, "--model", str(folder))

    assert "nowhere" in reported(tmp_path / "nowhere")
    assert "holds no model" in reported(tmp_path)
    folder = save_model(tmp_path / "m", char_tokenizer("ab"))
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer" in reported(folder)
    char_tokenizer("abc").save(folder)
    assert "4 tokens and the model of" in reported(folder)
    char_tokenizer("ab").save(folder)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "damaged" in reported(folder)
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in reported(folder)
    (folder / "config.json").write_text("[1]")
    assert "config.json" in reported(folder)


def test_control_characters_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call = Caller(capsys, monkeypatch, save_model(tmp_path, char_tokenizer("\x1b\x9b")))
    words = ("infill", "[[4]]", "--no-color")
    assert set(call(*words)) <= {"\x1b", "\x9b", "\n"}
    monkeypatch.setattr(show, "is_terminal", lambda stream: True)
    for more in ((), ("--stream",), ("--stream", "--marks")):
        assert not set(call(*words, *more)) & {"\x1b", "\x9b"}
    assert not set(call("sample", "--max-tokens", "4", "--no-color", "--stream")) & {"\x1b", "\x9b"}


def test_json_is_one_object_a_line(tracformer: Caller) -> None:
    out = tracformer("infill", "a\u2028b".replace("\u2028", "\n") + "[[3]]", "-n", "2", "--json")
    assert len(out.removesuffix("\n").split("\n")) == 2
    assert all(json.loads(line)["text"].startswith("a\nb") for line in out.splitlines())


def test_interruption_is_quiet(tracformer: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(infill, "_fill_all", interrupt)
    assert tracformer.call("infill", "-m", str(tracformer.model), "a[[1]]") == (130, "", "")


def test_a_lack_of_memory_is_an_error(tracformer: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000000 bytes"
        )

    monkeypatch.setattr(infill, "_fill_all", fail)
    code, _, err = tracformer.call("infill", "-m", str(tracformer.model), "a[[1]]")
    assert code == 1
    assert "out of memory" in err


def test_score_prints_the_models_score(tracformer: Caller) -> None:
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


def test_the_kind_of_a_score_is_printed(tracformer: Caller) -> None:
    assert "(ac: sum of marginals" in tracformer("score", "abc [[de]]", "--mode", "ac")
    assert "(mode ar does not see the text after a blank)" in tracformer(
        "score", "abc [[de]]", "--mode", "ar"
    )
    ar = tracformer.json("score", "[[ab]]cd", "--mode", "ar")[0]["log_prob"]
    # the model sees nothing after the hole
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
        "score", "-m", str(tracformer.model), stdin=b"a[[b]]\nc[[d\n"
    )
    [whole] = tracformer.json("score", "abc")
    assert (whole["mode"], whole["tokens"]) == ("ar", 3)
    assert "whole text: log p" in tracformer("score", "abc")
    assert "whole text" not in tracformer("score", "a[[bc]]")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"cd[[e", "is not closed"),
        (b"[[z]]", "character 'z'"),
        (b"[[" + b"a" * 80 + b"]]", "81 tokens"),
    ],
)
def test_every_line_is_checked_before_the_first_is_scored(
    tracformer: Caller, line: bytes, message: str
) -> None:
    reported = tracformer.refused(
        "score", "-m", str(tracformer.model), "--batch", "1", stdin=b"a[[b]]\n\n" + line
    )
    assert "standard input, line 3: " in reported
    assert message in reported
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
