"""Fast training of adapters: the same arithmetic as `transformers` and `peft`, in fewer passes.

Most time of a small network on a CPU goes to moving numbers, not to products. So

- `low_rank_product`: a linear map with its matrices of low rank is one function with eight products
  and nothing else; `peft` has two more multiplications and additions of the whole output.
- `plain_attention`: on CPUs short rows train faster by plain products than by the fused kernel,
  whose backward pass is slow under a mask; keys shared by several heads are not copied.
- `normalised`: the norm of Llama and its kin, with its gradient in closed form.
- `train_fast`: put these into a network.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.baselines.transformer import trains_faster_plain
from tracformer.devices import wide

PLAIN = "tracformer-plain"  # name of `plain_attention` among those of `transformers`


class _LowRankProduct(torch.autograd.Function):
    """y = x W + b + s (x A) B, of which A and B are trained."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W: Tensor, b: Tensor | None, A: Tensor, B: Tensor, s: float
    ) -> Tensor:
        A, B = A.to(x.dtype), B.to(x.dtype)
        y = x @ W if b is None else torch.addmm(b, x, W)
        low = x @ A  # (N, r)
        ctx.save_for_backward(x, W, A, B, low)
        ctx.scale = s
        return y.addmm_(low, B, alpha=s)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, W, A, B, low = ctx.saved_tensors
        dlow = (dy @ B.T).mul_(ctx.scale)
        dB = (low.T @ dy).mul_(ctx.scale)
        dA = x.T @ dlow
        dx = (dy @ W.T).addmm_(dlow, A.T) if ctx.needs_input_grad[0] else None
        return dx, None, None, dA, dB, None


def low_rank_product(layer: Any, slow: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return what a linear map of `peft` makes of x.

    Args:
        layer: The map, a `LoraLayer` with one adapter.
        slow: Its own method, for when the adapter is off.
        x: (..., in).
    """
    if layer.disable_adapters:
        return slow(x)
    [name], base, device = layer.active_adapters, layer.base_layer, x.device.type
    kind = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else base.weight.dtype
    )
    W = (base.weight if layer.fan_in_fan_out else base.weight.T).to(kind)
    b = getattr(base, "bias", None)
    y: Tensor = _LowRankProduct.apply(
        x.reshape(-1, x.shape[-1]).to(kind),
        W,
        None if b is None else b.to(kind),
        layer.lora_A[name].weight.T,
        layer.lora_B[name].weight.T,
        layer.scaling[name],
    )
    return y.view(*x.shape[:-1], -1)


class _Normalised(torch.autograd.Function):
    """y = w x / sqrt(mean(x^2) + eps), of which w is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, eps: float) -> Tensor:
        values = x.to(wide(x.dtype))
        r = values.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, w, r)
        return (values * r).to(x.dtype).mul_(w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, w, r = ctx.saved_tensors
        g = (dy * w).to(r.dtype)
        n = x * r  # in the wider type
        # dx = r (g - n mean(g n))
        g.addcmul_(n, (g * n).mean(-1, keepdim=True), value=-1.0).mul_(r)
        return g.to(x.dtype), None, None


def normalised(layer: Any, slow: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return what an RMS norm of `transformers` makes of x."""
    if not torch.is_grad_enabled() or layer.weight.requires_grad or layer.weight.dtype != x.dtype:
        return slow(x)
    y: Tensor = _Normalised.apply(x, layer.weight, layer.variance_epsilon)
    return y


class _PlainAttention(torch.autograd.Function):
    """softmax(q k' + mask) v, where the queries of several heads read the same keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        # q (B, G, H S, D), k and v (B, G, K, D), mask (B or 1, 1, 1, S, K)
        scores = q @ k.transpose(-1, -2)
        scores.unflatten(2, (-1, mask.shape[-2])).add_(mask)
        weights = scores.softmax(-1)  # sums in float32
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        dscores = torch._softmax_backward_data(dy @ v.transpose(-1, -2), weights, -1, dy.dtype)
        return (
            dscores @ k,
            dscores.transpose(-1, -2) @ q,
            weights.transpose(-1, -2) @ dy,
            None,
        )


def plain_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return attention as `transformers` asks for it: (B, S, H, D), and no weights.

    Args:
        module: The layer.
        q: Queries (B, H, S, D).
        k: Keys (B, G, K, D); each is read by H / G heads.
        v: Values (B, G, K, D).
        mask: (B, 1, S, K), what is added to the scores. None: each query reads itself and what is
            before it.
        **options: `scaling`, the factor of the scores.
    """
    B, H, S, D = q.shape
    scale = options.get("scaling")
    grouped = (q * (D**-0.5 if scale is None else scale)).reshape(B, k.shape[1], -1, D)
    if mask is None:
        mask = q.new_full((1, 1, S, k.shape[2]), torch.finfo(q.dtype).min).triu(1)
    with torch.autocast(q.device.type, enabled=False):
        mixed: Tensor = _PlainAttention.apply(
            grouped, k.to(q.dtype), v.to(q.dtype), mask[:, :, None].to(q.dtype)
        )
    return mixed.view(B, H, S, D).transpose(1, 2), None


def train_fast(transformers: Any, network: nn.Module) -> None:
    """Replace the slow parts of a network with an adapter; its answers stay the same."""
    transformers.AttentionInterface.register(PLAIN, plain_attention)
    for module in network.modules():
        if hasattr(module, "lora_A"):
            module.__class__ = _with_forward(type(module), low_rank_product)
        elif type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = _with_forward(type(module), normalised)


_with_forwards: dict[tuple[type[nn.Module], Callable[..., Tensor]], type[nn.Module]] = {}


def _with_forward(kind: type[nn.Module], function: Callable[..., Tensor]) -> type[nn.Module]:
    """Return the subclass whose forward pass is a function of the module, its own one, and x."""
    if (kind, function) in _with_forwards:
        return _with_forwards[kind, function]

    def forward(self: Any, x: Tensor) -> Tensor:
        return function(self, functools.partial(kind.forward, self), x)

    subclass = type(kind.__name__, (kind,), {"forward": forward})
    _with_forwards[kind, function] = subclass
    return subclass


def choose_attention(network: Any, device: torch.device, length: int) -> None:
    """Choose the attention that trains faster for rows of this length."""
    settings = network.config
    plain = trains_faster_plain(device, length) and not any(
        getattr(settings, name, 0.0) for name in ("attention_dropout", "attn_pdrop")
    )
    kind = PLAIN if plain else "sdpa"
    if settings._attn_implementation in (PLAIN, "sdpa") and settings._attn_implementation != kind:
        network.set_attn_implementation(kind)
