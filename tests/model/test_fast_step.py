"""Compiled pieces of a step equal their definitions; lean weights are one rounded model."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import needs_compiler
from tests.model.test_cache import answers, open_cache
from tests.toys import random_batch, small_model
from tracformer import Tracformer
from tracformer.baselines.gpt2 import GPT2, GPT2Config
from tracformer.model.batch import Batch
from tracformer.model.blocks import Angles, rotary_angles, rotate, split_heads
from tracformer.model.fast_step import KINDS, Linear, bytes_read, linear, packed, unpacked

# ---- rotary positions in one compiled pass


def plainly(x: Tensor, angles: Angles, heads: int, parts: int, turned: int) -> tuple[Tensor, ...]:
    """Return what `split_heads` should return, in plain PyTorch."""
    split = x.unflatten(-1, (parts, heads, -1)).unbind(-3)
    return *(rotate(part, angles) for part in split[:turned]), *split[turned:]


@needs_compiler
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 0)])
@pytest.mark.parametrize(
    ("heads", "size", "parts", "turned"),
    [(1, 2, 1, 1), (3, 14, 3, 2), (2, 32, 1, 0), (5, 52, 3, 2)],
)
def test_the_compiled_pass_is_the_definition_forward_and_backward(
    shape: tuple[int, ...], heads: int, size: int, parts: int, turned: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, parts * heads * size, dtype=torch.float64, requires_grad=True)
    angles = rotary_angles(torch.randint(0, 500, shape), size, 10000.0, torch.float64)
    compiled, plain = (
        split_heads(x, angles, heads, parts, turned),
        plainly(x, angles, heads, parts, turned),
    )
    assert len(compiled) == len(plain) == parts
    weights = [torch.randn_like(part) for part in plain]
    grads = [
        torch.autograd.grad(sum((w * p).sum() for w, p in zip(weights, outs, strict=True)), x)[0]
        for outs in (compiled, plain)
    ]
    for ours, theirs in zip((*compiled, grads[0]), (*plain, grads[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@needs_compiler
def test_a_projection_that_is_not_contiguous_and_angles_that_broadcast() -> None:
    x = torch.randn(4, 12, 6, dtype=torch.float64).transpose(1, 2)
    # of the positions, the same for every sequence
    angles = rotary_angles(torch.arange(6), 4, 100.0, torch.float64)
    for ours, theirs in zip(split_heads(x, angles, 3), plainly(x, angles, 3, 1, 1), strict=True):
        torch.testing.assert_close(ours, theirs)


@needs_compiler
def test_bfloat16_is_widened_and_its_gradient_rounded_once() -> None:
    x = torch.randn(6, 3 * 16).to(torch.bfloat16)
    x[0, 0] = float("nan")
    angles = rotary_angles(torch.arange(6), 8, 10000.0, torch.float32)
    ours, wide = x.clone().requires_grad_(), x.float().requires_grad_()
    outs, wanted = split_heads(ours, angles, 2, 3, 2), plainly(wide, angles, 2, 3, 2)
    for out, want in zip(outs, wanted, strict=True):
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, want, equal_nan=True)
    weights = [torch.randn_like(out) for out in outs]
    grad, wanted_grad = (
        torch.autograd.grad(sum((w * p).sum() for w, p in zip(weights, parts, strict=True)), leaf)[
            0
        ]
        for parts, leaf in ((outs, ours), (wanted, wide))
    )
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(grad, wanted_grad.to(torch.bfloat16), rtol=2**-8, atol=1e-6)


# ---- products with few rows


@needs_compiler
@settings(max_examples=90, deadline=None)
@given(
    rows=st.integers(1, 16),
    width=st.integers(1, 140),
    outputs=st.integers(1, 70),
    seed=st.integers(0, 10**6),
    bias=st.booleans(),
    kind=st.sampled_from(KINDS),
)
def test_the_product_of_few_rows_equals_torch(
    rows: int, width: int, outputs: int, seed: int, bias: bool, kind: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, width, generator=generator) for n in (rows, outputs))
    b = torch.randn(outputs, generator=generator) if bias else None
    data, scale = (weight, None) if kind == "float32" else packed(weight, kind)
    stored = weight if kind == "float32" else unpacked(packed(weight, kind), torch.float64)
    expected = torch.nn.functional.linear(
        x.double(), stored.double(), None if b is None else b.double()
    )
    got = torch.ops.tracformer.few_rows(x, data, scale, b)
    assert torch.allclose(got.double(), expected, rtol=0, atol=2e-6 * (width + 1) ** 0.5)


@needs_compiler
def test_callers_at_once_share_the_helper_threads() -> None:
    """Of several callers one at a time gets help; every caller gets its own product, each time."""
    inputs = [torch.randn(3, 256) for _ in range(4)]
    weight = torch.randn(640, 256)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [torch.ops.tracformer.few_rows(x, weight, None, None) for x in inputs]
        torch.set_num_threads(3)
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(
                lambda i: torch.ops.tracformer.few_rows(inputs[i % 4], weight, None, None),
                range(2000),
            )
            assert all(torch.equal(got, expected[i % 4]) for i, got in enumerate(found))
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_rows_of_a_wider_matrix_and_strided_input() -> None:
    """The head is the embedding without its last row; queries may be views."""
    table, x = torch.randn(9, 40), torch.randn(40, 3).T
    with torch.no_grad():
        assert torch.allclose(linear(x, table[:8]), x @ table[:8].T, atol=1e-5)
        assert torch.allclose(
            linear(x[:, :20], table[:, 5:25]), x[:, :20] @ table[:, 5:25].T, atol=1e-5
        )


def test_gradients_and_other_dtypes_use_torch() -> None:
    layer = Linear(5, 4)
    layer(torch.randn(2, 3, 5)).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert layer.double()(torch.randn(2, 3, 5, dtype=torch.float64)).shape == (2, 3, 4)


def test_a_product_without_rows() -> None:
    with torch.no_grad():
        assert Linear(5, 4)(torch.randn(0, 5)).shape == (0, 4)


def test_leading_dimensions_are_kept() -> None:
    layer = Linear(5, 4)
    x = torch.randn(2, 3, 5)
    with torch.no_grad():
        few = layer(x)
    assert few.shape == (2, 3, 4)
    assert torch.allclose(few, layer(x), atol=1e-6)


# ---- lean weights and the compiled step

LEAN = [kind for kind in KINDS if kind != "float32"]


def float_model(kind: str, **changes: Any) -> Tracformer:
    """Float32, random everywhere, of moderate size: sums of large numbers would hide mistakes in
    rounding errors.
    """
    model = small_model(**changes).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.35)
    return model.lean(kind)


def cached(
    model: Tracformer, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, compiled: bool
) -> Tensor:
    cache = open_cache(model, tokens, context, mode, lengths)
    if compiled:
        assert cache.step is not None
    else:
        cache.step = None
    return answers(cache, tokens, Batch(tokens, context, lengths).targets())


SHAPES = {
    "kind": st.sampled_from(KINDS),
    "length": st.integers(1, 40),
    "batch": st.integers(1, 16),
    "head": st.sampled_from(
        [(2, 4), (3, 10), (1, 52), (2, 26), (2, 64), (5, 16)]
    ),  # heads, and their size
    "vocab_size": st.sampled_from([7, 33, 70]),
    "n_max": st.sampled_from([2, 3, 16]),
    "encoder": st.sampled_from(["multiscope", "full"]),
    "decoder": st.sampled_from(["strided", "dense"]),
    "mode": st.sampled_from(["car", "ar"]),
    "seed": st.integers(0, 1000),
}


def compiled_step_equals_whole_passes(
    kind: str, length: int, batch: int, head: tuple[int, int], mode: str, seed: int, **shape: Any
) -> None:
    """Against the float32 pass over the rounded weights, and against the same in float64."""
    model = float_model(
        kind,
        n_layer=6,
        max_length=40,
        n_head=head[0],
        d_model=head[0] * head[1],
        seed=seed,
        **shape,
    )
    tokens, context, lengths = random_batch(model, batch, length, seed)
    context[0, seed % length] = False  # at least one target
    targets = Batch(tokens, context, lengths).targets()
    got = cached(model, tokens, context, mode, lengths, compiled=True)
    with torch.no_grad():
        whole, exact = (
            each.logits_at(Batch(tokens, context, lengths), mode, targets)
            for each in (model, copy.deepcopy(model).double())
        )
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
    assert (got - exact).abs().max() <= 3 * (whole - exact).abs().max() + 1e-5


@needs_compiler
@settings(max_examples=15, deadline=None)
@given(**SHAPES)
def test_compiled_step_equals_whole_passes(**shape: Any) -> None:
    compiled_step_equals_whole_passes(**shape)


@needs_compiler
@pytest.mark.soak
@settings(max_examples=400, deadline=None)
@given(**SHAPES)
def test_compiled_step_equals_whole_passes_at_length(**shape: Any) -> None:
    compiled_step_equals_whole_passes(**shape)


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(kind: str, threads: int) -> None:
    """The layers are wide enough for several threads; each output is computed by one."""
    model = float_model(
        kind, n_layer=3, max_length=8, n_head=4, d_model=208, n_max=2, vocab_size=300
    )
    tokens, context, lengths = random_batch(model, 6, 8, seed=3)
    context[:] = False
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [
            cached(model, tokens[:n], context[:n], "car", lengths[:n], compiled=True)
            for n in (1, 6)
        ]
        torch.set_num_threads(threads)
        several = [
            cached(model, tokens[:n], context[:n], "car", lengths[:n], compiled=True)
            for n in (1, 6)
        ]
    finally:
        torch.set_num_threads(before)
    for one, other in zip(alone, several, strict=True):
        assert torch.equal(one, other)


@needs_compiler
@pytest.mark.parametrize("mode", ["car", "ar"])
@pytest.mark.parametrize("threads", [2, 3])
def test_many_rows_are_divided_among_threads(mode: str, threads: int) -> None:
    """Texts of many lengths, some mostly given: no sequence is divided between threads."""
    model = float_model("float32", n_layer=6, max_length=40, n_max=4)
    tokens, context, lengths = random_batch(model, 70, 40, seed=5)
    context[::2, :20] = context[::3, 25:] = True
    context[:, 24] = False
    lengths = lengths.clamp(min=25)
    with torch.no_grad():
        whole = model.logits_at(
            Batch(tokens, context, lengths), mode, Batch(tokens, context, lengths).targets()
        )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = cached(model, tokens, context, mode, lengths, compiled=True)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", LEAN)
def test_rounding_is_near_and_done_once(kind: str) -> None:
    """bfloat16 keeps 8 bits, int8 1/127 of a row's maximum; rounding twice changes nothing."""
    weight = torch.randn(9, 33, dtype=torch.float64)
    weight[4] = 0.0
    rounded = unpacked(packed(weight, kind), torch.float64)
    allowed = (
        weight.abs() * 2**-8 if kind == "bfloat16" else weight.abs().amax(1, keepdim=True) / 254
    )
    assert ((rounded - weight).abs() <= allowed * (1 + 1e-6)).all()
    torch.testing.assert_close(
        unpacked(packed(rounded, kind), torch.float64), rounded, rtol=1e-6, atol=0
    )
    assert (rounded[4] == 0).all()


