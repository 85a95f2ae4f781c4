"""What the protocols of other servers ask: write on from a prompt, or write what stands between a prompt and a suffix.

Without a suffix: mode `ar`, until the end of text. With one: a blank of unknown length, and the length rule of blanks chooses. Text is
never read for blanks: brackets in it are brackets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from tracformer.generation.language import LanguageModel
from tracformer.generation.results import Arrival, Candidates, Watcher
from tracformer.generation.samplers import PLAIN, Sampler
from tracformer.generation.writing import around, prompted
from tracformer.server.growing import Growing, Piece

LENGTHS = 12  # lengths of a blank that are weighed
LENGTH_DRAWS = 4  # fillings for the weight of each


@dataclass(frozen=True)
class Wish:
    prompt: str | tuple[int, ...]
    suffix: str = ""
    least: int = 1  # tokens; only with a suffix
    most: int = 16
    n: int = 1
    sampler: Sampler = PLAIN
    seed: int = 0
    stop: tuple[str, ...] = ()
    top: int = 0
    whole: bool = False  # the suffix ends the document


@dataclass(frozen=True)
class Written:
    """`text` follows the prompt and stands before the suffix and before the stop string. `pieces` begin at `base` of the whole text."""

    text: str
    pieces: tuple[Piece, ...]
    base: int
    generated: int  # tokens, those behind a stop string included
    finish: str  # stop: the text or the blank came to its end; length: there was no more room
    stopped: str | None = None

    @property
    def mean_log_prob(self) -> float:
        return sum(piece.log_prob for piece in self.pieces) / max(1, len(self.pieces))


@dataclass(frozen=True)
class Prompt:
    """What a prompt is to the model."""

    text: str
    ids: tuple[int, ...]
    base: int  # where what is written begins: before the prompt's last space, if that moved into it

    @property
    def skip(self) -> int:
        return len(self.text) - self.base


def read_prompt(lm: LanguageModel, prompt: str | tuple[int, ...]) -> Prompt:
    if isinstance(prompt, str):
        of = prompted(prompt, lm.spelling)
        return Prompt(prompt, of.ids[0], len(of.texts[0]))
    if wrong := next((i for i in prompt if i >= lm.tokenizer.vocab_size), None):
        raise ValueError(f"token id {wrong} is out of range; this model's ids are 0..{lm.tokenizer.vocab_size - 1}")
    text = lm.tokenizer.decode(prompt)
    return Prompt(text, prompt, len(text))


def write_on(lm: LanguageModel, wish: Wish, tell: Callable[[int, str, list[Piece]], object]) -> list[Written]:
    """`wish.n` samples. `tell(sample, text, pieces)` hears what is certain as it comes, and nothing where there is nothing new. When it
    returns False it hears no more.
    """
    prompt = read_prompt(lm, wish.prompt)
    room = lm.model.config.max_length - len(prompt.ids)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(prompt.ids)} tokens; this model takes {lm.model.config.max_length}, with what is to be written"
        )

    def read(ids: Sequence[int]) -> str:
        return lm.spelling.behind(prompt.text[: prompt.base], prompt.ids, ids, moved=prompt.skip > 0)[1]

    lines = [Growing(read, lm.tokenizer.eot_id, wish.stop, prompt.skip) for _ in range(wish.n)]
    watch = _Listener(lines, tell)
    drawn = _between(lm, wish, watch) if wish.suffix else _after(lm, wish, min(wish.most, room), watch)
    results = []
    for sample, (line, each) in enumerate(zip(lines, drawn, strict=True)):
        line.add_all(each.token_ids, each.log_probs, each.candidates)  # what the watcher did not hear
        line.finish()
        if watch.wanted and any(rest := line.release(finished=True)):
            tell(sample, *rest)
        reason = "stop" if each.ended or line.stopped is not None else "length"
        results.append(Written(line.text[line.skip :], tuple(line.pieces), prompt.base, len(each.token_ids), reason, line.stopped))
    return results


def score_prompt(lm: LanguageModel, ids: Sequence[int], top: int) -> list[Piece]:
    """The chain rule of mode `ar`, from the first token on."""
    nothing = [False] * len(ids)
    log_probs = lm.score_tokens(ids, nothing, "ar")
    candidates = lm.top_tokens(ids, nothing, top, "ar") if top else ((),) * len(ids)
    line = Growing(lm.tokenizer.decode, -1)
    for token, log_prob, likeliest in zip(ids, log_probs, candidates, strict=True):
        line.add(token, log_prob, likeliest)
    return line.pieces


def length_prior(low: int, high: int) -> dict[int, float]:
    """At most LENGTHS of the lengths low..high, closer together where they are short, each with the number of lengths it stands for."""
    count = high - low + 1
    if count <= LENGTHS:
        return dict.fromkeys(range(low, high + 1), 1.0)
    steps = [count ** (i / (LENGTHS - 1)) - 1 for i in range(LENGTHS)]
    grid = sorted({low + round(step) for step in steps})
    edges = [low - 0.5, *((a + b) / 2 for a, b in pairwise(grid)), high + 0.5]
    return {length: after - before for length, (before, after) in zip(grid, pairwise(edges), strict=True)}


class _Drawn(NamedTuple):
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    candidates: Candidates
    ended: bool


def _after(lm: LanguageModel, wish: Wish, most: int, watch: Watcher) -> list[_Drawn]:
    sampled = lm.sample(
        wish.n,
        prompt=wish.prompt,
        max_tokens=most,
        sampler=wish.sampler,
        seed=wish.seed,
        stop=wish.stop,
        top=wish.top,
        watch=watch,
    )
    return [_Drawn(each.token_ids, each.log_probs, each.candidates, each.ended) for each in sampled]


def _between(lm: LanguageModel, wish: Wish, watch: Watcher) -> list[_Drawn]:
    if wish.least > wish.most:
        raise ValueError(f"at least {wish.least} tokens are asked for, and at most {wish.most}; the first must not be larger")
    filled = lm.infill(
        around(wish.prompt, wish.suffix, lm.spelling, blank=f"{wish.least}-{wish.most}"),
        wish.n,
        sampler=wish.sampler,
        seed=wish.seed,
        whole=wish.whole,
        prior=length_prior(wish.least, wish.most),
        length_draws=LENGTH_DRAWS,
        lengths="rank" if wish.sampler.temperature == 0 and wish.n == 1 else "sample",
        top=wish.top,
        watch=watch,
    )
    return [_Drawn(span.token_ids, span.log_probs, span.candidates, ended=True) for result in filled for span in result.spans]


class _Listener(Watcher):
    def __init__(self, lines: Sequence[Growing], tell: Callable[[int, str, list[Piece]], object]) -> None:
        self.lines, self.tell, self.wanted = lines, tell, True

    def __call__(self, arrivals: list[Arrival]) -> bool:
        for arrival in arrivals:
            if arrival.draft:
                continue
            line = self.lines[arrival.sample]
            line.add(arrival.token_id, arrival.log_prob, arrival.candidates)
            if any(certain := line.release()) and self.tell(arrival.sample, *certain) is False:
                self.wanted = False
        return self.wanted
