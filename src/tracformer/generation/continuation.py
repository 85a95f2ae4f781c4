"""Writing on from a prompt, until the end of text, a stop string, or a number of tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tracformer.generation.engine import Runner
from tracformer.generation.infill import as_revealed, joined, not_utf8, text_rules, word_start
from tracformer.generation.results import Candidates, Sampled, TokenCallback
from tracformer.generation.samplers import Sampler
from tracformer.generation.scheduler import Revealed
from tracformer.generation.stopping import StopStrings
from tracformer.generation.template import Frame, Template, frame, stack
from tracformer.generation.token_text import HALF, Spelling


def prompted(prompt: str | Sequence[int], spelling: Spelling) -> Frame:
    """A text, or token ids as they are, and one blank behind it."""
    return frame(around(prompt, "", spelling), spelling, whole=False)


def around(
    prompt: str | Sequence[int], suffix: str, spelling: Spelling, blank: str = ""
) -> Template:
    """A blank between the two. Brackets in them are brackets."""
    if isinstance(prompt, str):
        return Template((prompt, suffix), (blank,))
    ids = tuple(map(int, prompt))
    return Template((spelling.tokenizer.decode(ids), suffix), (blank,), ids)


@dataclass(frozen=True)
class Writer:
    """At most `count` tokens behind the prompt `of`."""

    runner: Runner
    spelling: Spelling
    of: Frame
    count: int
    mode: str
    sampler: Sampler
    stop: Sequence[str]
    top: int
    callback: TokenCallback | None

    def write(self, seeds: Sequence[int], first: int) -> list[Sampled]:
        """One text a seed; to the callback they are samples number `first` and following."""
        callback, prompt = self.callback, self.of.texts[0]
        laid = self.of.blank([self.count])
        eot, [start] = self.spelling.tokenizer.eot_id, laid.starts
        asked = stack([laid] * len(seeds), self.runner.model.head.device)
        stops = StopStrings(
            self.stop,
            lambda ids: self._read(ids)[1],
            eot,
            int(self.of.spaced[0]),
            self.sampler.required,
        )

        def told(revealed: list[Revealed]) -> object:
            assert callback is not None
            return callback(
                [
                    self.spelling.arrival(each, 0, first + each.row, 0, each.position - start)
                    for each in revealed
                ]
            )

        filled = self.runner.fill(
            asked,
            self.mode,
            sampler=text_rules(self.sampler, self.spelling, allowed=[eot]),
            seed=seeds,
            only=lambda row, position: word_start(self.of, laid, position, self.spelling),
            stop=stops if self.stop else eot,
            watch=None if callback is None else told,
            top=self.top,
        )
        fixed = (
            f"mode {self.mode} with the length fixed beforehand, at {len(laid.tokens)} tokens: "
            "this model has no mode ar"
        )
        candidates: list[Candidates] = (
            [()] * len(seeds) if filled.top is None else self.spelling.candidates(*filled.top)
        )
        samples = []
        for row, (seed, length) in enumerate(zip(seeds, filled.lengths.tolist(), strict=True)):
            ids, log_probs = (
                tuple(filled.tokens[row, start:length].tolist()),
                tuple(filled.log_probs[row, start:length].tolist()),
            )
            ended = ids[-1] == eot
            text_ids = ids[:-1] if ended else ids
            text, stopped = stops.cut(text_ids)
            text = self._read(text_ids)[0] + text
            broken = not_utf8("the text", text[len(prompt.rstrip(HALF)) :])
            samples.append(
                Sampled(
                    text=text,
                    token_ids=ids,
                    log_probs=log_probs,
                    log_prob=math.fsum(log_probs),
                    seed=seed,
                    ended=ended,
                    mode=self.mode,
                    note=broken
                    if self.mode == "ar"
                    else joined(fixed, as_revealed(self.runner.model, self.mode), broken),
                    stopped=stopped,
                    candidates=candidates[row][start:length],
                )
            )
        return samples

    def _read(self, ids: Sequence[int]) -> tuple[str, str]:
        """The prompt, and what these tokens add to it."""
        return self.spelling.behind(self.of.texts[0], self.of.ids[0], ids, self.of.spaced[0])
