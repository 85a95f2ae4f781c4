"""The GPU kernels, without a GPU: run by Triton's interpreter against the definition, and compiled
ahead for two GPUs.
"""

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tracformer import geometry
from tracformer.attention import Layout, build_attention, triton

pytestmark = pytest.mark.skipif(not triton.installed(), reason="no Triton")
Interpret = Callable[..., Any]


@pytest.fixture(scope="module")
def interpret() -> Iterator[Interpret]:
    """Calls a function in a process whose kernels are interpreted: Triton looks at the variable
    once, when it is imported.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TRITON_INTERPRET", "1")
            pool.submit(triton.installed).result()  # the process is there, and keeps the variable
        yield lambda function, *args: pool.submit(function, *args).result()


def random_inputs(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def compare(attend: Callable[..., Tensor], inputs: list[Tensor], tolerance: float) -> None:
    """Result and all gradients of the kernels against the definition in float64.

    What the kernels leave unwritten is nan.
    """
    torch.use_deterministic_algorithms(True)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = attend(build_attention("reference"), *exact)
    weight = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(inputs[0].dtype)
    attention = build_attention("triton")
    vars(attention).pop("otherwise")  # nothing else may answer
    actual = attend(attention, *inputs)
    results = [actual, *torch.autograd.grad(actual, inputs, weight)]
    assert all(x.dtype == inputs[0].dtype for x in results)
    wanted = [expected, *torch.autograd.grad(expected, exact, weight.double())]
    torch.testing.assert_close(
        [x.double() for x in results], wanted, atol=tolerance, rtol=tolerance
    )


def compare_encode(
    T: int,
    lengths: list[int],
    readings: int,
    offsets: tuple[int, ...],
    size: int,
    dtype: torch.dtype,
    tol: float,
) -> None:
    layout = Layout(torch.tensor(lengths), T, readings, torch.arange(1))
    inside = (torch.arange(T) < layout.lengths[:, None]).repeat(readings, 1)[..., None, None]
    inputs = random_inputs(
        *[(readings * len(lengths), T, 2 if T < 9 else 1, size)] * 3, dtype=dtype
    )
    compare(lambda attention, *x: attention.encode(*x, offsets, layout) * inside, inputs, tol)


def compare_decode(
    T: int,
    lengths: list[int],
    readings: int,
    stride: int,
    keep: float,
    size: int,
    dtype: torch.dtype,
    tol: float,
) -> None:
    inside = torch.arange(T) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(0)
    rows = (
        (inside & (torch.rand(inside.shape, generator=generator) < keep)).flatten().nonzero()[:, 0]
    )
    layout = Layout(
        torch.tensor(lengths), T, readings, rows[torch.randperm(len(rows), generator=generator)]
    )
    keys = (readings * len(lengths), T, 2 if stride == 1 else 1, size)
    inputs = random_inputs((len(rows), *keys[2:]), keys, keys, dtype=dtype)
    compare(lambda attention, *x: attention.decode(*x, stride, layout), inputs, tol)


EXACT = (torch.float64, 1e-12)
SEVERAL_TILES = 40  # a head size at which float64 tiles have 16 rows


@pytest.mark.parametrize(
    ("T", "lengths", "readings", "offsets", "size"),
    [
        (1, [1], 2, geometry.encoder_offsets(3, 4), 4),
        (7, [7, 3], 2, geometry.encoder_offsets(2, 5), 6),  # every key, more heads than one
        # 33 keys: a window over four tiles
        (61, [61], 1, geometry.encoder_offsets(6, 64), SEVERAL_TILES),
        (75, [75], 1, geometry.encoder_offsets(3, 3), SEVERAL_TILES),  # two classes of three tiles
        # five classes, and the far end off the grid
        (30, [30, 9], 2, geometry.encoder_offsets(5, 4), 6),
        (47, [47], 1, geometry.encoder_offsets(4, 5, "rounded"), SEVERAL_TILES),
        (23, [23], 1, geometry.encoder_offsets(5, 4, "rounded"), 16),  # two keys off the grid
    ],
)
def test_encode(
    interpret: Interpret,
    T: int,
    lengths: list[int],
    readings: int,
    offsets: tuple[int, ...],
    size: int,
) -> None:
    interpret(compare_encode, T, lengths, readings, offsets, size, *EXACT)


@pytest.mark.parametrize(
    ("T", "lengths", "readings", "stride", "keep", "size"),
    [
        (1, [1], 2, 2, 1.0, 4),  # a query without keys
        (5, [5], 2, 2, 0.0, 4),  # no queries
        (37, [37, 20], 2, 1, 0.6, SEVERAL_TILES),  # the dense decoder
        (71, [71, 50], 2, 2, 0.4, SEVERAL_TILES),
        (66, [66, 40], 1, 2, 0.1, SEVERAL_TILES),  # blocks without queries
        (21, [21, 13], 1, 4, 1.0, 6),
        (14, [14, 11], 2, 3, 1.0, 6),
        (9, [9, 4, 1], 2, 16, 1.0, 6),  # longer strides than the text
    ],
)
def test_decode(
    interpret: Interpret,
    T: int,
    lengths: list[int],
    readings: int,
    stride: int,
    keep: float,
    size: int,
) -> None:
    interpret(compare_decode, T, lengths, readings, stride, keep, size, *EXACT)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)]
)
def test_lower_precision_stays_close(
    interpret: Interpret, dtype: torch.dtype, tolerance: float
) -> None:
    interpret(compare_encode, 19, [19, 8], 2, geometry.encoder_offsets(4, 4), 8, dtype, tolerance)
    interpret(compare_encode, 23, [23], 1, geometry.encoder_offsets(5, 4), 8, dtype, tolerance)
    interpret(compare_decode, 19, [19, 8], 2, 2, 0.7, 8, dtype, tolerance)


def compare_memory_orders() -> None:
    """Slices of one projection whose last dimension is not dense; a length and a gradient that are
    one number seen everywhere.
    """
    layout = Layout(torch.tensor(13).expand(2), 13, 2, torch.arange(26))
    (projected,) = random_inputs((4, 13, 3, 2, 4), dtype=torch.float64)
    q, k, v = (x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in projected.unbind(2))
    slopes = []
    for name in ("reference", "triton"):
        attention = build_attention(name)
        total = (
            attention.encode(q, k, v, (0, 1, 2), layout).sum()
            + attention.decode(q[:2].reshape(26, 2, 4), k, v, 2, layout).sum()
        )
        slopes.append(torch.autograd.grad(total, projected, retain_graph=True)[0])
    torch.testing.assert_close(slopes[1], slopes[0], atol=1e-12, rtol=0)


def test_inputs_and_gradients_in_any_memory_order(interpret: Interpret) -> None:
    interpret(compare_memory_orders)


def ask_native() -> list[Any]:
    """What the default does with tensors that its C++ does not serve."""
    layout = Layout(torch.tensor([4]), 4, 1, torch.arange(4))
    q = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)
    functions = "tracformer.attention.triton"
    with (
        patch(f"{functions}.window_attention", return_value="window"),
        patch(f"{functions}.strided_attention", return_value="strided"),
    ):
        native = build_attention("native")
        return [native.encode(q, q, q, (0, 1), layout), native.decode(q[0], q, q, 2, layout)]


def test_the_default_attention_uses_the_kernels_for_tensors_it_does_not_serve(
    interpret: Interpret,
) -> None:
    assert interpret(ask_native) == ["window", "strided"]


@pytest.mark.parametrize(
    ("capability", "served"), [((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_gpus_that_are_served(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert triton.usable(torch.device("cuda", 0)) is served
    assert not triton.usable(torch.device("cpu"))
    monkeypatch.setattr(triton, "installed", lambda: False)
    assert not triton.usable(torch.device("cuda", 0))


def test_triton_is_not_imported_on_the_cpu() -> None:
    script = """
