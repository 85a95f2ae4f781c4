"""The compiled step of cached generation, and the weights it reads, in its order (`native/step.cpp`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tracformer import native
from tracformer.geometry import paired_encoder_layer
from tracformer.model.lean import Packed
from tracformer.model.linear import Linear

if TYPE_CHECKING:
    from tracformer.model.tracformer import Tracformer


def compiled_step(model: "Tracformer", offsets: Sequence[Tensor]) -> Any:
    """The step of a float32 model on the CPU, or None: where there is no native code, nothing is compiled for its sake.

    It reads the weights where they lie. `offsets`: of each encoder layer, how far its keys lie behind a query, ascending.
    """
    weight = model.embedding.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not native.ready():
        return None
    strides = [int(layer.stride) for layer in model.decoder]  # type: ignore[arg-type]
    weights = step_weights(model)
    torch.ops.tracformer.large_pages(weights)
    return torch.classes.tracformer.Step(weights, list(offsets), strides, model.config.n_head)


def step_weights(model: "Tracformer") -> list[Tensor]:
    encoder = [module for number, layer in enumerate(model.encoder, start=1) for module in (*_layer(layer), *_keys(model, number))]
    decoder = [module for layer in model.decoder for module in _layer(layer)]
    tensors = [tensor for module in (*encoder, *decoder, model.norm) for tensor in _tensors(module)]
    return [model.embedding.weight.detach(), *tensors, *_stored(model.head, model.packed_embedding), model.head.new_empty(0)]


def bytes_read(model: "Tracformer") -> int:
    """What a step reads of the weights: every matrix once, of the embedding the head."""
    return sum(tensor.nbytes for tensor in step_weights(model)[1:])


def _layer(layer: Any) -> list[nn.Module]:
    first = (layer.norm_attention, layer.qkv) if hasattr(layer, "qkv") else (layer.norm_query, layer.q)
    return [*first, layer.out, layer.norm_feedforward, layer.feedforward.up, layer.feedforward.out]


def _keys(model: "Tracformer", encoder_layer: int) -> list[nn.Module]:
    """Of the decoder layer that reads this encoder layer (the pairing is its own inverse)."""
    reader: Any = model.decoder[paired_encoder_layer(encoder_layer, len(model.decoder)) - 1]
    return [reader.norm_feature, reader.k, reader.v]


def _tensors(module: nn.Module) -> list[Tensor]:
    """A norm's weight and bias; a linear layer's weight, scale and bias."""
    if isinstance(module, Linear):
        return [*_stored(module.weight, module.packed), module.bias.detach()]
    return [parameter.detach() for parameter in (module.weight, module.bias) if isinstance(parameter, Tensor)]


def _stored(weight: Tensor, packed: Packed | None) -> list[Tensor]:
    none = weight.new_empty(0)
    if packed is None:
        return [weight.detach(), none]
    return [packed.data[: len(weight)], none if packed.scale is None else packed.scale[: len(weight)]]
