"""Speed and memory of the attentions and of a training step, against dense versions, in one run.

    make bench                                  # about five minutes on two cores
    python benchmarks/attention.py --quick      # a look, with lengths up to 2048

Timings on a shared machine are noisy: read the ratios, not the milliseconds. Each time is the least of a few repetitions.
"""

import argparse
import math
import multiprocessing
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tracformer import Tracformer, TracformerConfig, geometry
from tracformer.attention import Layout, build_attention, masks, register
from tracformer.attention.layout import mirrored
from tracformer.runtime import keep_freed_memory

HEADS, SIZE, N_MAX = 9, 64, 32


class DenseMasks:
    """What one writes without this package: the same key sets as boolean masks in PyTorch's own attention."""

    def encode(self, q: Tensor, k: Tensor, v: Tensor, offsets: tuple[int, ...] | None, layout: Layout) -> Tensor:
        mask = masks.prefix_encoder_mask(layout.length, offsets)  # rows are in reading order: one mask serves both readings
        return attend(q, k, v, mask)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, stride: int, layout: Layout) -> Tensor:
        B, T = layout.batch, layout.length
        queries = q.new_zeros(B * T, *q.shape[1:]).index_copy(0, layout.rows, q).unflatten(0, (B, T))
        mask = masks.prefix_decoder_mask(T, stride)
        if layout.readings == 2:
            k, v = (torch.cat((x[:B], mirrored(x[B:], layout.mirror)), dim=1) for x in (k, v))
            mask = torch.cat((mask, masks.suffix_decoder_mask(T, stride)), dim=1)
        return attend(queries, k, v, mask).flatten(0, 1)[layout.rows]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=causal).transpose(1, 2)


register("dense-masks", DenseMasks)


def least_time(run: Callable[[], object], repeats: int = 3) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def forward_backward(attention: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], object]:
    output = attention(*inputs)
    weight = torch.randn_like(output)
    return lambda: torch.autograd.grad(attention(*inputs), inputs, weight)


def random_heads(rows: int, length: int, count: int = 3) -> list[Tensor]:
    return [torch.randn(rows, length, HEADS, SIZE, requires_grad=True) for _ in range(count)]


def exponent(lengths: list[int], times: list[float]) -> float:
    """Slope of the least-squares line through (log T, log time)."""
    x, y = ([math.log(value) for value in values] for values in (lengths, times))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)


def bench_encoder(lengths: list[int], dense_up_to: int) -> None:
    print(f"\nEncoder attention, forward + backward, {HEADS} heads of {SIZE}, n_max {N_MAX}, one sequence, summed over L = log2(T) layers.")
    print("A dense layer costs the same whatever its mask: one is timed and multiplied by L.\n")
    print(f"{'T':>6} {'L':>3} {'native':>11} {'blocked':>11} {'dense mask':>11} {'causal':>11} ", end="")
    print(f"{'mask/blocked':>13} {'causal/blocked':>15} {'causal/native':>14}")
    blocked, native, per_layer = build_attention("blocked"), build_attention("native"), []
    for T in lengths:
        L = T.bit_length() - 1
        q, k, v = random_heads(1, T)
        layout = Layout(torch.tensor([T]), T, 1, torch.arange(T))
        all_offsets = [geometry.encoder_offsets(layer, N_MAX) for layer in range(1, L + 1)]
        ours = sum(least_time(forward_backward(lambda *x, o=o, at=layout: blocked.encode(*x, o, at), q, k, v)) for o in all_offsets)
        compiled = sum(least_time(forward_backward(lambda *x, o=o, at=layout: native.encode(*x, o, at), q, k, v)) for o in all_offsets)
        per_layer.append(ours / L)
        causal = L * least_time(forward_backward(lambda *x: attend(*x, None, causal=True), q, k, v), 2 if T <= 4096 else 1)
        row = f"{T:>6} {L:>3} {compiled * 1e3:>8.1f} ms {ours * 1e3:>8.1f} ms "
        ratios = f"{causal / ours:>15.1f} {causal / compiled:>14.1f}"
        if T <= dense_up_to:
            mask = masks.prefix_encoder_mask(T, all_offsets[-1])
            dense = L * least_time(forward_backward(lambda *x, m=mask: attend(*x, m), q, k, v), 2)
            print(row + f"{dense * 1e3:>8.0f} ms {causal * 1e3:>8.0f} ms {dense / ours:>13.1f} {ratios}", flush=True)
        else:
            print(row + f"{'-':>11} {causal * 1e3:>8.0f} ms {'-':>13} {ratios}", flush=True)
    sums = [t * (T.bit_length() - 1) for T, t in zip(lengths, per_layer, strict=True)]
    print(f"\nGrowth exponent in T of blocked: {exponent(lengths, per_layer):.2f} per layer;", end=" ")
    print(f"{exponent(lengths, sums):.2f} for the sum, whose number of layers grows with T.")


