"""Scores of mutants as a batch job: each row of a file is a mutant of one wild type."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracformer.data.tokenizer import Tokenizer
from tracformer.model.base import ConditionalModel
from tracformer.proteins.mutants import Mutant, parse_mutant, score_mutants
from tracformer.proteins.wild_type import WildType


@dataclass(frozen=True)
class MutantOptions:
    """What is compared with what.

    Args:
        wild: The wild type of all mutants.
        mode: "car" for exact joint probabilities, "ac" for sums of marginals.
    """

    wild: WildType
    mode: str = "car"

    def to_dict(self) -> dict[str, Any]:
        """Return the options as `job.json` has them."""
        return asdict(self)


class MutantWork:
    """Scores mutants.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        options: The wild type and the mode.
    """

    def __init__(
        self, model: ConditionalModel, tokenizer: Tokenizer, options: MutantOptions
    ) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options

    def request(self, row: int, text: str, where: str) -> Mutant:
        """Return the mutant of a row; `where` stands before what is wrong with it."""
        try:
            return Mutant(text, parse_mutant(text, self.options.wild))
        except ValueError as error:
            raise ValueError(f"{where}{error}") from error

    def results(self, requests: Sequence[Mutant]) -> list[list[dict[str, Any]]]:
        """Return one object per mutant; a score is null if a position has no column."""
        wild, mode = self.options.wild, self.options.mode
        scores = score_mutants(self.model, self.tokenizer, wild, requests, mode=mode)
        return [
            [
                {
                    "mutant": score.mutant.name,
                    "log_ratio": _known(score.log_ratio),
                    "sum_of_singles": _known(score.sum_of_singles),
                }
            ]
            for score in scores
        ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
