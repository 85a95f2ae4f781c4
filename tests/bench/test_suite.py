"""A run of tiny sizes, what becomes of it when it is cut short, and what its table says."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tracformer.bench.pieces import FAILED, BenchPiece, BenchRow, Figures, Scale, Store
from tracformer.bench.worker import call, measured

from tracformer.bench import plot, suite
from tracformer.bench import suite as tables

SCALE = Scale(
    "tiny",
    rounds=1,
    matmul_shapes=1,
    bandwidth_mebibytes=1,
    heads=2,
    head_size=8,
    n_max=4,
    lengths=(16, 32),
    decoder_lengths=(16, 32),
    masks_up_to=32,
    causal_up_to=32,
    compiled_lengths=(),
    memory_lengths=(32,),
    presets=(("laptop", 1),),
    shrink={
        "vocab_size": 11,
        "max_length": 32,
        "n_layer": 5,
        "n_head": 2,
        "d_model": 8,
        "n_max": 4,
    },
    compile_preset="",
    wide=((16, 1),),
    wide_width=16,
    wide_heads=2,
    wide_vocab=11,
    wide_rounds=1,
    generation_preset="tiny",
    batches=(1, 2),
    tokens=2,
    generation_rounds=1,
    requests=3,
    long_lengths=(16, 32),
    long_preset="tiny",
)


def here(piece: BenchPiece) -> Figures:
    """In this process, from arguments that went through JSON as they do on the way to another."""
    return call(
        piece.measure.__module__,
        piece.measure.__qualname__,
        json.loads(json.dumps(dict(piece.arguments))),
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("bench"), suite.describe(SCALE))
    suite.run(SCALE, list(suite.PARTS), made, lambda text: None, here)
    return made


def test_every_part_has_lines(store: Store) -> None:
    rows = suite.rows_of(store.pieces)
    assert not [name for name, figures in store.pieces.items() if FAILED in figures]
    assert {row.part for row in rows} == set(suite.PARTS)
    assert all(row.ratio is None or row.ratio >= 0 or "exponent" in row.of for row in rows)
    written = json.loads(store.path.read_text())
    assert written["table"] == [row.to_dict() for row in rows]
    shown, marked = tables.text(rows), tables.markdown(rows, store.run)
    for row in rows:
        assert row.what in shown
        assert row.what in marked


def test_a_picture(store: Store, tmp_path: Path) -> None:
    assert plot.draw(store.pieces, tmp_path / "all.svg")
    assert "training step" in (tmp_path / "all.svg").read_text()
    assert not plot.draw({"machine/limits": store.pieces["machine/limits"]}, tmp_path / "none.png")
    with pytest.raises(ValueError, match=r"'all.gif'; it must end in one of: .png"):
        plot.draw(store.pieces, tmp_path / "all.gif")


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    done: list[str] = []

    def cut_short(piece: BenchPiece) -> Figures:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(piece.name)
        return (
            {FAILED: "no memory"}
            if len(done) == 2
            else {"layers": 4, "seconds": {"native": [1.0] * 4}}
        )

    parts = ["attention"]
    names = [piece.name for piece in suite.all_pieces(SCALE, parts)]
    with pytest.raises(KeyboardInterrupt):
        suite.run(SCALE, parts, Store(tmp_path, {"scale": "tiny"}), lambda text: None, cut_short)
    assert done == names[:3]
    again: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        suite.run(
            SCALE,
            parts,
            Store(tmp_path, {"scale": "tiny"}),
            lambda text: None,
            lambda piece: again.append(piece.name) or stop(),
        )
    assert again == [names[1]]  # the one that failed is tried again first


def stop() -> Figures:
    raise KeyboardInterrupt


def test_figures_of_another_run_are_refused(tmp_path: Path) -> None:
    Store(tmp_path, {"threads": 1}).save([])
    with pytest.raises(ValueError, match="threads was 1, and is now 2"):
        Store(tmp_path, {"threads": 2})
    assert Store(tmp_path, {"threads": 2}, fresh=True).pieces == {}
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ValueError, match="not a result of `tracformer bench`"):
        Store(tmp_path, {"threads": 1})


def test_a_piece_that_fails_or_is_killed_is_told() -> None:
    assert "killed by signal 6" in measured(BenchPiece("x", os.abort))[FAILED]
    assert "ValueError: T is 0" in measured(BenchPiece("x", refuse, {"T": 0}))[FAILED]


def refuse(T: int) -> Figures:
    raise ValueError(f"T is {T}")


MACHINE: Figures = {
    "rate_float32": 100e9,
    "rate_bfloat16": 200e9,
    "products_float32": {"a": 1.0},
    "products_bfloat16": {"a": 1.0},
    "read": 40e9,
    "copy": 30e9,
    "matrix_vector": 15e9,
    "read_by": "native code",
}


def find(pieces: dict[str, Any], what: str, of: str) -> BenchRow:
    return next(
        row
        for row in suite.rows_of({"machine/limits": MACHINE, **pieces})
        if what in row.what and of in row.of
    )


@pytest.mark.parametrize(("seconds", "met"), [(10.0, True), (20.0, False)])
def test_utilisation(seconds: float, met: bool) -> None:
    """Operations over seconds over the measured rate."""
    step = {
        "seconds": seconds,
        "operations": 800e9,
        "tokens": 2048,
        "parameters_without_embeddings": 80e6,
        "peak_bytes": 1e9,
    }
    row = find(
        {"training/paper-small/native float32": step}, "native float32", "matrix-product rate"
    )
    assert row.ratio == pytest.approx(800e9 / seconds / 100e9)
    assert (row.target, row.met) == (0.65, met)


@pytest.mark.parametrize(("native", "met"), [(0.03, True), (0.09, False)])
def test_encoder_against_dense(native: float, met: bool) -> None:
    figures = {
        "layers": 12,
        "seconds": {"native": [native] * 12, "dense mask": [2.0], "causal": [1.0]},
    }
    row = find({"attention/encoder/4096": figures}, "encoder attention, native", "dense mask")
    assert row.ratio == pytest.approx(2.0 / native)
    assert (row.target, row.met) == (30.0, met)
    assert find(
        {"attention/encoder/4096": figures}, "full encoder", "multi-scope"
    ).ratio == pytest.approx(1.0 / native)


def test_growth_is_of_the_same_layers() -> None:
    """Twice the length, twice the time of each layer, one layer more."""
    pieces = {
        f"attention/encoder/{T}": {"layers": n, "seconds": {"native": [T / 512] * n}}
        for n, T in ((9, 512), (10, 1024), (15, 32768))
    }
    assert find(pieces, "growth", "layers 1 to 9").ratio == pytest.approx(1.0)
    assert find(pieces, "growth", "layers 1 to 9").met
    assert (find(pieces, "growth", "all log2(T)").ratio or 0.0) > 1.05


def test_generation_against_bandwidth_and_gpt2() -> None:
    figures = {
        "seconds": {"car": 0.02, "ar": 0.02, "gpt2": 0.03},
        "weight_bytes": 440e6,
        "gpt2_weight_bytes": 460e6,
        "parameters": 110e6,
        "gpt2_parameters": 115e6,
    }
    share = find({"generation/batch/1": figures}, "Tracformer car", "bandwidth")
    assert (share.ratio, share.met) == (pytest.approx(440e6 / 0.02 / 40e9), False)
    faster = find({"generation/batch/1": figures}, "Tracformer car", "GPT-2")
    assert (faster.ratio, faster.target, faster.met) == (pytest.approx(1.5), 2.0, False)
    faster = find({"generation/batch/16": figures}, "Tracformer car", "GPT-2")
    assert (faster.target, faster.met) == (1.5, True)


def test_doubtful_pieces_are_told() -> None:
    pieces = {"a/b": {"others": 0.9}, "a/c": {"others": 0.0}, "a/d": {FAILED: "no memory"}}
    told = tables.warnings(pieces, suite.doubtful(pieces))
    assert told == [
        "a/d failed: no memory.",
        "Others kept the machine busy during 1 of 3 pieces (a/b): these figures mean little.",
    ]
