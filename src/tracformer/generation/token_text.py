"""Token ids to text: spaces, bytes, and the bytes of each token.

What a tokeniser's tokens look like: which begin with a space, which are not text at all.

Byte-level BPE (ours, GPT-2's) and SentencePiece spell a word together with the space before it;
WordPiece puts spaces between words, whose tokens have none. So the space in front of a blank
belongs to the blank, else the model would be asked for a word without its space right behind a
space without its word, which it never saw.

How many bytes of text a token stands for: what makes bits per byte comparable between tokenisers.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import islice

from torch import Tensor

from tracformer.data.make_tokenizer import byte_symbols
from tracformer.data.tokenizer import FOREIGN, Tokenizer, is_byte_level, spells_spaces
from tracformer.generation.results import Candidate, Candidates, Token

HALF = "\ufffd"  # what stands for bytes that are no character, or not yet
UNSPACED = (
    ("\u0e00", "\u0eff"),
    ("\u3040", "\u30ff"),
    ("\u3400", "\u9fff"),
    ("\uf900", "\ufaff"),
    ("\U00020000", "\U0003ffff"),
)
NEAR = 16  # words before others that may change how these are spelt


class Spelling:
    """Facts about one tokeniser."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        document = json.loads(tokenizer.document)
        self.added = {
            int(token["id"]): bool(token.get("special"))
            for token in document.get("added_tokens") or []
        }
        self.tokenizer = tokenizer
        self.special: tuple[int, ...] = tuple(
            sorted(
                {tokenizer.eot_id, *(i for i, special in self.added.items() if special)}
                - {tokenizer.mask_id}
            )
        )
        self._texts: dict[int, str] = {}
        self._byte_level = tokenizer.kind != "byte" and is_byte_level(document.get("decoder"))
        # Is the text of tokens that of each, one after the other? Else they are spelt by what is
        # before them.
        self.apart = tokenizer.kind != FOREIGN or spells_spaces(document.get("decoder"))
        # Has white space no token? Then nobody knows from the tokens what stood between two words.
        self.dropped = (
            tokenizer.kind == FOREIGN
            and not self._byte_level
            and not set(self._ids(" ")) - {tokenizer.unknown_id}
        )

    @property
    def moves_spaces(self) -> bool:
        """Does a space before a blank belong to the blank?"""
        return bool(self.word_starts)

    def may_move_from(self, text: str) -> bool:
        """May a space move from behind this beginning of a text?

        Before the first token of all, some tokenisers would not show it.
        """
        return self._byte_level or bool(self.tokenizer.encode(text))

    @cached_property
    def word_starts(self) -> tuple[int, ...]:
        """Tokens of one space and then something that is not white space."""
        if self._byte_level:
            spelled = bytes_of(self.tokenizer.tokens())
            starts = [
                i
                for i, token in enumerate(spelled)
                if token[:1] == b" " and len(token) > 1 and not token[1:2].isspace()
            ]
        elif self.tokenizer.kind == FOREIGN:
            starts = [
                i for i in range(self.tokenizer.vocab_size) if re.match(r" \S", self.token(i))
            ]
        else:
            starts = []
        return tuple(i for i in starts if i not in self.added)

    def token(self, token_id: int, first: bool = False) -> str:
        """One token's own text, with its space where it begins a word and is not the first of all;
        half a UTF-8 character is U+FFFD.
        """
        if first:
            return self.tokenizer.decode([token_id])
        if token_id not in self._texts:
            self._texts[token_id] = self._added(
                [] if self.apart else self._word, [token_id], inside=True
            )
        return self._texts[token_id]

    def filling(
        self, text: str, given: Sequence[int], ids: Sequence[int], moved: bool = False
    ) -> str:
        """What the tokens `ids` add to a text whose tokens are `given`; `moved`: the text's last
        space is not in it, but belongs here.
        """
        added = self._added(given, ids, inside=bool(given))
        if not moved:
            return (
                added.removeprefix(" ")
                if self.dropped and not self._apart_from(text, added)
                else added
            )
        return " " + added.removeprefix(" ") if self.dropped else added

    def behind(
        self, text: str, given: Sequence[int], ids: Sequence[int], moved: bool = False
    ) -> tuple[str, str]:
        """A text, and what the tokens add to it as `filling` does; but a character that began in it
        and ends in `ids` goes to these.
        """
        sure = text.rstrip(HALF)
        if text != sure:
            before, whole = self.tokenizer.decode(given), self.tokenizer.decode([*given, *ids])
            if before == text and whole.startswith(sure):
                kept = next(
                    (i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b),
                    len(before),
                )
                return whole[:kept], whole[kept:]
        return text, self.filling(text, given, ids, moved)

    def _added(self, given: Sequence[int], ids: Sequence[int], inside: bool) -> str:
        if self.apart:
            return self.tokenizer.decode(ids, inside=inside)
        near = given[-NEAR:]
        before, whole = self.tokenizer.decode(near), self.tokenizer.decode([*near, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(ids)

    def _apart_from(self, text: str, added: str) -> bool:
        """Where white space is no token: does the space before what is added stand in the text?"""
        if not text or text[-1].isspace():
            return False
        return self.apart or (self._divides and _in_word(text[-1]) and _in_word(added[1:2]))

    @cached_property
    def _divides(self) -> bool:
        """Are two words without a space between them not those two?"""
        return self._ids(self.tokenizer.decode(self._word) * 2) != self._word * 2

    def _ids(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text, inside=True)
        except ValueError:
            return []

    @cached_property
    def _word(self) -> list[int]:
        """A token to stand before others."""
        words = (
            i
            for i in range(self.tokenizer.vocab_size)
            if i not in self.added and self.tokenizer.decode([i]).isalpha()
        )
        return list(islice(words, 1))

    def candidates(self, token_ids: Tensor, log_probs: Tensor) -> list[Candidates]:
        """What models give as (B, T, top), in words; where there is no token (-1)
        there is no candidate.
        """
        return [
            tuple(
                self._listed(zip(*position, strict=True))
                for position in zip(ids, values, strict=True)
            )
            for ids, values in zip(token_ids.tolist(), log_probs.tolist(), strict=True)
        ]

    def placed(
        self,
        token: Token,
        sample: int,
        draft: bool,
        *,
        text: int = 0,
        blank: int = 0,
        index: int = 0,
    ) -> Token:
        """Return a token of a batch with its place in the texts, and with its own text."""
        return Token(
            sample=sample,
            position=token.position,
            token_id=token.token_id,
            log_prob=token.log_prob,
            candidates=tuple(
                replace(each, text=self.token(each.token_id)) for each in token.candidates
            ),
            draft=draft,
            text=text,
            blank=blank,
            index=index,
            token=self.token(token.token_id, first=token.position == 0),
        )

    def _listed(self, likely: Iterable[tuple[int, float]]) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(i, self.token(i), math.exp(value), value) for i, value in likely if i >= 0
        )


def _in_word(character: str) -> bool:
    """Of a script that divides words by spaces."""
    return character.isalnum() and not any(low <= character <= high for low, high in UNSPACED)


def bytes_of(tokens: Iterable[str]) -> list[bytes]:
    """Byte-level vocabularies write each byte as one printable character; a token with any other
    character is not text: no bytes.
    """
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    return [
        bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else b""
        for token in tokens
    ]


@lru_cache(maxsize=8)
def spelled_bytes(tokenizer: Tokenizer) -> list[bytes] | None:
    """Each real token's own bytes, none for end of text and other special tokens; None where tokens
    do not spell bytes one for one.
    """
    document = json.loads(tokenizer.document)
    if tokenizer.kind == "char":
        table = [token.encode() for token in tokenizer.tokens()]
    elif is_byte_level(document.get("decoder")):
        table = bytes_of(tokenizer.tokens())
    else:
        return None
    special = {
        int(token["id"]) for token in document.get("added_tokens") or [] if token.get("special")
    }
    return [
        b"" if i in special or i == tokenizer.eot_id else token for i, token in enumerate(table)
    ]
