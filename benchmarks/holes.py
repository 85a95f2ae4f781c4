"""How much the text after a hole helps: perplexity and accuracy in holes of 8 to 16 tokens.

    python -m benchmarks.holes stories ar=runs/gpt2 --data held-out.txt
    python -m benchmarks.holes stories --data held-out.txt --train train.txt
    python -m benchmarks.holes stories --data held-out.txt --fills 50 --beam 16 --reread > fills.md

Each window of held-out text has one hole in its middle. Every model is measured in each of its
modes on the same windows; models must have the same tokenizer. Accuracy is how often the most
likely token is the true one; in `car` and `ar`, given the true tokens before it. Intervals are 95%,
over windows. With --train, windows that share 12 words in a row with the training text are left
out. With --fills, fills are printed instead.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import tracformer
from benchmarks.fluency import documents_of, seen
from tracformer.data.tokenizer import Tokenizer
from tracformer.devices import keep_freed_memory
from tracformer.evaluation.bootstrap import ratio, ratio_interval, share_interval
from tracformer.files import write_atomically
from tracformer.generation.decode import fill, search
from tracformer.generation.language_model import LanguageModel
from tracformer.generation.ranking import left_to_right
from tracformer.generation.samplers import Sampler
from tracformer.model.base import BOUND, EXACT
from tracformer.model.batch import Batch
from tracformer.progress import track
from tracformer.rng import derived_seed

SHORTEST, LONGEST = 8, 16
BATCH = 16


@dataclass(frozen=True)
class Holes:
    """Windows of tokens (N, T), and which tokens are given (N, T)."""

    tokens: Tensor
    context: Tensor

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the windows in batches."""
        yield from zip(self.tokens.split(BATCH), self.context.split(BATCH), strict=True)


def cut(
    text: str, tokenizer: Tokenizer, windows: int, length: int, training: Sequence[str] = ()
) -> Holes:
    """Return the first windows of the text, with holes of all lengths in turn.

    Args:
        text: Held-out text.
        tokenizer: Makes its tokens.
        windows: Maximum number of windows.
        length: Number of tokens of each.
        training: Documents; windows that share words in a row with them are left out.
    """
    ids = torch.tensor(tokenizer.encode(text))
    available = len(ids) // length
    if available < 2:
        raise ValueError(f"the text has {len(ids)} tokens; give at least two windows of {length}")
    tokens = ids[: available * length].view(available, length)
    if training:
        shared = seen([tokenizer.decode(row) for row in tokens.tolist()], training)
        tokens = tokens[~torch.tensor(shared)]
    tokens = tokens[:windows]
    context = torch.ones_like(tokens, dtype=torch.bool)
    for row in range(len(tokens)):
        hole = SHORTEST + row % (LONGEST - SHORTEST + 1)
        start = (length - hole) // 2
        context[row, start : start + hole] = False
    return Holes(tokens, context)


@torch.no_grad()
def measure(lm: LanguageModel, mode: str, holes: Holes, name: str) -> dict[str, object]:
    """Return perplexity and accuracy of a model in a mode, with intervals over windows."""
    sums: list[NDArray[np.float64]] = []
    for tokens, context in track(list(holes.batches()), f"{name} {mode}"):
        given = torch.zeros_like(context) if mode == "ar" else context
        logits = lm.model.logits_at(Batch(tokens, given), mode, ~context).double()
        truth = tokens[~context]
        nats = -logits.log_softmax(1).gather(1, truth[:, None])[:, 0]
        row = (~context).nonzero()[:, 0]
        columns = torch.stack(
            (nats, (logits.argmax(1) == truth).double(), torch.ones_like(nats)), 1
        )
        sums.append(
            torch.zeros(len(tokens), 3, dtype=torch.float64).index_add_(0, row, columns).numpy()
        )
    nats, right, count = np.concatenate(sums).T
    low, high = ratio_interval(nats, count) or (math.nan, math.nan)
    return {
        "model": name,
        "mode": mode,
        "answer": lm.model.answers[mode],
        "perplexity": math.exp(ratio(nats, count)),
        "perplexity_interval": [math.exp(low), math.exp(high)],
        "accuracy": ratio(right, count),
        "accuracy_interval": share_interval(right, count),
        "windows": len(count),
        "tokens": int(count.sum()),
    }


