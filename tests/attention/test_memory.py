"""No buffer of T x T elements, forward or backward: neither a tensor that PyTorch sees nor scratch
inside compiled code.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tracformer import Tracformer, TracformerConfig, geometry
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
    asked = f"memory('{side} {name}', {LONG}, heads=1, head_size=16, n_max=16)"
    code = f"from tracformer.bench.attention_speed import memory\nprint({asked}['bytes'])"
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
