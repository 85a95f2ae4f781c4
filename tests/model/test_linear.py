"""The compiled product of few rows is the linear layer."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.marks import needs_compiler
from tracformer.model.fast_step import KINDS, Linear, linear, packed, unpacked


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
def test_equals_torch(
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
def test_rows_of_a_wider_matrix_and_strided_input() -> None:
    """The head is the embedding without its last row; queries may be views."""
    table, x = torch.randn(9, 40), torch.randn(40, 3).T
    with torch.no_grad():
        assert torch.allclose(linear(x, table[:8]), x @ table[:8].T, atol=1e-5)
        assert torch.allclose(
            linear(x[:, :20], table[:, 5:25]), x[:, :20] @ table[:, 5:25].T, atol=1e-5
        )


def test_gradients_and_other_dtypes_are_torch() -> None:
    layer = Linear(5, 4)
    layer(torch.randn(2, 3, 5)).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert layer.double()(torch.randn(2, 3, 5, dtype=torch.float64)).shape == (2, 3, 4)


def test_no_rows_at_all() -> None:
    with torch.no_grad():
        assert Linear(5, 4)(torch.randn(0, 5)).shape == (0, 4)


def test_leading_dimensions_are_kept() -> None:
    layer = Linear(5, 4)
    x = torch.randn(2, 3, 5)
    with torch.no_grad():
        few = layer(x)
    assert few.shape == (2, 3, 4)
    assert torch.allclose(few, layer(x), atol=1e-6)