def sampled(lm: LanguageModel, holes: Holes, seed: int) -> Tensor:
    """Return (N, T) windows, each filled by one sample of the model."""
    seeds = [derived_seed(seed, number) for number in range(len(holes.tokens))]
    return fill(
        lm.model,
        Batch(holes.tokens, holes.context),
        "car",
        seed=seeds,
        sampler=Sampler(banned=tuple(lm.spelling.special)),
    ).tokens


def searched(lm: LanguageModel, holes: Holes, width: int, reread: bool) -> Tensor:
    """Return (N, T) windows, each with the most probable fill that a beam search finds.

    With `reread`, the probability of the whole text counts too.
    """
    rows = list(zip(holes.tokens[:, None], holes.context[:, None], strict=True))
    chosen = []
    for row in track(rows, f"beam:{width}"):
        found = search(
            lm.model,
            Batch(*row),
            method="beam",
            width=width,
            n=width if reread else 1,
            banned=tuple(lm.spelling.special),
        )
        again = (
            left_to_right(lm.runner, [each.tokens.tolist() for each in found], BATCH)
            if reread
            else [0.0]
        )
        chosen.append(
            max(zip(found, again, strict=True), key=lambda each: each[0].log_prob + each[1])[
                0
            ].tokens
        )
    return torch.stack(chosen)


def show_fills(lm: LanguageModel, holes: Holes, filled: Tensor) -> None:
    """Print each fill in its text as Markdown, with the original words."""
    for number, (tokens, context, new) in enumerate(
        zip(holes.tokens, holes.context, filled, strict=True), 1
    ):
        start, stop = int((~context).nonzero()[0]), int((~context).nonzero()[-1]) + 1
        before, truth, ours, after = (
            lm.tokenizer.decode(part.tolist()).replace("\n", " ")
            for part in (tokens[:start], tokens[start:stop], new[start:stop], tokens[stop:])
        )
        print(f"{number}. …{before[-90:]}**{ours}**{after[:90]}…  \n   (original:{truth})")


def main() -> None:
    """Measure models, or print fills."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="[NAME=]MODEL")
    parser.add_argument("--data", required=True, type=Path, help="held-out text")
    parser.add_argument("--train", type=Path, nargs="*", default=[], help="training texts")
    parser.add_argument("--windows", type=int, default=500)
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument(
        "--fills",
        type=int,
        default=0,
        help="print this number of fills of the first model as Markdown, and measure nothing",
    )
    parser.add_argument(
        "--beam", type=int, default=0, metavar="WIDTH", help="fills by search instead of samples"
    )
    parser.add_argument(
        "--reread",
        action="store_true",
        help="choose among the fills of the beam as `tracformer infill --reread` does",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.reread and not (arguments.fills and arguments.beam):
        parser.error("--reread ranks the fills of a beam: give --fills and --beam too")
    keep_freed_memory()
    named = [pair if "=" in pair else f"{Path(pair).name}={pair}" for pair in arguments.models]
    models = {
        name: tracformer.load(folder) for name, folder in (pair.split("=", 1) for pair in named)
    }
    first = next(iter(models.values()))
    if different := [
        name
        for name, lm in models.items()
        if lm.tokenizer.fingerprint != first.tokenizer.fingerprint
    ]:
        raise SystemExit(
            f"{different[0]} has another tokenizer than {next(iter(models))}; compare models with "
            "the same tokenizer"
        )
    holes = cut(
        arguments.data.read_text(),
        first.tokenizer,
        arguments.fills or arguments.windows,
        arguments.length,
        documents_of(arguments.train),
    )
    if arguments.fills:
        filled = (
            searched(first, holes, arguments.beam, arguments.reread)
            if arguments.beam
            else sampled(first, holes, arguments.seed)
        )
        return show_fills(first, holes, filled)
    print(f"{len(holes.tokens)} windows")
    rows = []
    for name, lm in models.items():
        # a bound has no guess for a token
        for mode in (mode for mode in lm.model.config.modes if lm.model.answers[mode] != BOUND):
            rows.append(row := measure(lm, mode, holes, name))
            kind = "" if row["answer"] == EXACT else f" ({row['answer']})"
            shown = [f"{value:.2f}" for value in (row["perplexity"], *row["perplexity_interval"])]  # type: ignore[misc,str-format]
            print(
                f"{name:>12} {mode:>4}  perplexity {shown[0]} [{shown[1]}, {shown[2]}]{kind}  "
                f"accuracy {row['accuracy']:.3f} {np.round(row['accuracy_interval'], 3).tolist()}"  # type: ignore[call-overload]
            )
    if arguments.json:
        write_atomically(arguments.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
