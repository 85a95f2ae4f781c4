"""Compiled attention: exact, linear in memory, and replaced where it cannot be built."""

import logging
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers import needs_compiler
from tracformer import Tracformer, TracformerConfig, geometry
from tracformer import native as native_build
from tracformer.attention import Layout, build_attention
from tracformer.bench.attention_speed import (
    attention_of,
    decode_with,
    encode_with,
    forward_backward,
    heads_of,
    layers_of,
    whole_layout,
)
from tracformer.model.batch import Batch

reference, native = build_attention("reference"), build_attention("native")


def random_inputs(
    seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


def with_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weight = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(output.dtype)
    return [output, *torch.autograd.grad(output, inputs, weight)]


def decoder_case(
    T: int,
    lengths: list[int],
    readings: int,
    size: int,
    keep: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[Tensor], Layout]:
    ends = torch.tensor(lengths)
    inside = torch.arange(T) < ends[:, None]
    rows = (
        (inside & (torch.rand(inside.shape, generator=torch.Generator().manual_seed(T)) < keep))
        .flatten()
        .nonzero()[:, 0]
    )
    keys = (readings * len(lengths), T, 2, size)
    return random_inputs(T, (len(rows), 2, size), keys, keys, dtype=dtype), Layout(
        ends, T, readings, rows
    )


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    T=st.sampled_from([7, 97, 200, 390]),
    stride=st.sampled_from([1, 2, 3, 8, 32, 128]),
    size=st.sampled_from([1, 8, 20, 64]),
    readings=st.integers(1, 2),
    keep=st.sampled_from([0.1, 0.6, 1.0]),
)
def test_decode_over_many_tiles_and_head_sizes(
    T: int, stride: int, size: int, readings: int, keep: float
) -> None:
    inputs, layout = decoder_case(T, [T, T - 5], readings, size, keep)
    expected, actual = (
        with_gradients(each.decode(*inputs, stride, layout), inputs) for each in (reference, native)
    )
    torch.testing.assert_close(actual, expected, atol=1e-11, rtol=0)


@needs_compiler
@settings(max_examples=40, deadline=None)
@given(
    T=st.sampled_from([7, 97, 200, 600, 1100]),
    layer=st.integers(1, 10),
    n_max=st.sampled_from([2, 7, 16, 32, 130]),
    key_set=st.sampled_from(geometry.KEY_SETS),
    size=st.sampled_from([1, 8, 20, 64]),
)
def test_encode_over_many_tiles_and_segments(
    T: int, layer: int, n_max: int, key_set: str, size: int
) -> None:
    """A single row and head leave few tasks, so that classes are cut into segments."""
    inputs = random_inputs(T, *[(1, T, 1, size)] * 3)
    layout = Layout(torch.tensor([T]), T, 1, torch.arange(T))
    offsets = geometry.encoder_offsets(layer, n_max, key_set)
    expected, actual = (
        with_gradients(each.encode(*inputs, offsets, layout), inputs)
        for each in (reference, native)
    )
    torch.testing.assert_close(actual, expected, atol=1e-11, rtol=0)


@needs_compiler
@pytest.mark.parametrize("stride", [2, 16, 128])
def test_decode_in_float32_stays_close(stride: int) -> None:
    exact, layout = decoder_case(300, [300, 211], 2, 64)
    rough = [x.detach().float().requires_grad_() for x in exact]
    expected = with_gradients(reference.decode(*exact, stride, layout), exact)
    actual = with_gradients(native.decode(*rough, stride, layout), rough)
    torch.testing.assert_close(actual, [x.float() for x in expected], atol=1e-5, rtol=1e-5)


@needs_compiler
@pytest.mark.parametrize("layer", [3, 8])
def test_encode_in_float32_stays_close(layer: int) -> None:
    layout, offsets = (
        Layout(torch.tensor([300]), 300, 1, torch.arange(300)),
        geometry.encoder_offsets(layer, 16),
    )
    exact = random_inputs(0, *[(1, 300, 2, 64)] * 3)
    rough = [x.detach().float().requires_grad_() for x in exact]
    expected = with_gradients(reference.encode(*exact, offsets, layout), exact)
    actual = with_gradients(native.encode(*rough, offsets, layout), rough)
    torch.testing.assert_close(actual, [x.float() for x in expected], atol=1e-5, rtol=1e-5)


@needs_compiler
def test_inputs_and_gradients_in_any_memory_order() -> None:
    """Slices of one projection, rows out of order, a gradient that is one number
    seen everywhere.
    """
    T, layout = 90, Layout(torch.tensor([90]), 90, 2, torch.randperm(90)[:50])
    (projected,) = random_inputs(0, (2, T, 3, 2, 16))
    q, k, v = projected.unbind(2)
    # the last dimension is not dense
    across = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]
    for inputs in ([q, k, v], across):
        queries = inputs[0].reshape(-1, 2, 16)[layout.rows]
        for stride in (2, 64):
            results = [
                each.decode(queries, *inputs[1:], stride, layout) for each in (reference, native)
            ]
            slopes = [
                torch.autograd.grad(result.sum(), projected, retain_graph=True)[0]
                for result in results
            ]
            torch.testing.assert_close(
                (results[1], slopes[1]), (results[0], slopes[0]), atol=1e-12, rtol=0
            )
        results = [
            each.encode(*inputs, geometry.encoder_offsets(6, 5), layout)
            for each in (reference, native)
        ]
        slopes = [
            torch.autograd.grad(result.sum(), projected, retain_graph=True)[0] for result in results
        ]
        torch.testing.assert_close(
            (results[1], slopes[1]), (results[0], slopes[0]), atol=1e-12, rtol=0
        )


