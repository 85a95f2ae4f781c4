"""Write a continuation of a prompt, until the end of text, a stop string or a number of tokens.

- `prompted`, `around`: a prompt (and a suffix) as a text with one blank.
- `SampleRequest`: a prompt and its options, tokenized and checked once.
- `StopStrings`: a text ends where one of these strings appears, and is cut before it.
- `text_rules`, `can_hold`: which tokens a filled or continued text may have, and whether its blanks
  have places for the required ones.
- `as_revealed`, `not_utf8`, `search_note`, `joined`: notes for the reader of a result.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from tracformer.generation.decode import Found, Runner
from tracformer.generation.request_options import SampleOptions, Sampler
from tracformer.generation.results import Candidates, Sampled, Token, TokenCallback, until_false
from tracformer.generation.template import Template, TokenizedText, to_batch, tokenize
from tracformer.generation.token_text import HALF, Spelling
from tracformer.model.base import BOUND, ConditionalModel, preferred_mode
from tracformer.rng import derived_seed


def text_rules(sampler: Sampler, spelling: Spelling, allowed: Sequence[int] = ()) -> Sampler:
    """Return the sampler with special tokens banned, except those that it names or `allowed`."""
    named = {*sampler.allowed, *sampler.required, *allowed}
    banned = {*sampler.banned, *(set(spelling.special) - named)}
    return replace(sampler, banned=tuple(sorted(banned)))


def can_hold(given: TokenizedText, count: int, sampler: Sampler, spelling: Spelling) -> bool:
    """Return whether blanks of `count` tokens in all have places for every required token.

    A blank that a space moved into begins with a word start.
    """
    required, starts = set(sampler.required), sum(given.spaced)
    if len(required) <= count - starts:
        return True
    at_starts = len(required.intersection(spelling.word_starts))
    return len(required) <= count - starts + min(starts, at_starts)


def as_revealed(model: ConditionalModel, mode: str) -> str:
    """Return a note if fills in this mode have no probability of their own."""
    if model.answers[mode] != BOUND:
        return ""
    return (
        "log p is each token's when it was filled in, not that of the whole fill: score gives a "
        "bound on that"
    )


def not_utf8(what: str, text: str) -> str:
    """Return a note if a text holds bytes that are not UTF-8."""
    return f"{what} holds bytes that are not UTF-8, shown as U+FFFD" if HALF in text else ""


def joined(*notes: str) -> str:
    """Return notes as one, empty ones left out."""
    return "; ".join(note for note in notes if note)


def search_note(method: str, number: int, found: Found) -> str:
    """Return a note on how far a search proves its fill."""
    if found.proven:
        return (
            f"{method} search: proven; no fill of these lengths but those before it is more "
            "probable"
        )
    if method == "beam":
        return f"beam search of width {number}: approximate"
    return f"best-first search gave up after {found.expanded} nodes: not proven the most probable"


class StopStrings:
    """A `stop` function of `fill`, for rows written from left to right.

    Args:
        strings: Strings that end a row.
        read: Returns the text of a row's tokens from the first on.
        end: The token that ends a text; it ends a row too.
        skip: Number of characters at the start that belong to the prompt, where nothing stops.
        required: Strings count only after the last of these tokens.

    Raises:
        ValueError: A string is empty, or `strings` is itself a string.
    """

    def __init__(
        self,
        strings: Sequence[str],
        read: Callable[[Sequence[int]], str],
        end: int,
        skip: int = 0,
        required: Iterable[int] = (),
    ) -> None:
        if isinstance(strings, str):
            raise ValueError(
                f"stop is {strings!r}; it must be a list of strings, for instance [{strings!r}]"
            )
        if "" in strings:
            raise ValueError("a stop string is empty; each needs at least one character")
        self.strings, self.read, self.end, self.skip, self.required = (
            tuple(strings),
            read,
            end,
            skip,
            frozenset(required),
        )
        self.written: dict[int, list[int]] = defaultdict(list)  # of each row
        # A token holds at least one byte, so a string that ends with the newest token began within
        # this many tokens; 4 more, since a character may be cut where decoding begins.
        self.reach = max((len(string.encode()) for string in self.strings), default=0) + 4

    def __call__(self, row: int, position: int, token: int) -> bool:
        if token == self.end:
            return True
        ids = self.written[row]
        ids.append(token)
        recent = self.read(ids[-self.reach :])
        return any(string in recent for string in self.strings) and self.cut(ids)[1] is not None

    def cut(self, ids: Sequence[int]) -> tuple[str, str | None]:
        """Return the text of tokens before the first stop string, and that string."""
        text = self.read(ids)
        if not self.required <= set(ids):
            return text, None
        done = max((ids.index(token) + 1 for token in self.required), default=0)
        return cut(text, self.strings, max(self.skip, len(self.read(ids[:done]))))


def cut(text: str, strings: Sequence[str], skip: int) -> tuple[str, str | None]:
    """Return the text before the first stop string in it, and that string or None.

    Args:
        text: The text.
        strings: Stop strings. Of several at one place the first one counts.
        skip: Number of characters at the start that are not searched.
    """
    found = [
        (at, number)
        for number, string in enumerate(strings)
        if (at := text.find(string, skip)) >= 0
    ]
    if not found:
        return text, None
    at, number = min(found)
    return text[:at], strings[number]


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
        return self.spelling.text_after(prompt.texts[0], prompt.ids[0], ids, prompt.spaced[0])
