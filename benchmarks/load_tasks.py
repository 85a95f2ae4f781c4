"""Tasks of a load test, of mixed kinds and lengths, with the library's own answers."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tracformer import load
from tracformer.generation import scheduler as filling
from tracformer.generation.orders import RandomOrder
from tracformer.generation.samplers import Chosen, Pick, Sampler, choose
from tracformer.generation.template import write
from tracformer.server.streaming import TokenNames

TIE = 1e-5
LENGTHS = (16, 32, 48, 64)
# Share of the infills in mode ac, and share with unknown lengths. Both need whole passes, which
# batching does not make cheaper.
SLOW = 0.01


@dataclass(frozen=True)
class Task:
    """A request and the expected answer.

    Attributes:
        path: Path of the request.
        fields: Fields of the request.
        options: The same as options of the library.
        expected: The tokens of each sample.
    """

    path: str
    fields: dict[str, Any]
    options: dict[str, Any]
    expected: list[tuple[Any, ...]]

    @property
    def tokens(self) -> int:
        """Number of tokens of all samples."""
        return sum(map(len, self.expected))


class Library:
    """The model in this process, which computes the expected answers."""

    def __init__(self, model: str) -> None:
        self.lm = load(model)
        self.names = TokenNames(self.lm)

    def answer(self, path: str, options: dict[str, Any]) -> list[tuple[Any, ...]]:
        """Return the tokens of each sample: ids, or names as in OpenAI's protocol."""
        if path == "/v1/completions":
            return [
                tuple(self.names[i] for i in sample.token_ids)
                for sample in self.lm.sample(**options)
            ]
        return [result.spans[0].token_ids for result in self.lm.infill(**options)]

    def ties(self, task: Task, sample: int, came: tuple[Any, ...]) -> bool:
        """Return whether a change of the logits by TIE turns the expected answer into this one.

        The sampler chooses the token at which the cumulative probability, in order of ids, exceeds
        a uniform number. Such a boundary moves most if all logits up to an id are raised and the
        others lowered.
        """
        ids = range(self.lm.tokenizer.vocab_size)
        names = ids if task.path == "/v1/infill" else [self.names[i] for i in ids]
        first = next(
            (pair for pair in zip(task.expected[sample], came, strict=False) if pair[0] != pair[1]),
            None,
        )
        if first is None:
            return False
        edges = {edge for token in first for i in [names.index(token)] for edge in (i, i + 1)}
        for edge, sign in ((edge, sign) for edge in edges for sign in (TIE, -TIE)):

            def moved(
                logits: Tensor, picks: Sequence[Pick], edge: int = edge, sign: float = sign
            ) -> Chosen:
                change = torch.full((logits.shape[1],), -sign, dtype=torch.float64)
                change[:edge] = sign
                return choose(logits.double() + change, picks)

            with patch.object(filling, "choose", moved):
                if self.answer(task.path, task.options)[sample] == came:
                    return True
        return False


def make_task(library: Library, dice: random.Random, ids: Sequence[int]) -> Task:
    """Return a task: to fill a blank in a text of the model, or to continue its beginning."""
    lm = library.lm
    sampler = dice.choice(
        [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20, "temperature": 1.2}]
    )
    seed, n = dice.randrange(2**31), dice.choice([1, 1, 1, 2])
    decode, length = (
        lm.tokenizer.decode,
        min(dice.choice(LENGTHS), lm.model.config.max_length // 2 - 2),
    )
    if dice.random() < 0.25:
        prompt = list(ids[: dice.randint(1, 20)])
        fields = {
            "prompt": prompt,
            "max_tokens": length,
            "temperature": sampler.get("temperature", 1.0),
            "logprobs": 0,
        }
        options = {
            "prompt": prompt,
            "max_tokens": length,
            "sampler": Sampler(temperature=fields["temperature"]),
            "seed": seed,
            "n": n,
        }
        return Task(
            "/v1/completions",
            {**fields, "seed": seed, "n": n},
            options,
            library.answer("/v1/completions", options),
        )
    kind = dice.random()
    mode = "ac" if kind < SLOW and "ac" in lm.model.config.modes else None
    if mode is not None or kind > 1 - SLOW:
        length = min(length, 4)
    start = dice.randint(1, max(1, len(ids) - length))
    text = write(
        [decode(ids[:start]), decode(ids[start + length :])],
        [f"1-{length}" if kind > 1 - SLOW else str(length)],
    )
    order = "random" if mode == "ac" else None
    fields = {
        "text": text,
        "n": n,
        "seed": seed,
        "mode": mode,
        "order": order,
        "length_draws": 2,
        "whole": False,
        **sampler,
    }
    options = {
        "text": text,
        "n": n,
        "seed": seed,
        "mode": mode,
        "length_draws": 2,
        "whole": False,
        "sampler": Sampler(**sampler),
    }
    options["order"] = None if order is None else RandomOrder()
    return Task("/v1/infill", fields, options, library.answer("/v1/infill", options))


def make_pool(library: Library, count: int, seed: int) -> tuple[list[Task], float]:
    """Return tasks, and the seconds that the library took for them one after the other."""
    dice = random.Random(seed)
    lm = library.lm
    # text that is not UTF-8 may have more tokens when it is encoded again
    longest = min(lm.model.config.max_length // 3, 60)
    texts = [
        lm.tokenizer.encode(lm.tokenizer.decode(sample.token_ids, skip_special=True))
        for sample in lm.sample(16, max_tokens=longest)
    ]
    texts = [ids[:longest] for ids in texts if ids]
    begun = time.perf_counter()
    pool = [make_task(library, dice, dice.choice(texts)) for _ in range(count)]
    return pool, time.perf_counter() - begun
