"""Every implementation against the dense definition, forward and backward, in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tracformer import geometry
from tracformer.attention import Layout, build_attention, implementations
from tracformer.attention import blocked as causal

# triton has CPU tensors in its interpreter alone
FAST = [name for name in implementations() if name not in ("reference", "triton")]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    length = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 100, 129])))
    batch = draw(st.integers(1, 3))
    lengths = torch.tensor(
        [length, *draw(st.lists(st.integers(1, length), min_size=batch - 1, max_size=batch - 1))]
    )
    inside = (torch.arange(length) < lengths[:, None]).flatten().nonzero()[:, 0]
    keep = torch.rand(
        len(inside), generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    ) < draw(st.floats(0.05, 1.0))
    keep[draw(st.integers(0, len(inside) - 1))] = True
    return Layout(lengths, length, draw(st.integers(1, 2)), inside[keep])


def gradients(output: Tensor, inputs: list[Tensor], seed: int) -> list[Tensor]:
    weight = torch.randn(
        output.shape, generator=torch.Generator().manual_seed(seed), dtype=output.dtype
    )
    return list(torch.autograd.grad(output, inputs, weight))


def random_inputs(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).mul_(1.5).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), layout=layouts(), n_max=st.integers(2, 20), seed=st.integers(0, 99))
def test_encode(name: str, data: st.DataObject, layout: Layout, n_max: int, seed: int) -> None:
    layer = data.draw(st.integers(1, 8))
    key_set = data.draw(st.sampled_from(["stepped", "stepped", "rounded", None]))
    offsets = geometry.encoder_offsets(layer, n_max, key_set) if key_set else None
    heads, size = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([2, 4, 6]))
    inputs = random_inputs(
        seed, *[(layout.readings * layout.batch, layout.length, heads, size)] * 3
    )
    inside = (torch.arange(layout.length) < layout.lengths[:, None]).repeat(layout.readings, 1)[
        ..., None, None
    ]
    expected = build_attention("reference").encode(*inputs, offsets, layout) * inside
    actual = build_attention(name).encode(*inputs, offsets, layout) * inside
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        gradients(actual, inputs, seed), gradients(expected, inputs, seed), atol=1e-11, rtol=0
    )


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), layout=layouts(), seed=st.integers(0, 99))
def test_decode(name: str, data: st.DataObject, layout: Layout, seed: int) -> None:
    stride = data.draw(st.sampled_from([1, 2, 4, 8, 16, 64, 256]))
    heads, size = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([2, 4, 6]))
    keys = (layout.readings * layout.batch, layout.length, heads, size)
    inputs = random_inputs(seed, (len(layout.rows), heads, size), keys, keys)
    expected = build_attention("reference").decode(*inputs, stride, layout)
    actual = build_attention(name).decode(*inputs, stride, layout)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(
        gradients(actual, inputs, seed), gradients(expected, inputs, seed), atol=1e-11, rtol=0
    )


@pytest.mark.parametrize("length", [1, 2, 50, 300])
def test_the_device_operation_and_plain_products_agree(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the private CPU flash operation: same output, same logsumexp, same gradients under a
    logsumexp that is not its own.
    """
    monkeypatch.setattr(causal, "CHUNK", 64)
    grad, q, k, v, other = random_inputs(length, *[(2, 3, length, 4)] * 5)
    out, lse = causal.causal_attention(q.detach(), k.detach(), v.detach())
    plain_out, plain_lse = causal.plain_causal_attention(q.detach(), k.detach(), v.detach())
    torch.testing.assert_close((out, lse), (plain_out, plain_lse), atol=1e-12, rtol=0)
    joint = [x.detach() for x in (grad, q, k, v, other)] + [lse + 0.7]
    torch.testing.assert_close(
        causal.causal_attention_backward(*joint),
        causal.plain_causal_attention_backward(*joint),
        atol=1e-11,
        rtol=0,
    )


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("n_max", [2, 16])
@pytest.mark.parametrize("layer", [1, 6, 11, 12])
def test_blocked_encoder_never_holds_a_square(layer: int, n_max: int) -> None:
    T = 4096
    layout = Layout(torch.tensor([T]), T, 1, torch.arange(T))
    q, k, v = (torch.randn(1, T, 1, 8, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        build_attention("blocked").encode(
            q, k, v, geometry.encoder_offsets(layer, n_max), layout
        ).sum().backward()
    assert largest.numel <= 48 * T


@pytest.mark.parametrize("stride", [2, 64])
def test_blocked_decoder_never_holds_a_square(stride: int) -> None:
    T = 4096
    layout = Layout(torch.tensor([T]), T, 2, torch.arange(T))
    q = torch.randn(T, 1, 8, requires_grad=True)
    k, v = (torch.randn(2, T, 1, 8, requires_grad=True) for _ in range(2))
    with Largest() as largest:
        build_attention("blocked").decode(q, k, v, stride, layout).sum().backward()
    assert largest.numel <= 48 * T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_stays_close(dtype: torch.dtype) -> None:
    T = 200
    layout = Layout(torch.tensor([T]), T, 2, torch.arange(T))
    q, k, v = (x.detach() for x in random_inputs(0, *[(2, T, 2, 16)] * 3))
    offsets = geometry.encoder_offsets(7, 5)
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    exact = build_attention("reference").encode(q, k, v, offsets, layout)
    rough = build_attention("blocked").encode(
        q.to(dtype), k.to(dtype), v.to(dtype), offsets, layout
    )
    torch.testing.assert_close(rough.double(), exact, atol=tolerance, rtol=tolerance)
    exact = build_attention("reference").decode(q[0], k, v, 2, layout)
    rough = build_attention("blocked").decode(q[0].to(dtype), k.to(dtype), v.to(dtype), 2, layout)
    torch.testing.assert_close(rough.double(), exact, atol=tolerance, rtol=tolerance)


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match=r"'fast'; available: .*blocked.*reference"):
        build_attention("fast")
