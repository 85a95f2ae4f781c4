"""Speed of chosen attentions on a chosen device, in times the speed of PyTorch's dense causal attention there.

    python benchmarks/kernels.py --device cuda --dtype bfloat16                      # the Triton kernels and `blocked` on a GPU
    python benchmarks/kernels.py --device cuda --attention triton --length 16384
    python benchmarks/kernels.py --attention native --length 1024 --batch 1          # the same table on the CPU

Forward and backward, `--batch` sequences, 12 heads of 64, n_max 16. Both readings in encoder and decoder; every position a query.
Each time is the least of a few repetitions after one that warms up; a ratio above 1 is faster than causal attention over as many rows.
"""

import argparse
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer import geometry
from tracformer.attention import Layout, build_attention, implementations
from tracformer.attention.triton import usable

HEADS, SIZE, N_MAX = 12, 64, 16


def least_time(attention: Callable[..., Tensor], inputs: list[Tensor], repeats: int = 5) -> float:
    """Seconds of one forward and backward, all of the device's work included."""
    weight = torch.randn_like(attention(*inputs))
    times = []
    for _ in range(1 + repeats):
        wait_for(inputs[0])
        start = time.perf_counter()
        torch.autograd.grad(attention(*inputs), inputs, weight)
        wait_for(inputs[0])
        times.append(time.perf_counter() - start)
    return min(times[1:])


def wait_for(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def bench(name: str, batch: int, T: int, device: torch.device, dtype: torch.dtype) -> None:
    attention = build_attention(name)
    layout = Layout(torch.full((batch,), T, device=device), T, 2, torch.arange(batch * T, device=device))
    q, k, v = (torch.randn(2 * batch, T, HEADS, SIZE, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    rows = torch.randn(batch * T, HEADS, SIZE, device=device, dtype=dtype, requires_grad=True)
    dense = least_time(causal, [q, k, v])
    L = T.bit_length() - 1
    print(f"{name}, T={T}, batch {batch}: dense causal {dense * 1e3:.2f} ms", flush=True)
    encoder, decoder = [], []
    for layer in range(1, L + 1):
        offsets, stride = geometry.encoder_offsets(layer, N_MAX), 2**layer
        encoder.append(least_time(lambda *x, o=offsets: attention.encode(*x, o, layout), [q, k, v]))
        decoder.append(least_time(lambda *x, s=stride: attention.decode(*x, s, layout), [rows, k, v]))
    for part, times, labels in (
        ("encoder", encoder, [f"w={geometry.reach(layer)}" for layer in range(1, L + 1)]),
        ("decoder", decoder, [f"s={2**layer}" for layer in range(1, L + 1)]),
    ):
        cells = "  ".join(f"{label}: {dense / t:.2f}" for label, t in zip(labels, times, strict=True))
        print(f"  {part}: {sum(times) * 1e3:.2f} ms for {L} layers, {L * dense / sum(times):.2f} times; {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--attention", nargs="+", choices=implementations(), help="default: triton and blocked on a GPU, native on the CPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device is {args.device}, but PyTorch {torch.__version__} finds no GPU")
    names = args.attention or (["triton", "blocked"] if device.type == "cuda" else ["native"])
    if "triton" in names and not usable(device):
        parser.error(f"--attention is triton, whose kernels do not serve {args.device} here: the times would be those of `blocked`")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {name}, {args.dtype}")
    torch.manual_seed(0)
    for T in args.length:
        for attention in names:
            bench(attention, args.batch, T, device, getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