@needs_compiler
@pytest.mark.parametrize("stride", [1, 4, 64])
def test_keys_without_queries_get_zero_gradients(stride: int) -> None:
    T = 60
    layout = Layout(torch.tensor([40]), T, 2, torch.tensor([20]))
    q, k, v = random_inputs(0, (1, 2, 8), (2, T, 2, 8), (2, T, 2, 8))
    for _ in range(3):  # freed memory is handed out again with whatever it holds
        torch.full((2, T, 2, 8), torch.nan)
        grads = torch.autograd.grad(native.decode(q, k, v, stride, layout).sum(), [k, v])
        read = torch.zeros(2, T, dtype=torch.bool)
        read[0, list(range(19, -1, -stride))] = read[1, list(range(18, -1, -stride))] = True
        for grad in grads:
            assert (grad[~read] == 0).all()
        assert (grads[1][read] != 0).all()


@needs_compiler
def test_a_query_without_keys_is_zero_and_so_is_its_gradient() -> None:
    layout = Layout(torch.tensor([1]), 1, 2, torch.tensor([0]))
    q, k, v = random_inputs(0, (1, 2, 8), (2, 1, 2, 8), (2, 1, 2, 8))
    out = native.decode(q, k, v, 2, layout)
    assert all((x == 0).all() for x in with_gradients(out, [q, k, v]))


