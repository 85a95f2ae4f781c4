"""Infilling quality (Tables 1, 8 and 9): a model fills holes, and the texts are scored against the
originals.

    tracformer eval MODEL infilling:data=wikitext103
    tracformer eval MODEL 'infilling:data=FOLDER,contexts=[0.25,0.75]/span:p=0.5;mean=10'

The paper's setting is 1,000 windows of 128 tokens, five samples each. Its encoders, by name:
scorer=roberta-large, rescale=true, features=gpt2-large. The default encoder needs no network, and
its figures bear its name.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tracformer.contexts import Strategy, parse
from tracformer.evaluation.encoders import DEFAULT, Encoder, FoundEncoder, find_encoder
from tracformer.evaluation.metrics import (
    METRICS,
    OVERS,
    TOKENIZERS,
    Ask,
    Bleu,
    Fills,
    Floats,
    ScoredFills,
    Scoring,
    baseline_of,
    blocks,
    clustering_package,
    figures,
    gathered,
    kept_fills,
    reading,
    score,
    shown_spans,
)
from tracformer.evaluation.perplexity import PAPER_RANGES
from tracformer.evaluation.provenance import array_hash
from tracformer.evaluation.result_files import Result, ResultRow
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Flags, Sequences, TextTask
from tracformer.generation.orders import Ancestral, Order, parse_order
from tracformer.generation.samplers import Sampler


@dataclass(frozen=True)
class Infilling(TextTask):
    """Fills of the same holes by every model, and how close they come to what stood there."""

    name = "infilling"
    schema = 2  # BLEU by sacrebleu, MAUVE's clusters by scikit-learn

    # a table of the paper, or contexts by name; in a span's name ; may stand for ,
    contexts: tuple[str, ...] = ("table1",)
    samples: int = 5  # of each sequence under each context
    metrics: tuple[str, ...] = METRICS
    over: tuple[str, ...] = OVERS  # the whole text, the holes alone
    words: str = "13a"  # BLEU's: 13a, sacrebleu's default; space, as the text is spaced
    scorer: str = DEFAULT  # BERTScore's encoder: a known name, a folder, or OWNER/NAME of the hub
    layer: int | None = None  # of the scorer; None: its usual one
    rescale: bool = False  # BERTScore against the encoder's baseline
    features: str = DEFAULT  # MAUVE's encoder
    clusters: int | None = None  # MAUVE's; None: a tenth of the sequences
    clusterings: int = 5  # over which MAUVE is averaged
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    # mode ac alone: also random, probability, entropy, margin, ancestral
    order: str = "left-to-right"
    steps: int = 0  # mode diffusion, and the order ancestral; 0: the model's own number
    show: int = 20  # sequences whose first fill is kept as text, from the first on

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, given, known in (
            ("metrics", self.metrics, METRICS),
            ("over", self.over, OVERS),
            ("words", (self.words,), tuple(TOKENIZERS)),
        ):
            wrong = [each for each in given if each not in known] if given else ["nothing"]
            if wrong:
                raise ValueError(f"{key} is {wrong[0]!r}; allowed: {', '.join(known)}")
        for key in ("samples", "clusterings"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 1")
        if not self.strategies():
            raise ValueError("contexts is empty; name at least one, such as table1 or [0.25,0.75]")
        self.sampler()
        self._order("ac")

    def strategies(self) -> list[Strategy]:
        names = [
            name
            for text in self.contexts
            for name in PAPER_RANGES.get(text, (text.replace(";", ","),))
        ]
        return [parse(name) for name in dict.fromkeys(names)]

    def sampler(self) -> Sampler:
        return Sampler(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        read = self.read(subject)
        encoders = {key: _hash(found) for key, found in self.encoders().items()}
        return {
            "data": read.hash,
            "contexts": array_hash([np.packbits(each) for each in _contexts(self, read)]),
            **encoders,
        }

    def encoders(self) -> dict[str, FoundEncoder]:
        """What is needed of `scorer` and `features`; raises where it cannot be had,
        before any hole is filled.
        """
        found = {}
        if "bertscore" in self.metrics:
            found["scorer"] = find_encoder(self.scorer, self.layer)
            if self.rescale:
                baseline_of(found["scorer"])
        if "mauve" in self.metrics:
            found["features"] = find_encoder(self.features)
        return found

    def run(self, subject: Subject, progress: Progress) -> Result:
        self.check(subject)
        read = self.read(subject)
        scoring = self._scoring(subject)
        ask = Ask(self.samples, self.seed, self.sampler(), self._order(subject.mode))
        mine = blocks(len(read), subject.ranks)
        rows: list[ResultRow] = []
        details: dict[str, Any] = {"fills": [], "fills_sha256": {}}
        for number, (strategy, given) in enumerate(
            zip(self.strategies(), _contexts(self, read), strict=True)
        ):
            if not (given < (np.arange(given.shape[1]) < read.lengths[:, None])).any():
                raise ValueError(
                    f"no sequence has a target under contexts {strategy.name!r}; use longer "
                    "windows, or count_eos=true"
                )
            progress.start(
                f"{subject.name} {subject.mode}: fills {strategy.name}",
                sum(b.stop - b.start for b in mine) * self.samples,
            )
            fills = Fills(
                np.zeros((len(read), self.samples, read.tokens.shape[1]), np.int64),
                np.zeros((len(read), self.samples)),
            )
            for block in mine:
                drawn = kept_fills(subject, read, given, block, ask, f"fills-{number}")
                fills.tokens[block], fills.log_probs[block] = drawn.tokens, drawn.log_probs
                progress.step((block.stop - block.start) * self.samples)
            fills = Fills(
                gathered(fills.tokens, subject.ranks), gathered(fills.log_probs, subject.ranks)
            )
            made, details[strategy.name] = self._figures(
                subject, scoring, read, given, fills, strategy, progress
            )
            rows += made
            details["fills"] += self._shown(subject, read, given, fills, strategy, ask)
            details["fills_sha256"][strategy.name] = hashlib.sha256(
                np.ascontiguousarray(fills.tokens, "<i8").tobytes()
            ).hexdigest()
        return self.result(subject, rows, details)

    def _scoring(self, subject: Subject) -> Scoring:
        found = self.encoders()
        # one encoder may do both
        loaded = {each: Encoder(each, subject.device) for each in dict.fromkeys(found.values())}
        scorer, features = (
            loaded[found[key]] if key in found else None for key in ("scorer", "features")
        )
        baseline = baseline_of(found["scorer"]) if self.rescale and "scorer" in found else None
        bleu = Bleu(self.words) if "bleu4" in self.metrics else None
        if features is not None:
            clustering_package()  # missing packages are an error before any hole is filled
        return Scoring(bleu, scorer, features, baseline, self.clusters, self.clusterings)

    def _figures(
        self,
        subject: Subject,
        scoring: Scoring,
        read: Sequences,
        given: Flags,
        fills: Fills,
        strategy: Strategy,
        progress: Progress,
    ) -> tuple[list[ResultRow], dict[str, Any]]:
        """Rows over the whole text and over the holes, and each sequence's own means."""
        assert subject.tokenizer is not None  # `read` saw to it
        mine = blocks(len(read), subject.ranks)
        progress.start(
            f"{subject.name} {subject.mode}: scores {strategy.name}",
            sum(b.stop - b.start for b in mine),
        )
        scored = {over: ScoredFills.empty(scoring, len(read), self.samples) for over in self.over}
        for block in mine:
            numbers = range(block.start, block.stop)
            cut = [slice(int(read.lengths[i])) for i in numbers]
            originals = [
                reading(subject.tokenizer, read.tokens[i, n], given[i, n])
                for i, n in zip(numbers, cut, strict=True)
            ]
            texts = [
                [reading(subject.tokenizer, row[n], given[i, n]) for row in fills.tokens[i]]
                for i, n in zip(numbers, cut, strict=True)
            ]
            for over in self.over:
                for part, values in zip(
                    scored[over].parts(),
                    score(scoring, over, originals, texts).parts(),
                    strict=True,
                ):
                    part[block] = values
            progress.step(len(numbers))
        rows: list[ResultRow] = []
        means: dict[str, Any] = {}
        targets = int((~given & (np.arange(given.shape[1]) < read.lengths[:, None])).sum())
        for over, each in scored.items():
            whole = ScoredFills(*(_floats(gathered(part, subject.ranks)) for part in each.parts()))
            made, means[over] = figures(
                scoring, whole, {"contexts": strategy.name, "over": over}, targets, subject.note
            )
            rows += made
        return rows, means

    def _shown(
        self,
        subject: Subject,
        read: Sequences,
        given: Flags,
        fills: Fills,
        strategy: Strategy,
        ask: Ask,
    ) -> list[dict[str, Any]]:
        """The first fill of the first sequences, unselected, beside the original; `spans` are
        characters of the text.
        """
        assert subject.tokenizer is not None
        shown = []
        for i in range(min(self.show, len(read))):
            n = int(read.lengths[i])
            original, filled, known = read.tokens[i, :n], fills.tokens[i, 0, :n], given[i, :n]
            shown.append(
                {
                    "contexts": strategy.name,
                    "sequence": i,
                    "sample": 0,
                    "seed": ask.seed_of(i, 0),
                    "original": reading(subject.tokenizer, original, known).whole,
                    "original_spans": shown_spans(subject.tokenizer, original, known),
                    "text": reading(subject.tokenizer, filled, known).whole,
                    "spans": shown_spans(subject.tokenizer, filled, known),
                    "log_prob": float(fills.log_probs[i, 0]),
                }
            )
        return shown

    def _order(self, mode: str) -> Order | None:
        """For the modes that have one; the others go from left to right."""
        if mode == "diffusion":
            return Ancestral(self.steps) if self.steps else None
        return (
            parse_order(self.order, steps=self.steps if self.order == "ancestral" else 0)
            if mode == "ac"
            else None
        )


@lru_cache(maxsize=2)
def _contexts(task: Infilling, read: Sequences) -> list[Flags]:
    """(N, T) for each strategy."""
    return [read.contexts(strategy, task.seed, task.count_eos) for strategy in task.strategies()]


@lru_cache(maxsize=8)
def _hash(found: FoundEncoder) -> str:
    return found.weights_hash()


def _floats(values: Any) -> Floats:
    return np.asarray(values, np.float64)