def bench_decoder(lengths: list[int]) -> None:
    print(
        "\nDecoder attention, forward + backward, prefix and suffix in one softmax, every position a query; ratio to dense causal SDPA.\n"
    )
    for T in lengths:
        q, k, v = random_heads(1, T)
        causal = least_time(forward_backward(lambda *x: attend(*x, None, causal=True), q, k, v))
        rows = torch.randn(T, HEADS, SIZE, requires_grad=True)
        keys, values = random_heads(2, T, 2)
        layout = Layout(torch.tensor([T]), T, 2, torch.arange(T))
        strides = [2**j for j in range(1, T.bit_length())]
        print(f"T={T}, causal {causal * 1e3:.0f} ms.", flush=True)
        for name in ("blocked", "native"):
            decode = build_attention(name).decode
            times = [
                least_time(forward_backward(lambda *x, s=s, at=layout, f=decode: f(*x, s, at), rows, keys, values)) / causal
                for s in strides
            ]
            cells = (f"s={s}: {ratio:.2f}" for s, ratio in zip(strides, times, strict=True))
            print(f"  {name:>7}  sum {sum(times):.2f}  " + "  ".join(cells), flush=True)


def resident_peak() -> int:
    """Largest resident size since the last reset, in kB (Linux)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def forward_backward_once(kind: str, T: int) -> Callable[[], object]:
    """One layer of `kind`, over inputs that are there already."""
    q, k, v = random_heads(1, T)
    rows = torch.randn(T, HEADS, SIZE, requires_grad=True)
    keys, values = random_heads(2, T, 2)
    layout = Layout(torch.tensor([T]), T, 2, torch.arange(T))
    if kind == "causal":
        return lambda: forward_backward(lambda *x: attend(*x, None, causal=True), q, k, v)()
    part, name = kind.split()
    attention = build_attention(name)
    offsets = geometry.encoder_offsets(T.bit_length() - 1, N_MAX)
    if part == "decoder":
        return lambda: forward_backward(lambda *x: attention.decode(*x, 2, layout), rows, keys, values)()
    return lambda: forward_backward(lambda *x: attention.encode(*x, offsets, layout), q, k, v)()


def peak_megabytes(kind: str, T: int) -> float:
    """Growth of this process's resident size over one forward and backward: call it in a fresh process."""
    forward_backward_once(kind, 64)()  # code and threads are there
    run = forward_backward_once(kind, T)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    run()
    return (resident_peak() - before) / 1024


def bench_memory(lengths: list[int]) -> None:
    print("\nPeak memory of forward + backward of one layer, beyond its inputs (MB; fresh process each): decoder at s=2, widest encoder.\n")
    kinds = ("causal", "decoder blocked", "decoder native", "encoder blocked", "encoder native")
    print(f"{'T':>6} " + " ".join(f"{kind:>15}" for kind in kinds))
    spawn = multiprocessing.get_context("spawn")
    for T in lengths:
        cells = []
        for kind in kinds:
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                cells.append(pool.submit(peak_megabytes, kind, T).result())
        print(f"{T:>6} " + " ".join(f"{cell:>15.0f}" for cell in cells), flush=True)
        one = T * HEADS * SIZE * 4 / 2**20  # a result or a gradient; the decoder has two keys and values a position, prefix and suffix
        scratch = (cell - one * (6 if "decoder" in kind else 4) for kind, cell in zip(kinds, cells, strict=True))
        print(f"{'less:':>6} " + " ".join(f"{cell:>15.0f}" for cell in scratch) + "   (less its result and gradients)", flush=True)


def bench_training_step(name: str, config: TracformerConfig, batch: int) -> None:
    T = config.max_length
    tokens = torch.randint(config.vocab_size, (batch, T))
    context = torch.rand(batch, T) < 0.5
    times = {}
    for attention in ("native", "blocked", "dense-masks"):
        torch.manual_seed(0)
        model = Tracformer(config, attention)
        times[attention] = least_time(lambda m=model: m.loss(tokens, context).backward(), 4)  # type: ignore[misc]
    cells = ", ".join(f"{attention} {seconds:.2f} s" for attention, seconds in times.items())
    ratios = ", ".join(f"{attention} {times['dense-masks'] / times[attention]:.1f}" for attention in ("native", "blocked"))
    print(
        f"{name} ({model.num_parameters() / 1e6:.1f}M parameters), T={T}, batch {batch}: {cells}; times faster than dense masks: {ratios}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="lengths up to 2048 only")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    kept = keep_freed_memory()
    a = torch.randn(2048, 2048)
    rate = 2 * 2048**3 / least_time(lambda: a @ a, 5) / 1e9
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, float32 matmul {rate:.0f} GFLOPS,", end=" ")
    print("freed memory kept by the allocator" if kept else "allocator as it is")
    bench_encoder([512, 1024, 2048] if quick else [512, 1024, 4096, 16384], dense_up_to=4096)
    bench_decoder([1024] if quick else [1024, 4096])
    bench_memory([1024] if quick else [1024, 4096])
    print("\nTraining step (loss and backward, CAR, half of the tokens hidden).\n")
    longer_tiny = TracformerConfig.preset("tiny", max_length=1024, n_layer=10)
    bench_training_step("tiny with 10 layers", longer_tiny, batch=4)
    bench_training_step("laptop-long", TracformerConfig.preset("laptop-long"), batch=2)


if __name__ == "__main__":
    main()
