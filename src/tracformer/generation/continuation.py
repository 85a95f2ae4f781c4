"""Write a continuation of a prompt, until the end of text, a stop string or a number of tokens.

- `prompted`, `around`: a prompt (and a suffix) as a text with one blank.
- `SampleRequest`: a prompt and its options, tokenized and checked once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tracformer.generation.decode import Runner
from tracformer.generation.infill import as_revealed, joined, not_utf8, text_rules
from tracformer.generation.request_options import SampleOptions
from tracformer.generation.results import Candidates, Sampled, Token, TokenCallback, until_false
from tracformer.generation.stopping import StopStrings
from tracformer.generation.template import Template, TokenizedText, to_batch, tokenize
from tracformer.generation.token_text import HALF, Spelling
from tracformer.model.base import preferred_mode
from tracformer.rng import derived_seed


def prompted(prompt: str | Sequence[int], spelling: Spelling) -> TokenizedText:
    """Return a prompt, as text or as token ids, with one blank after it."""
    return tokenize(around(prompt, "", spelling), spelling, whole=False)


def around(
    prompt: str | Sequence[int], suffix: str, spelling: Spelling, blank: str = ""
) -> Template:
    """Return a template with a blank between prompt and suffix, whose brackets are only text."""
    if isinstance(prompt, str):
        return Template((prompt, suffix), (blank,))
    ids = tuple(map(int, prompt))
    return Template((spelling.tokenizer.decode(ids), suffix), (blank,), ids)


@dataclass(frozen=True)
class SampleRequest:
    """A prompt to continue and its options, tokenized and checked once. Make it with `make`.

    Args:
        runner: Runs the model.
        spelling: How the tokenizer's tokens are written.
        prompt: The prompt and its tokens.
        options: Options.
        count: Maximum number of tokens to write.
        mode: `ar`; or the model's preferred mode, which fills a blank of `count` tokens.
    """

    runner: Runner
    spelling: Spelling
    prompt: TokenizedText
    options: SampleOptions
    count: int
    mode: str

    @classmethod
    def make(
        cls,
        runner: Runner,
        spelling: Spelling,
        prompt: str | Sequence[int],
        options: SampleOptions,
    ) -> Self:
        """Tokenize a prompt and check that it leaves room.

        Raises:
            ValueError: Prompt and `max_tokens` do not fit the model.
        """
        config = runner.model.config
        given = prompted(prompt, spelling)
        room = config.max_length - given.given
        if room < 1:
            raise ValueError(
                f"the prompt has {given.given} tokens, which leaves no room: this model takes "
                f"{config.max_length} tokens in all; shorten the prompt"
            )
        count = room if options.max_tokens is None else options.max_tokens
        if count > room:
            raise ValueError(
                f"max_tokens is {count}, but only {room} fit: this model takes "
                f"{config.max_length} tokens in all, and the prompt has {given.given}"
            )
        mode = "ar" if "ar" in config.modes else preferred_mode(config)
        return cls(runner, spelling, given, options, count, mode)

    def run(self, callback: TokenCallback | None = None) -> list[Sampled]:
        """Return `n` texts."""
        n, batch = self.options.n, self.options.batch
        seeds = [derived_seed(self.options.seed, i) for i in range(n)]
        callback = None if callback is None else until_false(callback)
        return [
            sample
            for start in range(0, n, batch)
            for sample in self._sample(seeds[start : start + batch], start, callback)
        ]

    def _sample(
        self, seeds: Sequence[int], first: int, callback: TokenCallback | None
    ) -> list[Sampled]:
        """Return one text per seed; to the callback the first of them is sample `first`."""
        layout, sampler = self.prompt.with_blanks([self.count]), self.options.sampler
        eot, [start] = self.spelling.tokenizer.eot_id, layout.starts
        skip = int(self.prompt.spaced[0])  # the prompt's last space, which moved into the blank
        stops = StopStrings(
            self.options.stop, lambda ids: self._read(ids)[1], eot, skip, sampler.required
        )

        def pass_on(tokens: list[Token]) -> object:
            assert callback is not None
            return callback(
                [
                    self.spelling.placed(
                        token, first + token.sample, token.draft, index=token.position - start
                    )
                    for token in tokens
                ]
            )

        filled = self.runner.fill(
            to_batch([layout] * len(seeds), self.runner.model.head.device),
            self.mode,
            sampler=text_rules(sampler, self.spelling, allowed=[eot]),
            seed=seeds,
            only=lambda _, position: self.prompt.word_starts(layout, position, self.spelling),
            stop=stops if self.options.stop else eot,
            callback=None if callback is None else pass_on,
            top=self.options.top,
        )
        candidates: list[Candidates] = (
            [()] * len(seeds) if filled.top is None else self.spelling.candidates(*filled.top)
        )
        rows = zip(
            seeds,
            filled.tokens.tolist(),
            filled.log_probs.tolist(),
            filled.lengths.tolist(),
            candidates,
            strict=True,
        )
        return [
            self._sampled(
                seed, tokens[start:length], log_probs[start:length], likely[start:length], stops
            )
            for seed, tokens, log_probs, length, likely in rows
        ]

    def _sampled(
        self,
        seed: int,
        ids: list[int],
        log_probs: list[float],
        candidates: Candidates,
        stops: StopStrings,
    ) -> Sampled:
        ended = ids[-1] == self.spelling.tokenizer.eot_id
        text_ids = ids[:-1] if ended else ids
        text, stopped = stops.cut(text_ids)
        text = self._read(text_ids)[0] + text
        note = not_utf8("the text", text[len(self.prompt.texts[0].rstrip(HALF)) :])
        if self.mode != "ar":
            length = self.prompt.given + self.count
            fixed = (
                f"mode {self.mode} with the length fixed beforehand, at {length} tokens: this "
                "model has no mode ar"
            )
            note = joined(fixed, as_revealed(self.runner.model, self.mode), note)
        return Sampled(
            text=text,
            token_ids=tuple(ids),
            log_probs=tuple(log_probs),
            log_prob=math.fsum(log_probs),
            seed=seed,
            ended=ended,
            mode=self.mode,
            note=note,
            stopped=stopped,
            candidates=candidates,
        )

    def _read(self, ids: Sequence[int]) -> tuple[str, str]:
        """Return the prompt's text, and what these tokens add to it."""
        prompt = self.prompt
        return self.spelling.behind(prompt.texts[0], prompt.ids[0], ids, prompt.spaced[0])
