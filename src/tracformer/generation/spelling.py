"""What a tokeniser's tokens look like: which begin with a space, which are not text at all.

Byte-level BPE (ours, GPT-2's) and SentencePiece spell a word together with the space before it; WordPiece puts spaces between words, whose
tokens have none. So the space in front of a blank belongs to the blank, else the model would be asked for a word without its space right
behind a space without its word, which it never saw.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from torch import Tensor

from tracformer.data.tokenizer import FOREIGN, Tokenizer, is_byte_level
from tracformer.data.tokenizer_kinds import byte_symbols
from tracformer.generation.job import Revealed
from tracformer.generation.results import Arrival, Candidate, Candidates

HALF = "\ufffd"  # what stands for bytes that are no character, or not yet
NEAR = 16  # tokens before others that may change how these are spelt; a character has four bytes at most


class Spelling:
    """Facts about one tokeniser, computed once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        document = json.loads(tokenizer.document)
        added = {int(token["id"]): bool(token.get("special")) for token in document.get("added_tokens") or []}
        self.tokenizer = tokenizer
        self.special: tuple[int, ...] = tuple(
            sorted({tokenizer.eot_id, *(i for i, special in added.items() if special)} - {tokenizer.mask_id})
        )
        self._texts: dict[int, str] = {}
        byte_level = is_byte_level(document.get("decoder"))
        self.apart = byte_level or tokenizer.kind == "char"  # is the text of tokens that of each, one after the other?
        self._word: tuple[int, ...] = ()  # where tokens are spelt by what is before them: one to stand before each
        self.word_starts: tuple[int, ...] = ()  # tokens of one space and then something that is not white space
        if tokenizer.kind == FOREIGN and not self.apart:
            words = (i for i in range(tokenizer.vocab_size) if i not in added and tokenizer.decode([i]).isalpha())
            self._word = tuple(islice(words, 1))
            starts = (i for i in range(tokenizer.vocab_size) if re.match(r" \S", self.token(i)))
            self.word_starts = tuple(i for i in starts if i not in added)
        elif tokenizer.kind != "byte" and byte_level:
            spelled = bytes_of(tokenizer.tokens())
            starts = (i for i, token in enumerate(spelled) if token[:1] == b" " and len(token) > 1 and not token[1:2].isspace())
            self.word_starts = tuple(i for i in starts if i not in added)

    @property
    def moves_spaces(self) -> bool:
        """Does a space before a blank belong to the blank?"""
        return bool(self.word_starts)

    def token(self, token_id: int) -> str:
        """One token's own text, with its space where it begins a word; half a UTF-8 character is U+FFFD."""
        if token_id not in self._texts:
            self._texts[token_id] = self.behind("", self._word, [token_id])[1]
        return self._texts[token_id]

    def behind(self, text: str, given: Sequence[int], ids: Sequence[int]) -> tuple[str, str]:
        """A text, whose tokens are `given`, and what the tokens `ids` right behind them add to it.

        A character that began in the text and ends in `ids` goes from one to the other. A space that ends the text does not come twice.
        """
        decode = self.tokenizer.decode
        if self.apart and not text.endswith(HALF):
            return text, decode(ids)
        near = given[-NEAR:]
        before, whole = decode(near), decode([*near, *ids])
        kept = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), min(len(before), len(whole)))
        if kept < len(before) and not text.endswith(before):  # the tokeniser spells this text otherwise, so it is not known where to cut it
            return text, decode(ids)
        added = whole[kept:] if self.apart or not text.endswith(" ") else whole[kept:].removeprefix(" ")
        return text[: len(text) - (len(before) - kept)], added

    def filling(self, text: str, given: Sequence[int], ids: Sequence[int]) -> str:
        """What the tokens `ids` add to a text that stays as it is: what they have of a character that began in it is half a character."""
        kept, added = self.behind(text, given, ids)
        return added if kept == text else self.tokenizer.decode(ids)

    def reader(self, text: str, given: Sequence[int]) -> Callable[[Sequence[int]], str]:
        """What tokens right behind a text add to it."""
        return lambda ids: self.behind(text, given, ids)[1]

    def candidates(self, token_ids: Tensor, log_probs: Tensor) -> list[Candidates]:
        """What models give as (B, T, top), in words; where there is no token (-1) there is no candidate."""
        return [
            tuple(self._listed(zip(*position, strict=True)) for position in zip(ids, values, strict=True))
            for ids, values in zip(token_ids.tolist(), log_probs.tolist(), strict=True)
        ]

    def arrival(self, revealed: Revealed, text: int, sample: int, blank: int, index: int, draft: bool = False) -> Arrival:
        token = self.token(revealed.token)
        return Arrival(text, sample, blank, index, revealed.token, token, revealed.log_prob, draft, self._listed(revealed.candidates))

    def _listed(self, likely: Iterable[tuple[int, float]]) -> tuple[Candidate, ...]:
        return tuple(Candidate(i, self.token(i), math.exp(value), value) for i, value in likely if i >= 0)


def bytes_of(tokens: Iterable[str]) -> list[bytes]:
    """Byte-level vocabularies write each byte as one printable character; a token with any other character is not text: no bytes."""
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    return [bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else b"" for token in tokens]
