"""GPT-2 that fills in the middle: the text is reordered, so that a left-to-right model sees what follows a hole.

A hole is a maximal run of targets. The network reads the given text with one marker in the place of each hole, whatever its length, and
then the contents of the holes in order, each after an opener:

    text      a b _ _ e f _ h        (targets c d, g)
    reading   bos a b HOLE e f HOLE h  OPEN c d  OPEN g

so p(x_t | x_C, x_<t) for targets, and the chain rule gives a joint. For one hole this is prefix-suffix-middle with the marker between
prefix and suffix. Two readings were taken:

- The lengths of the holes are the question's, as for every other system: real tokens alone are predicted, over which the answer is
  normalised, and neither an opener nor an end is. Of the fillings of these lengths it is an exact joint. But the network reads no
  length: while it fills a hole it does not know where the hole ends.
- Positions count along the reading. A text of n tokens with h holes takes n + 2h of them (the last token is never read), and
  there are max_length + 2 max_holes. By default that is enough for every pattern; but positions that training never reached are
  untrained, so train with as many holes as will be asked for.

Mode `ar` is plain GPT-2, without markers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tracformer.model.base import EXACT
from tracformer.peers.gpt2 import GPT2, PRESETS, GPT2Config
from tracformer.peers.transformer import inside_of


@dataclass(frozen=True)
class GPT2FimConfig(GPT2Config):
    model_type = "gpt2-fim"
    possible_modes = ("car", "ar")
    presets = PRESETS

    max_holes: int = -1  # of a text of max_length tokens, for which there are positions; -1: as many as there can be

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_holes == -1:
            object.__setattr__(self, "max_holes", (self.max_length + 1) // 2)
        self.require_positive("max_holes")

    @property
    def rows(self) -> int:
        return self.vocab_size + 2

    @property
    def positions(self) -> int:
        return self.max_length + 2 * self.max_holes

    @property
    def hole_id(self) -> int:
        """Stands for a hole in the given text: the mask, of any length."""
        return self.mask_id

    @property
    def open_id(self) -> int:
        """Opens the contents of a hole."""
        return self.vocab_size + 1


class GPT2Fim(GPT2):
    config: GPT2FimConfig
    config_class = GPT2FimConfig
    answers = {"car": EXACT, "ar": EXACT}  # noqa: RUF012
    limits = {  # noqa: RUF012
        "car": "does not see how long a hole is while it fills it",
        "ar": "does not see what follows a hole",
    }

    def states(self, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor, asked: Tensor) -> Tensor:
        if mode == "ar":
            return super().states(tokens, context, mode, lengths, asked)
        reading, slots = self.reorder(tokens, context, lengths)
        features = self.read(reading)  # (B, S, d)
        row, position = asked.nonzero(as_tuple=True)
        return features[row, slots[row, position] - 1]

    def reorder(self, tokens: Tensor, context: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The readings (B, S), padded on the right, and for each target (B, T) its slot there; the slot before predicts it."""
        target = ~context & inside_of(tokens, lengths)
        start = target & ~torch.nn.functional.pad(target[:, :-1], (1, 0))  # of a hole
        kept = start | (context & inside_of(tokens, lengths))  # what the first part holds: given tokens, and one marker a hole
        holes, targets = start.sum(1), target.sum(1)  # (B,)
        needed = lengths + 2 * holes
        if int(needed.max()) > self.config.positions:
            worst = int(needed.argmax())
            raise ValueError(
                f"a text of {int(lengths[worst])} tokens with {int(holes[worst])} holes takes {int(needed[worst])} positions; "
                f"this model has {self.config.positions} (max_length {self.config.max_length} + 2 max_holes {self.config.max_holes})"
            )
        first = 1 + kept.sum(1, keepdim=True)  # (B, 1) the slot of the first opener, behind bos and the first part
        hole = start.cumsum(1)  # counts from 1
        slots = first + hole + target.cumsum(1) - 1  # behind that many openers and contents
        reading = tokens.new_zeros(len(tokens), int((first[:, 0] + holes + targets).max()))
        reading[:, 0] = self.config.bos_id
        for places, at, what in (
            (kept, kept.cumsum(1), tokens.masked_fill(start, self.config.hole_id)),
            (start, slots - 1, torch.full_like(tokens, self.config.open_id)),
            (target, slots, tokens),
        ):
            row, position = places.nonzero(as_tuple=True)
            reading[row, at[row, position]] = what[row, position]
        return reading[:, :-1], slots  # what the longest ends with predicts nothing
