import json
from pathlib import Path

import numpy as np
import pytest

from tracformer.cli import main
from tracformer.data import PackedBlocks, PreparedData
from tracformer.evaluation.exact import draw_sequences, find_source, parse_exact
from tracformer.evaluation.result_files import read_results


def test_a_packed_row_is_one_sequence_and_its_end(tmp_path: Path) -> None:
    assert (
        main(
            [
                "prepare",
                "exact:grammar,sequences=40,seed=3",
                "--out",
                str(tmp_path / "data"),
                "--json",
            ]
        )
        == 0
    )
    data, source = PreparedData.open(tmp_path / "data"), find_source("grammar")
    assert data.tokenizer.vocab_size == source.symbols + 1
    for split, count in (("train", 40), ("validation", 2)):
        rows = PackedBlocks(data.split(split), source.length + 1)
        tokens, _ = rows.get(np.arange(len(rows)))
        assert np.array_equal(tokens[:, :-1], draw_sequences(source, split, count, 3))
        assert data.tokenizer.eot_id == source.symbols
        assert (tokens[:, -1] == source.symbols).all()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["exact:hmm"], "there is no exact source 'hmm'"),
        (["exact:hmm-4,steps=3"], "sequences=NUMBER or seed=NUMBER"),
        (["exact:hmm-4,sequences=0"], "at least one must be drawn"),
        (["exact:hmm-4", "--tokenizer", "byte"], "is drawn, not read"),
    ],
)
def test_mistakes_are_told(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", *words, "--out", str(tmp_path / "data")]) == 2
    assert told in capsys.readouterr().err


def test_symbols_have_letters_of_their_own() -> None:
    drawn = parse_exact("exact:hmm-64,sequences=1")
    assert drawn.tokenizer.vocab_size == 33
    assert (drawn.sequences, drawn.seed) == (1, 0)


def test_from_the_command_line_data_model_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, trained, out = (str(tmp_path / name) for name in ("data", "run", "results"))
    assert main(["prepare", "exact:grammar,sequences=200", "--out", data, "--json"]) == 0
    small = [
        "model.preset=tiny",
        "model.d_model=16",
        "model.n_head=2",
        "model.n_layer=5",
        "model.max_length=32",
    ]
    assert (
        main(
            [
                "train",
                f"data={data}",
                f"run={trained}",
                *small,
                "length=25",
                "steps=3",
                "optimizer.warmup=1",
                "eval_sequences=8",
            ]
        )
        == 0
    )
    capsys.readouterr()
    words = [
        "--task",
        "exact:source=grammar,sequences=3,patterns=one/all",
        "--out",
        out,
        "--mode",
        "ac",
        "--json",
    ]
    assert main(["eval", trained, *words]) == 0
    told = json.loads(capsys.readouterr().out)
    (result,) = read_results(out)
    assert {row["setting"]["pattern"] for row in told["rows"]} == {"one", "all"}
    assert result.find("kl", pattern="one").value > 0
    assert result.manifest["hashes"]["contexts"]
