"""Queries, keys and values in one compiled pass: the plain definition's numbers and gradients, in
every dtype and shape it serves.
"""

import pytest
import torch
from torch import Tensor

from tests.marks import needs_compiler
from tracformer.model.blocks import Angles, rotary_angles, rotate, split_heads


def plainly(x: Tensor, angles: Angles, heads: int, parts: int, turned: int) -> tuple[Tensor, ...]:
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
