"""Many requests of different lengths, contexts, modes and samplers that come at once: through the engine, and one after the other."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tracformer.bench.decoding import in_turns, tracformer_of
from tracformer.bench.measure import timed
from tracformer.bench.results import Figures
from tracformer.generation.engine import Engine
from tracformer.generation.fill import fill
from tracformer.generation.samplers import Sampler
from tracformer.model import Tracformer

SAMPLERS = (Sampler(), Sampler(temperature=0.0), Sampler(temperature=0.8, top_p=0.9), Sampler(top_k=40))
LONGEST, LARGEST_HOLE = 200, 40  # tokens


def together(config: dict[str, Any], count: int, rounds: int) -> Figures:
    """Seconds for `count` requests."""
    model = tracformer_of(config)
    questions = mixed_questions(model, count)
    engine = Engine(model, rows=32)

    def at_once() -> None:
        with ThreadPoolExecutor(count) as callers:
            list(callers.map(lambda question: engine.request().fill(**question), questions))

    def one_by_one() -> None:
        for question in questions:
            fill(model, **question)

    try:
        seconds = in_turns(rounds, at_once=lambda: timed(at_once), one_by_one=lambda: timed(one_by_one))
    finally:
        engine.close()
    return {"seconds": seconds, "tokens": sum(int((~question["context"]).sum()) for question in questions), "requests": count}


def mixed_questions(model: Tracformer, count: int) -> list[dict[str, Any]]:
    """One sequence each, a fifth to all of LONGEST, with one hole somewhere; two in `car` mode to one in `ar`, samplers of four kinds."""
    draw = torch.Generator().manual_seed(0)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    longest = min(LONGEST, model.config.max_length)
    questions = []
    for seed in range(count):
        length = between(longest // 5, longest)
        hole = min(length, between(LARGEST_HOLE // 5, LARGEST_HOLE))
        start = between(0, length - hole)
        place = torch.arange(length)[None]
        tokens = torch.randint(model.config.vocab_size, (1, length), generator=draw)
        question = {"tokens": tokens, "context": (place < start) | (place >= start + hole), "mode": ("car", "car", "ar")[seed % 3]}
        questions.append({**question, "sampler": SAMPLERS[seed % len(SAMPLERS)], "seed": seed})
    return questions
