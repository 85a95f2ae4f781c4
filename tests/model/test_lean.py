"""Lean weights: one rounded model, whichever way it is asked."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import random_batch, small_model
from tests.marks import needs_compiler
from tests.model.test_cache import answers, open_cache
from tracformer import Tracformer
from tracformer.baselines.gpt2 import GPT2, GPT2Config
from tracformer.model.batch import Batch
from tracformer.model.fast_step import KINDS, bytes_read, packed, unpacked

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
    context[0, seed % length] = False  # something to answer
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
    """Wide enough that several threads take part; each output is one thread's."""
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
def test_many_rows_are_shared_out_among_threads(mode: str, threads: int) -> None:
    """Texts of all lengths, some given for the most part: no thread reads half of one."""
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
    """bfloat16 keeps 8 bits, int8 the 127th part of a row's largest; what is rounded
    stays as it is.
    """
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
    """Eighth, quarter and half of a bit more: norms and biases stay as they are."""
    sizes = {
        kind: bytes_read(float_model(kind, d_model=96, n_head=2, vocab_size=200)) for kind in KINDS
    }
    assert 0.5 < sizes["bfloat16"] / sizes["float32"] < 0.51
    assert 0.25 < sizes["int8"] / sizes["float32"] < 0.28


def test_refusals() -> None:
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