@needs_compiler
def test_no_queries() -> None:
    layout = Layout(torch.tensor([5]), 5, 2, torch.empty(0, dtype=torch.long))
    q, k, v = random_inputs(0, (0, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    out, *grads = with_gradients(native.decode(q, k, v, 2, layout), [q, k, v])
    assert out.shape == (0, 2, 8)
    assert all((x == 0).all() for x in grads)


@needs_compiler
def test_large_scores_do_not_overflow() -> None:
    inputs, layout = decoder_case(80, [80], 2, 16, dtype=torch.float32)
    large = [(inputs[0] * 200).detach().requires_grad_(), *inputs[1:]]
    expected, actual = (
        with_gradients(each.decode(*large, 2, layout), large) for each in (reference, native)
    )
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@needs_compiler
def test_shapes_are_known_without_running() -> None:
    """What tracing asks for: meta tensors give results of the same shapes, strides and dtypes."""
    (q, k, v), layout = decoder_case(40, [40], 2, 8)
    ops = torch.ops.tracformer
    strided = (q, k, v, layout.rows, layout.lengths)
    out, lse = ops.strided_forward(*strided, 4)
    sliding = (k, v, k + v)
    wide, wide_lse = ops.window_forward(*sliding, 2, 3, [7])
    for op, tensors, numbers in (
        (ops.strided_forward, strided, (4,)),
        (ops.strided_backward, (out, *strided[:3], out, lse, *strided[3:]), (4,)),
        (ops.window_forward, sliding, (2, 3, [7])),
        (ops.window_backward, (wide, *sliding, wide, wide_lse), (2, 3, [7])),
    ):
        known = op(*(x.to("meta") for x in tensors), *numbers)
        for expected, actual in zip(op(*tensors, *numbers), known, strict=True):
            assert (actual.shape, actual.stride(), actual.dtype) == (
                expected.shape,
                expected.stride(),
                expected.dtype,
            )


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a new process with an empty cache."""
    monkeypatch.setattr(native_build, "_loaded", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tracformer"


@pytest.mark.parametrize("reason", ["no compiler", "failing compiler", "no cache folder"])
def test_without_compiled_code_blocked_is_used(
    reason: str, unbuilt: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if reason == "no cache folder":
        unbuilt.write_text("a file stands where the folder should be")
    else:
        monkeypatch.setenv("CXX", "no-such-compiler" if reason == "no compiler" else "false")
    inputs, layout = decoder_case(30, [30, 20], 2, 8)
    with caplog.at_level(logging.WARNING, logger="tracformer"):
        for _ in range(2):
            decoded = native.decode(*inputs, 2, layout)
            encoded = native.encode(*inputs[1:], inputs[2], (0, 1, 2), layout)
    assert torch.equal(decoded, build_attention("blocked").decode(*inputs, 2, layout))
    assert torch.equal(
        encoded, build_attention("blocked").encode(*inputs[1:], inputs[2], (0, 1, 2), layout)
    )
    assert len(caplog.records) == 1


def test_other_dtypes_use_blocked() -> None:
    inputs, layout = decoder_case(30, [30], 2, 8)
    half = [x.detach().bfloat16() for x in inputs]
    assert torch.equal(
        native.decode(*half, 2, layout), build_attention("blocked").decode(*half, 2, layout)
    )


def test_half_precision_compiles_the_code_too(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run under autocast would never get it otherwise: rotary code takes it only where it is
    there, and hands bfloat16 on until then.
    """
    requested: list[str] = []

    def library() -> Path:
        requested.append("library")
        raise native_build.BuildError("none here")

    monkeypatch.setattr(native_build, "library", library)
    inputs, layout = decoder_case(30, [30], 2, 8)
    native.decode(*(x.detach().bfloat16() for x in inputs), 2, layout)
    assert requested == ["library"]


SLOW_COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then printf first >"$2"; sleep 0.5; printf second >>"$2"; fi
  shift
done
"""


@pytest.mark.skipif(os.name != "posix", reason="the stand-in for a compiler is a shell script")
def test_processes_that_build_at_once_do_not_clash(
    unbuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, second = (
            built.result()
            for built in [pool.submit(native_build.library), pool.submit(native_build.library)]
        )
    assert first == second
    assert [path.read_text() for path in unbuilt.glob("*.so")] == ["firstsecond"]


COUNTING_COMPILER = """#!/bin/sh
echo run >>"$0.runs"
echo "#define VERSION {version}"
"""


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(), reason="elsewhere the compiler is run each time"
)
def test_a_compiler_is_run_again_only_after_it_changed(
    unbuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, runs = tmp_path / "compiler", tmp_path / "compiler.runs"

    def install(version: int) -> None:
        compiler.write_text(COUNTING_COMPILER.format(version=version))
        compiler.chmod(0o755)
        os.utime(compiler, (version, version))

    install(1)
    first, again = native_build.target(str(compiler)), native_build.target(str(compiler))
    assert first == again == "#define VERSION 1\n"
    assert len(runs.read_text().split()) == 1
    install(2)
    assert native_build.target(str(compiler)) == "#define VERSION 2\n"
    monkeypatch.setattr(native_build, "processor_kind", lambda: "flags: another processor")
    native_build.target(str(compiler))
    assert len(runs.read_text().split()) == 3


def test_importing_neither_compiles_nor_loads() -> None:
    code = (
        "import sys, tracformer.attention as a; a.build_attention('blocked'); "
        "print('tracformer.attention.native' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )


# ---- no buffer of T x T elements, in tensors or in compiled code

LONG = 8192


class Largest(TorchDispatchMode):
    """The most elements that any tensor had which an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        held = [
            leaf.untyped_storage().nbytes() // leaf.element_size()
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor)
        ]
        self.elements = max(self.elements, *held, 0)
        return result


def largest_of(name: str, side: str, T: int) -> int:
    """Over a forward and backward of the widest encoder layer, or of the decoder's
    finest stride.
    """
    q, k, v = heads_of(1, T, 1, 16, 3)
    if side == "encoder":
        run = forward_backward(
            encode_with(
                attention_of(name), geometry.encoder_offsets(layers_of(T), 16), whole_layout(T, 1)
            ),
            [q, k, v],
        )
    else:
        rows = [q.detach()[0].requires_grad_(), *heads_of(2, T, 1, 16, 2)]
        run = forward_backward(decode_with(attention_of(name), 2, whole_layout(T, 2)), rows)
    with Largest() as largest:
        run()
    return largest.elements


@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["native", "blocked"])
def test_tensors_grow_linearly(name: str, side: str) -> None:
    assert largest_of(name, side, 1024) <= 2.5 * largest_of(name, side, 512) < 2.5 * 512**2


def test_the_watcher_sees_a_dense_mask() -> None:
    assert largest_of("dense mask", "encoder", 256) >= 256**2
    assert largest_of("reference", "decoder", 256) >= 2 * 256**2


@pytest.mark.soak
@pytest.mark.parametrize("side", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["native", "blocked"])
def test_a_process_never_holds_a_square(name: str, side: str) -> None:
    """At T = 8192 a mask of bytes would be 64 MiB: a fresh process grows by less over forward and
    backward, all scratch included.
    """
    assert largest_of(name, side, LONG) < LONG**2
    requested = f"memory('{side} {name}', {LONG}, heads=1, head_size=16, n_max=16)"
    code = f"from tracformer.bench.attention_speed import memory\nprint({requested}['bytes'])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert float(done.stdout) < LONG**2


@pytest.mark.soak
def test_a_whole_training_step_holds_no_square() -> None:
    """Model, loss and gradients at T = 8192, every tensor that an operation returns."""
    config = TracformerConfig(
        vocab_size=50, max_length=LONG, n_layer=13, n_head=1, d_model=16, n_max=16
    )
    model = Tracformer(config).train()
    tokens, context = torch.randint(50, (1, LONG)), torch.rand(1, LONG) < 0.5
    with Largest() as largest:
        model.loss(Batch(tokens, context)).backward()
    assert 0 < largest.elements < LONG**2 // 8
