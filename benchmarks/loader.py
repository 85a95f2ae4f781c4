"""Measure what reading data and drawing contexts cost next to a training step of preset `tiny`.

python -m benchmarks.loader
"""

import random
import tempfile
import time
from pathlib import Path

import torch

from tests.toy_stories import write_story
from tracformer import Tracformer
from tracformer.contexts import draw_contexts
from tracformer.contexts import parse as parse_strategy
from tracformer.data import open_examples
from tracformer.data.prepare import prepare
from tracformer.devices import Ranks, keep_freed_memory
from tracformer.training.objectives import MaskSampler, Stream, parse_objective
from tracformer.training.optimizer import build_optimizer
from tracformer.training.train_config import load_config


def main() -> None:
    keep_freed_memory()
    config = load_config([], "tiny")
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "stories.txt"
        text.write_text("<|endoftext|>".join(" ".join(write_story(rng)) for _ in range(3000)))
        data = prepare(Path(folder) / "data", text, "byte", quiet=True)
        rows = open_examples(data.split("train"), config.length)
        masks = MaskSampler(parse_objective(config.objective), seed=0)
        stream = Stream(rows, masks, config.batch, 0, 0, Ranks(0, 1, torch.device("cpu")))
        model = Tracformer(config.model_config(data.tokenizer.vocab_size)).train()
        optimizer = build_optimizer(model.parameters(), config.optimizer, fused=True)
        loading, stepping = [], []
        for step in range(12):
            start = time.perf_counter()
            batch = stream.at(step * config.batch)
            loaded = time.perf_counter()
            optimizer.zero_grad()
            for group in batch.micro_batches:
                (model.nll(group.batch, group.mode)[0] / batch.count).backward()
            optimizer.step()
            loading.append(loaded - start)
            stepping.append(time.perf_counter() - loaded)
    share = sorted(loading)[len(loading) // 2] / sorted(stepping)[len(stepping) // 2]
    print(
        f"preset tiny, {config.batch} x {config.length} tokens: loading and contexts "
        f"{1e3 * min(loading):.2f} ms,",
        end=" ",
    )
    print(f"step {1e3 * min(stepping):.0f} ms; {100 * share:.1f}% of a step (medians)")
    for name in ("span:p=0.5,mean=50", "mixed", "span:p=0.9,mean=10"):
        start = time.perf_counter()
        draw_contexts(parse_strategy(name), [1024] * 2000, 0, range(2000))
        print(
            f"contexts {name}, T=1024: {2000 / (time.perf_counter() - start):,.0f} a second on one "
            "core"
        )


if __name__ == "__main__":
    main()
