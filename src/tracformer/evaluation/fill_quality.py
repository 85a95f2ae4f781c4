"""The task `infilling`: models fill blanks, and the texts are scored (Tables 1, 8 and 9).

    tracformer eval MODEL infilling:data=wikitext103
    tracformer eval MODEL 'infilling:data=FOLDER,contexts=[0.25,0.75]/span:p=0.5;mean=10'

The paper's setting is 1,000 windows of 128 tokens with five samples each. Its encoders are used by
scorer=roberta-large, rescale=true, features=gpt2-large. The default encoder needs no network, and
its figures bear its name.

Each sample of each sequence has a seed of its own, so that neither the batch nor the number of
processes changes a fill. The scores are in `fill_scores.py` and `metrics.py`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from tracformer.contexts import Strategy, parse
from tracformer.evaluation.encoders import DEFAULT, Encoder, FoundEncoder, find_encoder
from tracformer.evaluation.fill_scores import (
    METRICS,
    PARTS,
    Scorers,
    baseline_of,
    blanked_text,
    character_spans,
    figures,
    score_block,
)
from tracformer.evaluation.metrics import TOKENIZERS, Bleu, clustering_packages
from tracformer.evaluation.perplexity import PAPER_RANGES
from tracformer.evaluation.questions import Floats, by_block
from tracformer.evaluation.result_files import Result, ResultRow, array_hash, weights_hash
from tracformer.evaluation.task import Progress, Subject
from tracformer.evaluation.windows import Flags, Integers, Sequences, TextTask
from tracformer.generation.decode import fill
from tracformer.generation.language_model import LanguageModel, load
from tracformer.generation.orders import Ancestral, Order, parse_order
from tracformer.generation.samplers import PLAIN, Sampler
from tracformer.model.base import check_mode
from tracformer.model.batch import Batch
from tracformer.options import option
from tracformer.rng import derived_seed

BLOCK = 32  # sequences


@dataclass(frozen=True)
class FillSettings:
    """How a model fills: samples of each sequence, seed, sampler and order."""

    samples: int = 5
    seed: int = 0
    sampler: Sampler = PLAIN
    order: Order | None = None

    def seed_of(self, sequence: int, sample: int) -> int:
        """Return the seed of one sample of one sequence."""
        return derived_seed(derived_seed(self.seed, sequence + 1), sample + 1)


@dataclass(frozen=True)
class Fills:
    """The fills of N sequences with S samples each."""

    tokens: Integers  # (N, S, T)
    log_probs: Floats  # (N, S): the model's own log-probability of what it filled in


def draw_fills(
    subject: Subject, read: Sequences, given: Flags, block: range, settings: FillSettings
) -> dict[str, NDArray[Any]]:
    """Return tokens and log_probs (see `Fills`) of a block of sequences; `given` is (N, T)."""
    pairs = [(i, s) for i in block for s in range(settings.samples)]
    tokens = np.empty((len(pairs), read.tokens.shape[1]), np.int64)
    log_probs = np.empty(len(pairs))
    for start in range(0, len(pairs), subject.batch):
        some = pairs[start : start + subject.batch]
        numbers = [i for i, _ in some]
        filled = fill(
            subject.model,
            Batch(
                torch.from_numpy(read.tokens[numbers]),
                torch.from_numpy(given[numbers]),
                torch.from_numpy(read.lengths[numbers]),
            ).to(subject.device),
            subject.mode,
            sampler=settings.sampler,
            seed=[settings.seed_of(i, s) for i, s in some],
            order=settings.order,
        )
        tokens[start : start + len(some)] = filled.tokens.cpu().numpy()
        log_probs[start : start + len(some)] = filled.log_prob.cpu().numpy()
    shape = len(block), settings.samples
    return {"tokens": tokens.reshape(*shape, -1), "log_probs": log_probs.reshape(shape)}


@dataclass(frozen=True)
class Infilling(TextTask):
    """BLEU, BERTScore and MAUVE of a model's fills, and how they read to another model."""

    name = "infilling"
    schema = 2  # BLEU by sacrebleu, MAUVE's clusters by scikit-learn

    contexts: tuple[str, ...] = option(
        ("table1",), "table1, table2, or context strategies; in a span's name ; may stand for ,"
    )
    samples: int = option(5, "samples of each sequence in each context", low=1)
    metrics: tuple[str, ...] = option(METRICS, f"some of {', '.join(METRICS)}")
    over: tuple[str, ...] = option(
        PARTS, "parts of the text that are scored: whole, filled (the blanks alone)"
    )
    words: str = option(
        "13a", "how BLEU cuts words: 13a, or space for tokenized text", choices=tuple(TOKENIZERS)
    )
    scorer: str = option(DEFAULT, "BERTScore's encoder: a known name, a folder, or OWNER/NAME")
    layer: int | None = option(None, "layer of BERTScore's encoder; none: its usual one")
    rescale: bool = option(False, "rescale BERTScore by the encoder's baseline")
    features: str = option(DEFAULT, "MAUVE's encoder")
    clusters: int | None = option(
        None, "MAUVE's number of clusters; none: a tenth of the sequences"
    )
    clusterings: int = option(5, "clusterings over which MAUVE is averaged", low=1)
    temperature: float = option(1.0, "sampling temperature; 0 takes the likeliest token")
    top_k: int = option(0, "sample from the K likeliest tokens; 0: from all")
    top_p: float = option(1.0, "sample from the likeliest tokens with total probability P")
    order: str = option(
        "left-to-right", "order of the tokens in mode ac, such as random or confidence"
    )
    steps: int = option(0, "steps in mode diffusion and order ancestral; 0: the model's own")
    show: int = option(20, "sequences whose first fill the result keeps as text")
    judge: str = option(
        "", "language model that had no part in the fills and reads the whole texts, as smollm2"
    )
    later_options: ClassVar[Mapping[str, Any]] = {"judge": ""}

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, chosen, known in (("metrics", self.metrics, METRICS), ("over", self.over, PARTS)):
            for each in chosen or ("nothing",):
                if each not in known:
                    raise ValueError(f"{key} is {each!r}; it must be one of {', '.join(known)}")
        if not self.strategies():
            raise ValueError("contexts is empty; name at least one, such as table1 or [0.25,0.75]")
        self.sampler()  # both raise for values that are not allowed
        self._order("ac")

    def strategies(self) -> list[Strategy]:
        """Return the context strategies, each once."""
        names = [
            name
            for text in self.contexts
            for name in PAPER_RANGES.get(text, (text.replace(";", ","),))
        ]
        return [parse(name) for name in dict.fromkeys(names)]

    def sampler(self) -> Sampler:
        """Return the sampler."""
        return Sampler(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def inputs(self, subject: Subject) -> Mapping[str, str]:
        """Return hashes of the windows, the contexts and the encoders."""
        read = self.read(subject)
        encoders = {key: _hash(found) for key, found in self.encoders().items()}
        if self.judge:
            encoders["judge"] = weights_hash(_load_judge(self.judge).model)
        return {
            "data": read.hash,
            "contexts": array_hash([np.packbits(each) for each in _contexts(self, read)]),
            **encoders,
        }

    def encoders(self) -> dict[str, FoundEncoder]:
        """Return the encoders that are needed, by option: `scorer` and `features`.

        Raises:
            ValueError: There is no such encoder, or no baseline for it.
            FileNotFoundError: Its files are missing.
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
        """Return the scores of fills in each context, and some fills as text."""
        self.check(subject)
        read = self.read(subject)
        scorers = self._scorers(subject)
        settings = FillSettings(self.samples, self.seed, self.sampler(), self._order(subject.mode))
        rows: list[ResultRow] = []
        details: dict[str, Any] = {"fills": [], "fills_sha256": {}}
        for number, (strategy, given) in enumerate(
            zip(self.strategies(), _contexts(self, read), strict=True)
        ):
            if not _targets(read, given).any():
                raise ValueError(
                    f"no sequence has a target under contexts {strategy.name!r}; use longer "
                    "windows, or count_eos=true"
                )
            fills = _all_fills(
                subject, read, given, settings, progress, f"fills {strategy.name}", number
            )
            added, details[strategy.name] = self._figures(
                subject, scorers, read, given, fills, strategy, progress
            )
            rows += added
            details["fills"] += self._shown(subject, read, given, fills, strategy, settings)
            details["fills_sha256"][strategy.name] = hashlib.sha256(
                np.ascontiguousarray(fills.tokens, "<i8").tobytes()
            ).hexdigest()
        return self.result(subject, rows, details)

    def _scorers(self, subject: Subject) -> Scorers:
        found = self.encoders()
        # one encoder may serve both metrics
        loaded = {each: Encoder(each, subject.device) for each in dict.fromkeys(found.values())}
        bertscore, mauve = (
            loaded[found[key]] if key in found else None for key in ("scorer", "features")
        )
        baseline = baseline_of(found["scorer"]) if self.rescale and "scorer" in found else None
        bleu = Bleu(self.words) if "bleu4" in self.metrics else None
        if mauve is not None:
            clustering_packages()  # a missing package is an error before any blank is filled
        judge = _load_judge(self.judge) if self.judge else None
        return Scorers(bleu, bertscore, mauve, baseline, self.clusters, self.clusterings, judge)

    def _figures(
        self,
        subject: Subject,
        scorers: Scorers,
        read: Sequences,
        given: Flags,
        fills: Fills,
        strategy: Strategy,
        progress: Progress,
    ) -> tuple[list[ResultRow], dict[str, Any]]:
        """Return rows for each part of the text, and the means of each sequence."""
        tokenizer = subject.tokenizer
        assert tokenizer is not None  # checked by `read`
        what = f"{subject.name} {subject.mode}: scores {strategy.name}"
        rows: list[ResultRow] = []
        means: dict[str, Any] = {}
        for part in self.over:
            used = scorers if part == "whole" else replace(scorers, judge=None)

            def compute(block: range, part: str = part, used: Scorers = used) -> dict[str, Floats]:
                originals, texts = [], []
                for i in block:
                    n = int(read.lengths[i])
                    known = given[i, :n]
                    originals.append(blanked_text(tokenizer, read.tokens[i, :n], known))
                    texts.append(
                        [blanked_text(tokenizer, each[:n], known) for each in fills.tokens[i]]
                    )
                return score_block(used, part, originals, texts)

            progress.start(f"{what} ({part})", -(-len(read) // subject.ranks.world))
            shapes = used.shapes(self.samples)
            scores = by_block(subject, compute, shapes, len(read), progress, block_size=BLOCK)
            added, means[part] = figures(
                used,
                scores,
                {"contexts": strategy.name, "over": part},
                int(_targets(read, given).sum()),
                subject.note,
            )
            rows += added
        return rows, means

    def _shown(
        self,
        subject: Subject,
        read: Sequences,
        given: Flags,
        fills: Fills,
        strategy: Strategy,
        settings: FillSettings,
    ) -> list[dict[str, Any]]:
        """Return the first fill of the first sequences, unselected, beside the originals.

        `spans` are characters of the text.
        """
        tokenizer = subject.tokenizer
        assert tokenizer is not None  # checked by `read`
        shown = []
        for i in range(min(self.show, len(read))):
            n = int(read.lengths[i])
            original, filled, known = read.tokens[i, :n], fills.tokens[i, 0, :n], given[i, :n]
            shown.append(
                {
                    "contexts": strategy.name,
                    "sequence": i,
                    "sample": 0,
                    "seed": settings.seed_of(i, 0),
                    "original": blanked_text(tokenizer, original, known).whole,
                    "original_spans": character_spans(tokenizer, original, known),
                    "text": blanked_text(tokenizer, filled, known).whole,
                    "spans": character_spans(tokenizer, filled, known),
                    "log_prob": float(fills.log_probs[i, 0]),
                }
            )
        return shown

    def _order(self, mode: str) -> Order | None:
        """Return the order of the tokens in a mode; None: from left to right, or the model's."""
        if mode == "diffusion":
            return Ancestral(self.steps) if self.steps else None
        return (
            parse_order(self.order, steps=self.steps if self.order == "ancestral" else 0)
            if mode == "ac"
            else None
        )


def _all_fills(
    subject: Subject,
    read: Sequences,
    given: Flags,
    settings: FillSettings,
    progress: Progress,
    what: str,
    number: int,
) -> Fills:
    """Return the fills of all sequences in one context, which has this number."""

    def compute(block: range) -> dict[str, NDArray[Any]]:
        return draw_fills(subject, read, given, block, settings)

    progress.start(f"{subject.name} {subject.mode}: {what}", -(-len(read) // subject.ranks.world))
    S = settings.samples
    shapes = {"tokens": (S, read.tokens.shape[1]), "log_probs": (S,)}
    found = by_block(subject, compute, shapes, len(read), progress, f"fills-{number}", BLOCK)
    return Fills(found["tokens"].astype(np.int64), found["log_probs"])


def _targets(read: Sequences, given: Flags) -> Flags:
    return ~given & (np.arange(given.shape[1]) < read.lengths[:, None])


@lru_cache(maxsize=2)
def _contexts(task: Infilling, read: Sequences) -> list[Flags]:
    """Return the contexts (N, T) of each strategy."""
    return [read.contexts(strategy, task.seed, task.count_eos) for strategy in task.strategies()]


@lru_cache(maxsize=1)
def _load_judge(name: str) -> LanguageModel:
    """Return the judge; ValueError if it cannot read from left to right."""
    judge = load(name)
    check_mode(judge.model.config, "ar")
    return judge


@lru_cache(maxsize=8)
def _hash(found: FoundEncoder) -> str:
    return found.weights_hash()
