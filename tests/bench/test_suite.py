"""The speed suite: pieces, sizes and counted operations."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tracformer import Tracformer, TracformerConfig, native
from tracformer.attention import Layout
from tracformer.baselines import find_family
from tracformer.baselines.mdlm import MDLMConfig
from tracformer.bench import BenchRow, Figures, Scale, growth, least_time, suite
from tracformer.bench.attention_speed import draw_growth
from tracformer.bench.suite import FAILED, BenchPiece, Store, in_fresh_process
from tracformer.bench.training_speed import build
from tracformer.evaluation.flops import (
    at_equal_parameters,
    flops_per_token,
    parameters_of,
    training_mode,
    training_operations,
    weight_multiplies,
)
from tracformer.geometry import encoder_offsets
from tracformer.model.batch import Batch

SCALE = Scale(
    "tiny",
    rounds=1,
    product_shapes=1,
    mebibytes=1,
    heads=2,
    head_size=8,
    n_max=4,
    lengths=(16, 32),
    decoder_lengths=(16, 32),
    masks_up_to=32,
    causal_up_to=32,
    memory_lengths=(32,),
    presets=(("laptop", 1),),
    changes={
        "vocab_size": 11,
        "max_length": 32,
        "n_layer": 5,
        "n_head": 2,
        "d_model": 8,
        "n_max": 4,
    },
    generation_preset="tiny",
    batches=(1, 2),
    tokens=2,
    generation_rounds=1,
    requests=3,
    fills=("5 tokens",),
    long_lengths=(16, 32),
    long_preset="tiny",
)


def here(piece: BenchPiece) -> Figures:
    """Measure in this process, with arguments that went through JSON as for a fresh process."""
    return piece.measure(**json.loads(json.dumps(dict(piece.arguments))))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    made = Store(tmp_path_factory.mktemp("bench"), suite.describe(SCALE))
    suite.run(SCALE, list(suite.PARTS), made, lambda text: None, here)
    return made


def test_every_measurement_has_figures_and_rows(store: Store) -> None:
    rows = suite.rows_of(store.pieces)
    assert not [name for name, figures in store.pieces.items() if FAILED in figures]
    assert set(rows) == set(suite.PARTS)
    every = [row for part in rows.values() for row in part]
    assert all(row.ratio is None or row.ratio >= 0 or "exponent" in row.of for row in every)
    written = json.loads(store.path.read_text())
    assert [each["what"] for each in written["table"]] == [row.what for row in every]
    marked = suite.markdown(rows, store.run)
    assert all(row.what in marked for row in every)
    measured = {name.rsplit("/", name.count("/") - 1)[0] for name in store.pieces}
    assert {each.name for part in suite.PARTS.values() for each in part} == measured


def test_the_picture_shows_encoder_attention(store: Store, tmp_path: Path) -> None:
    assert draw_growth(store.pieces, tmp_path / "all.svg")
    assert "encoder attention" in (tmp_path / "all.svg").read_text()
    assert not draw_growth(
        {"machine/limits/all": store.pieces["machine/limits/all"]}, tmp_path / "none.png"
    )
    with pytest.raises(ValueError, match=r"'all.gif'; it must end in one of: .png"):
        draw_growth(store.pieces, tmp_path / "all.gif")


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
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
    names = [piece.name for piece in suite.pieces_of(SCALE, parts)]
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
    Store(tmp_path, {"threads": 1}).save({})
    with pytest.raises(ValueError, match="threads is 1, but now it is 2"):
        Store(tmp_path, {"threads": 2})
    assert Store(tmp_path, {"threads": 2}, fresh=True).pieces == {}
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ValueError, match="not a result of `tracformer bench`"):
        Store(tmp_path, {"threads": 1})


def test_a_failed_piece_does_not_end_the_run() -> None:
    assert "killed by signal 6" in in_fresh_process(BenchPiece("x", os.abort, {}))[FAILED]
    assert "ValueError: T is 0" in in_fresh_process(BenchPiece("x", refuse, {"T": 0}))[FAILED]


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
        for rows in suite.rows_of({"machine/limits/all": MACHINE, **pieces}).values()
        for row in rows
        if what in row.what and of in row.of
    )


def test_utilization_of_a_training_step() -> None:
    """It is operations over seconds over the measured rate of matrix products."""
    step = {
        "seconds": 10.0,
        "operations": 800e9,
        "tokens": 2048,
        "parameters_without_embeddings": 80e6,
        "peak_bytes": 1e9,
    }
    row = find(
        {"training/step/paper-small/native float32": step}, "native float32", "matrix-product rate"
    )
    assert row.ratio == pytest.approx(800e9 / 10.0 / 100e9)
    assert row.value == pytest.approx(204.8)


def test_a_dense_layer_counts_for_every_layer() -> None:
    figures = {
        "layers": 12,
        "seconds": {"native": [0.03] * 12, "dense mask": [2.0], "causal": [1.0]},
    }
    pieces = {"attention/encoder/4096": figures}
    row = find(pieces, "encoder attention, native", "dense mask")
    assert row.ratio == pytest.approx(2.0 / 0.03)
    assert find(pieces, "full encoder", "multi-scope").ratio == pytest.approx(1.0 / 0.03)


def test_growth_compares_the_same_layers() -> None:
    """Twice the length takes twice the time of each layer, and has one layer more."""
    pieces = {
        f"attention/encoder/{T}": {"layers": n, "seconds": {"native": [T / 512] * n}}
        for n, T in ((9, 512), (10, 1024), (15, 32768))
    }
    assert find(pieces, "growth", "layers 1 to 9").ratio == pytest.approx(1.0)
    assert (find(pieces, "growth", "all log2(T)").ratio or 0.0) > 1.05
    assert growth({4: 1.0}) is growth({4: 0.0, 8: 1.0}) is None


def test_generation_is_compared_with_bandwidth_and_gpt2() -> None:
    figures = {
        "seconds": {"car": 0.02, "ar": 0.02, "gpt2": 0.03},
        "weight_bytes": 440e6,
        "gpt2_weight_bytes": 460e6,
        "parameters": 110e6,
        "gpt2_parameters": 115e6,
    }
    share = find({"generation/batch/1": figures}, "Tracformer car", "bandwidth")
    assert share.ratio == pytest.approx(440e6 / 0.02 / 40e9)
    faster = find({"generation/batch/16": figures}, "Tracformer car", "GPT-2")
    assert faster.ratio == pytest.approx(1.5)
    assert faster.value == pytest.approx(16 / 0.02)


@pytest.mark.skipif(not native.available(), reason="no C++ compiler")
@pytest.mark.parametrize("count", [0, 1, 127, 100_003, 2**18 + 5])
def test_the_reader_reads_everything(count: int) -> None:
    x = torch.randint(-3, 4, (count,)).float()  # small integers: their sum is exact in any order
    assert torch.ops.tracformer.streamed_sum(x) == x.sum().item()


def test_least_time_runs_once_to_warm_up() -> None:
    calls: list[int] = []
    assert least_time(lambda: calls.append(1), rounds=3) >= 0.0
    assert len(calls) == 4


# ---- counts of weight products against PyTorch's own counter

ATEN = torch.ops.aten
SMALL = {"vocab_size": 11, "max_length": 32, "n_layer": 2, "n_head": 2, "d_model": 8}


class NoProducts:
    """Passes gradients to queries, keys and values without a matrix product: what is left to count
    are the weights.
    """

    def encode(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout
    ) -> Tensor:
        return q + k + v

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        return q + k.sum() + v.sum()


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("tracformer", "car"),
        ("tracformer", "ac"),
        ("tracformer", "ar"),
        ("gpt2", "ar"),
        ("bert", "ac"),
        ("bart", "car"),
    ],
)
def test_as_many_as_torch_counts(family: str, mode: str) -> None:
    config = {**SMALL, "n_layer": 5} if family == "tracformer" else SMALL
    model = build(family, config, "reference").train()
    if isinstance(model, Tracformer):
        model.attention = NoProducts()
    tokens = torch.randint(11, (2, 32))
    context = torch.rand(2, 32) < 0.5
    context[0, 0] = False
    if training_mode(family)[1]:
        context = torch.zeros_like(context)
    with FlopCounterMode(display=False) as counter:
        model.loss(Batch(tokens, context), mode).backward()
    by_operation = counter.get_flop_counts()["Global"]
    # attention's products are batched: bmm and others
    counted = sum(by_operation.get(operation, 0) for operation in (ATEN.mm, ATEN.addmm))
    assert counted == training_operations(model.config, 64, int((~context).sum()), mode)


@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("tracformer", "car"),
        ("tracformer", "ar"),
        ("gpt2", "ar"),
        ("bert", "ac"),
        ("ac-gpt", "car"),
    ],
)
def test_any_system_is_counted_by_running_it(family: str, mode: str) -> None:
    """Weight products, and beside them those of attention: for a Tracformer the pairs of its
    geometry, else all pairs.
    """
    T = 32
    config = find_family(family).config_class.from_dict(
        {**SMALL, "n_layer": 5 if family == "tracformer" else 2}
    )
    counted = flops_per_token(config, mode, "span:p=0.5,mean=4" if mode != "ar" else "", T)
    if family == "ac-gpt":  # more rows than tokens
        plain = flops_per_token(find_family("gpt2").config_class.from_dict(SMALL), "ar", "", T)
        assert counted > 1.2 * plain
        return
    targets = 1.0 if mode == "ar" else 0.5
    weights = training_operations(config, T, round(targets * T), mode) / T
    if isinstance(config, TracformerConfig):
        offsets = [encoder_offsets(layer, config.n_max) for layer in range(1, 6)]
        pairs = sum(T - offset for each in offsets for offset in each if offset < T) / T
        readings = 1 if mode == "ar" else 2
        encoder = 6 * 2 * readings * pairs * config.d_model
        assert weights + encoder < counted < weights + encoder + 6 * 2 * 5 * T * config.d_model
    else:
        assert counted == pytest.approx(weights + 6 * 2 * 2 * T * 8)


def test_measuring_cost_does_not_change_random_numbers() -> None:
    config = MDLMConfig(vocab_size=11, max_length=32, n_layer=1, n_head=2, d_model=8, d_condition=8)
    torch.manual_seed(3)
    first = torch.rand(1)
    torch.manual_seed(3)
    assert flops_per_token(config, "denoise") == flops_per_token(config, "denoise") > 0
    assert torch.rand(1) == first


def test_in_units_of_the_width() -> None:
    """An encoder pair does 24 d^2 multiply-adds a token and layer; keys and values are made
    everywhere, the rest at targets.
    """
    config = TracformerConfig(vocab_size=10, max_length=1024, n_layer=10, d_model=576)
    d2 = 576**2
    assert weight_multiplies(config, 1000, 0) == 10 * 1000 * (24 + 4) * d2
    assert (
        weight_multiplies(config, 1000, 1000) - weight_multiplies(config, 1000, 0)
        == 10 * 1000 * 10 * d2 + 1000 * 10 * 576
    )


@pytest.mark.parametrize("family", ["gpt2", "bert", "bart"])
@pytest.mark.parametrize("preset", ["laptop", "paper-small"])
def test_peers_of_equal_parameters(family: str, preset: str) -> None:
    ours = TracformerConfig.preset(preset)
    assert parameters_of(at_equal_parameters(family, ours)) == pytest.approx(
        parameters_of(ours), rel=0.06
    )


def test_an_uncounted_system() -> None:
    with pytest.raises(ValueError, match="'mdlm' are not known"):
        weight_multiplies(MDLMConfig(vocab_size=5), 1, 1)
