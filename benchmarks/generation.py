"""Speed of cached generation at the paper's size, against transformers' GPT-2, against no cache, and against masked diffusion; and of many
requests at once, against one by one.

    python benchmarks/generation.py             # a few minutes on two cores
    python benchmarks/generation.py --quick     # fewer tokens

Weights are random: speed does not depend on them. Timings on a shared machine are noisy: read the ratios. Rivals take turns within one
run, and each figure is the median of a few rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tracformer import Tracformer, TracformerConfig
from tracformer.generation.engine import Engine
from tracformer.generation.fill import fill
from tracformer.generation.orders import Ancestral
from tracformer.generation.samplers import Sampler
from tracformer.native import available
from tracformer.peers.mdlm import MDLM, MDLMConfig
from tracformer.runtime import keep_freed_memory

LENGTH = 1024
GREEDY = Sampler(temperature=0.0)


def in_turns(rounds: int, **runs: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each, measured in turns so that a busy moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return {name: statistics.median(each) for name, each in times.items()}


def tracformer_seconds(model: Tracformer, batch: int, start: int, tokens: int, mode: str = "car", cached: bool = True) -> float:
    """Seconds a token for `tokens` tokens from position `start` on; the text before is given, that after them is open (car) or absent."""
    text = torch.randint(model.config.vocab_size, (batch, LENGTH))
    context = torch.arange(LENGTH).expand(batch, -1) < start
    if not cached:
        position = torch.zeros(batch, LENGTH, dtype=torch.bool)
        position[:, start] = True
        begun = time.perf_counter()
        with torch.no_grad():
            model.logits_at(text, context, mode, None, position)
        return time.perf_counter() - begun
    cache = model.cache(text, context, mode)
    assert cache is not None
    rows = torch.arange(batch)
    begun = 0.0
    for t in range(start, start + tokens + 1):
        if t == start + 1:  # the first step is not counted
            begun = time.perf_counter()
        at = torch.full((batch,), t)
        cache.reveal(rows, at, cache.logits(rows, at).argmax(1))
    return (time.perf_counter() - begun) / tokens


def gpt2_seconds(model: torch.nn.Module, batch: int, start: int, tokens: int) -> float:
    """transformers' GPT-2 with its own cache, the same loop."""
    with torch.no_grad():
        out = model(torch.randint(50257, (batch, start)), use_cache=True, logits_to_keep=1)
        begun = 0.0
        for i in range(tokens + 1):
            if i == 1:
                begun = time.perf_counter()
            last = out.logits[:, -1].argmax(1, keepdim=True)
            out = model(last, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        return (time.perf_counter() - begun) / tokens


def bench_tokens(model: Tracformer, gpt2: torch.nn.Module, tokens: int, rounds: int) -> None:
    print("\ncached generation, tokens a second, T = 1024 (text given up to position 500)")
    print(f"{'batch':>8} {'CAR':>9} {'AR':>9} {'GPT-2':>9} {'CAR / GPT-2':>12}")
    for batch in (1, 16):
        seconds = in_turns(
            rounds,
            car=lambda b=batch: tracformer_seconds(model, b, 500, tokens),  # type: ignore[misc]
            ar=lambda b=batch: tracformer_seconds(model, b, 500, tokens, "ar"),  # type: ignore[misc]
            gpt2=lambda b=batch: gpt2_seconds(gpt2, b, 500, tokens),  # type: ignore[misc]
        )
        car, ar, other = (batch / seconds[name] for name in ("car", "ar", "gpt2"))
        print(f"{batch:>8} {car:>9.1f} {ar:>9.1f} {other:>9.1f} {car / other:>12.2f}")


def bench_cache(model: Tracformer, tokens: int, rounds: int) -> None:
    seconds = in_turns(
        rounds,
        near=lambda: tracformer_seconds(model, 1, 100, tokens),
        far=lambda: tracformer_seconds(model, 1, 1000 - tokens // 2, tokens),
        uncached=lambda: tracformer_seconds(model, 1, 500, 1, cached=False),
    )
    print(f"\nuncached over cached, batch 1: {seconds['uncached'] / seconds['near']:.1f} times the time a token")
    print(f"a token at position 1000 over one at position 100: {seconds['far'] / seconds['near']:.2f}")


def bench_hole(model: Tracformer, mdlm: MDLM, rounds: int) -> None:
    """A 64-token hole in the middle of 128 tokens, against MDLM of the same size with 64 steps."""
    text = torch.randint(model.config.vocab_size, (1, 128))
    context = torch.ones(1, 128, dtype=torch.bool)
    context[:, 32:96] = False

    def timed(run: Callable[[], object]) -> float:
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    seconds = in_turns(
        rounds,
        car=lambda: timed(lambda: fill(model, text, context, sampler=GREEDY)),
        mdlm=lambda: timed(lambda: fill(mdlm, text, context, "diffusion", order=Ancestral(64), sampler=GREEDY)),
        chain=lambda: timed(lambda: fill(mdlm, text, context, "ac", sampler=GREEDY)),
    )
    print(
        f"\na 64-token hole in 128 tokens: cached CAR {seconds['car']:.2f} s; MDLM ({mdlm.num_parameters() / 1e6:.0f}M) with 64 steps",
        end="",
    )
    print(f" {seconds['mdlm']:.2f} s, {seconds['mdlm'] / seconds['car']:.1f} times as long", end="")
    print(f"; MDLM token by token {seconds['chain']:.2f} s, {seconds['chain'] / seconds['car']:.1f} times")


def mixed_questions(model: Tracformer, count: int) -> list[dict[str, Any]]:
    """One sequence each: 40 to 200 tokens, of which 8 to 40 are open, samplers of four kinds."""
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    questions = []
    for seed in range(count):
        length, hole = number(40, 200), number(8, 40)
        start = number(0, length - hole)
        context = torch.ones(1, length, dtype=torch.bool)
        context[:, start : start + hole] = False
        tokens = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        sampler = (Sampler(), GREEDY, Sampler(temperature=0.8, top_p=0.9), Sampler(top_k=40))[seed % 4]
        questions.append({"tokens": tokens, "context": context, "mode": ("car", "car", "ar")[seed % 3], "sampler": sampler, "seed": seed})
    return questions


def bench_engine(name: str, model: Tracformer, count: int, rounds: int) -> None:
    """`count` requests that come at once: through an engine of 32 rows, and one after another."""
    questions = mixed_questions(model, count)
    tokens = sum(int((~question["context"]).sum()) for question in questions)
    engine = Engine(model, rows=32)

    def together() -> float:
        with ThreadPoolExecutor(count) as pool:
            begun = time.perf_counter()
            list(pool.map(lambda question: engine.request().fill(**question), questions))
            return time.perf_counter() - begun

    def one_by_one() -> float:
        begun = time.perf_counter()
        for question in questions:
            fill(model, **question)
        return time.perf_counter() - begun

    seconds = in_turns(rounds, together=together, one_by_one=one_by_one)
    engine.close()
    print(
        f"\n{count} mixed requests, {tokens} tokens, {name}: {tokens / seconds['together']:.0f} tokens a second through the engine,", end=""
    )
    print(f" {tokens / seconds['one_by_one']:.0f} one by one: {seconds['one_by_one'] / seconds['together']:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    quick = parser.parse_args().quick
    keep_freed_memory()
    available()  # compile what is compiled before anything is timed
    import transformers

    model = Tracformer(TracformerConfig.preset("paper-small", dropout=0.0)).eval()
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    counts = [sum(p.numel() for p in each.parameters()) / 1e6 for each in (model, gpt2)]
    print(
        f"Tracformer {counts[0]:.0f}M, GPT-2 {counts[1]:.0f}M (transformers {transformers.__version__}), {torch.get_num_threads()} threads"
    )
    tokens, rounds = (8, 1) if quick else (32, 5)
    bench_tokens(model, gpt2, tokens, rounds)
    bench_cache(model, tokens, rounds)
    del gpt2
    mdlm = MDLM(MDLMConfig(n_layer=11, n_head=9, d_model=576)).eval()  # its two tables of tokens are apart, hence fewer layers
    bench_hole(model, mdlm, rounds)
    del mdlm
    small = Tracformer(TracformerConfig(vocab_size=4096, max_length=256, n_layer=8, n_head=5, d_model=160)).eval()
    bench_engine(f"{small.num_parameters() / 1e6:.0f}M parameters", small, 32, rounds)
    bench_engine("paper-small", model, 8 if quick else 32, 1 if quick else 3)


if __name__ == "__main__":
    main()