import sys, torch, tracformer
from tracformer.attention import Layout, build_attention
x, layout = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16), Layout(torch.tensor([4]), 4, 1, torch.arange(4))
for name in ("native", "triton"):
    build_attention(name).encode(x, x, x, (0, 1), layout)
    build_attention(name).decode(x[0], x, x, 2, layout)
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


KERNELS = ("window_forward", "window_backward_queries", "window_backward_keys")
KERNELS += ("strided_forward", "strided_backward_queries", "strided_backward_keys")
# bytes a block may have on every GPU from compute capability 8.0 on; the A100 and the H100 have
# more
SHARED = 101_376


def compile_ahead(
    name: str, capability: int, dtype: torch.dtype, n: int, size: int, ones: bool = False
) -> Any:
    """The kernel as the launcher would have it built for classes of n positions; needs no GPU.

    A launch makes a constant of every number that is 1: with `ones`, all of them are.
    """
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tracformer.attention import triton_kernels

    kernel = getattr(triton_kernels, name)
    constants = triton.tile_options(n, size, dtype) | (
        {"READINGS": 2} if "READINGS" in kernel.arg_names else {}
    )
    wide = "*fp64" if dtype == torch.float64 else "*fp32"
    kinds = (
        dict.fromkeys(("lse", "delta"), wide)
        | dict.fromkeys(("extra", "place"), "*i32")
        | {"lengths": "*i64"}
    )
    element = {torch.bfloat16: "*bf16", torch.float16: "*fp16"}.get(dtype, wide)
    kinds |= dict.fromkeys(
        ("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v"), element
    ) | dict.fromkeys(constants, "constexpr")
    if ones:
        numbers = [argument for argument in kernel.arg_names if argument not in kinds]
        constants, kinds = (
            constants | dict.fromkeys(numbers, 1),
            kinds | dict.fromkeys(numbers, "constexpr"),
        )
    signature = {argument: kinds.get(argument, "i32") for argument in kernel.arg_names}
    return build(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    built = compile_ahead(name, 80, torch.bfloat16, n=16, size=16)
    assert ".target sm_80" in built.asm["ptx"]
    assert built.asm["cubin"][:4] == b"\x7fELF"


@pytest.mark.soak
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_a_single_position(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert (
        ".target sm_80"
        in compile_ahead(name, 80, torch.bfloat16, n=1, size=16, ones=True).asm["ptx"]
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bfloat16, 64),
        (torch.bfloat16, 128),
        (torch.float32, 64),
        (torch.float32, 128),
        (torch.float16, 64),
        (torch.float64, 64),
    ],
)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_at_full_size_and_fit(
    name: str,
    capability: int,
    dtype: torch.dtype,
    size: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    built = compile_ahead(name, capability, dtype, n=1024, size=size)
    assert f".target sm_{capability}" in built.asm["ptx"]
    assert built.asm["cubin"][:4] == b"\x7fELF"
    assert built.metadata.shared <= SHARED
    # tensor cores, but not where they would round float32
    assert ("mma" in built.asm["ptx"]) == (dtype != torch.float32)
