"""Fast generation on the CPU: the compiled one-token step, and weights in bfloat16 or int8.

A generation step multiplies few rows by all weights, so the time to read the weights dominates.

- `Linear` is the linear layer of every network; products with few rows run in compiled code.
- `round_weights` rounds a model's matrices ("lean" weights). `bfloat16` keeps the upper half of a
  float32. `int8` keeps for each output row w the integers q = round(w / s) with s = max |w| / 127;
  finer scales, one for every 64 or 128 weights, were measured to be no more accurate. Biases and
  norms stay float32. The matrices are rounded in place and a packed copy is kept, so that whole
  passes, which read float32, and the compiled step, which reads the copy, use the same numbers. All
  sums are float32. docs/kernels.md has the loss of accuracy and how to measure it.
- `compiled_step` is the step of cached generation, with the weights in the order that
  `native/step.cpp` reads them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as torch_linear

from tracformer import native
from tracformer.geometry import paired_encoder_layer

if TYPE_CHECKING:
    from tracformer.model.tracformer import Tracformer


KINDS = ("float32", "bfloat16", "int8")
ALIGNED = 64  # bytes: a cache line
SMALLEST = torch.finfo(torch.float32).tiny  # of a row of zeros


class Packed(NamedTuple):
    """A rounded weight (out, in): data * scale, row by row."""

    data: Tensor  # (out, in) bfloat16 or int8
    scale: Tensor | None  # (out,) float32, of int8


def check_kind(kind: str) -> None:
    """Raise a ValueError unless weights can have this precision."""
    if kind not in KINDS:
        raise ValueError(f"weights is {kind!r}; allowed: {', '.join(KINDS)}")


def packed(weight: Tensor, kind: str) -> Packed:
    """Return a weight rounded to `bfloat16` or `int8`."""
    if kind == "bfloat16":
        return Packed(weight.bfloat16(), None)
    scale = (weight.abs().amax(1) / 127).float()
    return Packed((weight / scale.clamp(min=SMALLEST)[:, None]).round().to(torch.int8), scale)


def unpacked(stored: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of a rounded weight in a wider dtype."""
    data = stored.data.to(dtype)
    return data if stored.scale is None else data * stored.scale.to(dtype)[:, None]


@torch.no_grad()
def round_weights(weights: Sequence[Tensor], kind: str) -> list[Packed]:
    """Round matrices in place and return them packed.

    The packed copies lie in one block of memory, in large pages if the system has them, because it
    is read from end to end for every token.
    """
    if unfit := next(
        (weight.dtype for weight in weights if weight.dtype not in (torch.float32, torch.float64)),
        None,
    ):
        raise ValueError(f"the weights are {unfit}; {kind} is rounded from float32 or float64")
    widths = [weight.numel() * (1 if kind == "int8" else 2) for weight in weights]
    ends = list(accumulate(-(-width // ALIGNED) * ALIGNED for width in widths))
    block = torch.empty(ends[-1], dtype=torch.uint8, device=weights[0].device)
    moved = []
    for weight, width, start in zip(weights, widths, [0, *ends], strict=False):
        stored = packed(weight, kind)
        weight.copy_(unpacked(stored, weight.dtype))
        data = block[start : start + width].view(stored.data.dtype).view(weight.shape)
        moved.append(Packed(data.copy_(stored.data), stored.scale))
    if block.device.type == "cpu" and native.ready():
        torch.ops.tracformer.large_pages([block])
    return moved


FEW = 16  # rows up to which the compiled product is used


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (..., in) times the transpose of weight (out, in), plus bias (out,)."""
    if x.numel() <= FEW * x.shape[-1] and not torch.is_grad_enabled() and serves(x, weight):
        return torch.ops.tracformer.few_rows(x.reshape(-1, x.shape[-1]), weight, None, bias).view(
            *x.shape[:-1], len(weight)
        )
    return torch_linear(x, weight, bias)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Return whether the compiled product can be used. This never starts a compilation."""
    plain = x.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return x.device.type == "cpu" and plain and weight.stride(-1) == 1 and native.ready()


class Linear(nn.Linear):
    """A linear layer that multiplies few rows in compiled code."""

    packed: Packed | None = None  # the rounded weight of a lean model

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def compiled_step(model: "Tracformer", offsets: Sequence[Tensor]) -> Any:
    """Return the compiled step of a float32 model on the CPU, or None without compiled code.

    A model with `columns` has none: its rows are short, and the step in PyTorch serves them. This
    never starts a compilation. The step reads the model's own weights.

    Args:
        model: Model to run.
        offsets: For each encoder layer, the distances from a query to its keys, ascending.
    """
    weight = model.embedding.weight
    if model.config.columns:
        return None
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not native.ready():
        return None
    strides = [int(layer.stride) for layer in model.decoder]  # type: ignore[arg-type]
    weights = step_weights(model)
    torch.ops.tracformer.large_pages(weights)
    return torch.classes.tracformer.Step(weights, list(offsets), strides, model.config.n_head)


def step_weights(model: "Tracformer") -> list[Tensor]:
    """Return the weights of a model in the order in which the compiled step expects them."""
    encoder = [
        module
        for number, layer in enumerate(model.encoder, start=1)
        for module in (*_layer(layer), *_keys(model, number))
    ]
    decoder = [module for layer in model.decoder for module in _layer(layer)]
    tensors = [tensor for module in (*encoder, *decoder, model.norm) for tensor in _tensors(module)]
    return [
        model.embedding.weight.detach(),
        *tensors,
        *_stored(model.head, model.packed_embedding),
        model.head.new_empty(0),
    ]


def bytes_read(model: "Tracformer") -> int:
    """Return the bytes of weights that one step reads: every matrix once, and the head."""
    return sum(tensor.nbytes for tensor in step_weights(model)[1:])


def _layer(layer: Any) -> list[nn.Module]:
    first = (
        (layer.norm_attention, layer.qkv) if hasattr(layer, "qkv") else (layer.norm_query, layer.q)
    )
    return [*first, layer.out, layer.norm_feedforward, layer.feedforward.up, layer.feedforward.out]


def _keys(model: "Tracformer", encoder_layer: int) -> list[nn.Module]:
    """Return the key modules of the decoder layer that reads this encoder layer."""
    reader: Any = model.decoder[paired_encoder_layer(encoder_layer, len(model.decoder)) - 1]
    return [reader.norm_feature, reader.k, reader.v]


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return a norm's weight and bias, or a linear layer's weight, scale and bias."""
    if isinstance(module, Linear):
        return [*_stored(module.weight, module.packed), module.bias.detach()]
    return [
        parameter.detach()
        for parameter in (module.weight, module.bias)
        if isinstance(parameter, Tensor)
    ]


def _stored(weight: Tensor, packed: Packed | None) -> list[Tensor]:
    none = weight.new_empty(0)
    if packed is None:
        return [weight.detach(), none]
    return [
        packed.data[: len(weight)],
        none if packed.scale is None else packed.scale[: len(weight)],
    ]