@pytest.mark.parametrize("kind", LEAN)
def test_a_lean_model_holds_only_what_was_packed(kind: str) -> None:
    model, plain = float_model(kind), float_model("float32")
    assert model.weights == kind
    assert torch.equal(model.embedding.weight, unpacked(model.packed_embedding))  # type: ignore[arg-type]
    for layer, before in zip(model.modules(), plain.modules(), strict=True):
        if stored := getattr(layer, "packed", None):
            assert torch.equal(layer.weight, unpacked(stored))
            assert torch.equal(layer.bias, before.bias)
            assert not torch.equal(layer.weight, before.weight)
    assert set(model.state_dict()) == set(plain.state_dict())


def test_bytes_of_a_step() -> None:
    """Half and a quarter of float32, and a little more: norms and biases are not rounded."""
    sizes = {
        kind: bytes_read(float_model(kind, d_model=96, n_head=2, vocab_size=200)) for kind in KINDS
    }
    assert 0.5 < sizes["bfloat16"] / sizes["float32"] < 0.51
    assert 0.25 < sizes["int8"] / sizes["float32"] < 0.28


def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="'int4'; allowed: float32, bfloat16, int8"):
        float_model("float32").lean("int4")
    with pytest.raises(
        ValueError, match="already rounded to int8; load the model again for bfloat16"
    ):
        float_model("int8").lean("bfloat16")
    with pytest.raises(ValueError, match=r"torch\.bfloat16; int8 is rounded from float32"):
        small_model().bfloat16().lean("int8")
    assert float_model("int8").lean("int8").weights == "int8"
    other = GPT2(GPT2Config(vocab_size=7, max_length=8, n_layer=1, n_head=1, d_model=8))
    assert other.lean("float32") is other
    with pytest.raises(ValueError, match="'int8'; a model of type 'gpt2' has only float32"):
        other.lean("int8")
