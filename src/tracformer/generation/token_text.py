"""Token ids to text: spaces, bytes, and the bytes of each token.

- `spelling_of`: how a tokenizer's tokens are written (which begin with a space, which are not text,
  what tokens add to a text), one class for each family: `Spelling` (bytes, characters),
  `ByteLevelSpelling`, `WordSpelling` (SentencePiece), `WordPieceSpelling`.
- `spelled_bytes`: how many bytes of text each token stands for, for bits per byte.

Byte-level BPE (ours, GPT-2's) and SentencePiece write a word together with the space before it;
WordPiece puts spaces between words, whose tokens have none. So the space before a blank belongs to
the blank: otherwise the model would have to predict a word without its space after a space without
its word, which it never saw in training.
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

HALF = "\ufffd"  # shown for bytes that are not, or not yet, a character
# characters of scripts that are written without spaces between words
UNSPACED = (
    ("\u0e00", "\u0eff"),
    ("\u3040", "\u30ff"),
    ("\u3400", "\u9fff"),
    ("\uf900", "\ufaff"),
    ("\U00020000", "\U0003ffff"),
)
NEAR = 16  # number of tokens before others that may change their text


def spelling_of(tokenizer: Tokenizer) -> "Spelling":
    """Return how the tokens of a tokenizer are written, by its family."""
    decoder = json.loads(tokenizer.document).get("decoder")
    if tokenizer.kind != "byte" and is_byte_level(decoder):
        return ByteLevelSpelling(tokenizer)
    if tokenizer.kind != FOREIGN:
        return Spelling(tokenizer)
    return WordSpelling(tokenizer) if spells_spaces(decoder) else WordPieceSpelling(tokenizer)


class Spelling:
    """How the tokens of bytes and of characters are written, and what all families share.

    Here the text of several tokens is their texts joined, and no token begins with the space before
    a word.

    Args:
        tokenizer: The tokenizer.
    """

    dropped = False
    """White space has no token, so tokens do not say what stood between two words."""

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

    @cached_property
    def word_starts(self) -> tuple[int, ...]:
        """Tokens that begin with one space, followed by something that is not white space."""
        return ()

    @property
    def moves_spaces(self) -> bool:
        """Whether a space before a blank moves into the blank."""
        return bool(self.word_starts)

    def may_move_from(self, text: str) -> bool:
        """Return whether a space after this beginning of a text may move into a blank.

        Some tokenizers drop a space before the first token of a text.
        """
        return bool(self.tokenizer.encode(text))

    def token(self, token_id: int, first: bool = False) -> str:
        """Return a token's text. A part of a UTF-8 character is shown as U+FFFD.

        Args:
            token_id: The token.
            first: It is the first token of the sequence, where some tokenizers drop a space.
        """
        if first:
            return self.tokenizer.decode([token_id])
        if token_id not in self._texts:
            self._texts[token_id] = self._inner_text(token_id)
        return self._texts[token_id]

    def filling(
        self, text: str, given: Sequence[int], ids: Sequence[int], moved: bool = False
    ) -> str:
        """Return what tokens add to a text.

        Args:
            text: The text.
            given: The text's tokens.
            ids: The tokens that follow.
            moved: A space was removed from the end of the text and belongs to these tokens.
        """
        return self._added(given, ids)

    def text_after(
        self, text: str, given: Sequence[int], ids: Sequence[int], moved: bool = False
    ) -> tuple[str, str]:
        """Return a text and what tokens add to it.

        As `filling`, but a character whose bytes begin in the text and end in `ids` is moved to the
        second part.
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

    def candidates(self, token_ids: Tensor, log_probs: Tensor) -> list[Candidates]:
        """Return candidates from token ids and log-probabilities (B, T, top); id -1 has none."""
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

    def _inner_text(self, token_id: int) -> str:
        """Return the text of a token that is not the first of its sequence."""
        return self.tokenizer.decode([token_id], inside=True)

    def _added(self, given: Sequence[int], ids: Sequence[int]) -> str:
        """Return what tokens add to the text of the tokens before them."""
        return self.tokenizer.decode(ids, inside=bool(given))

    def _listed(self, likely: Iterable[tuple[int, float]]) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(i, self.token(i), math.exp(value), value) for i, value in likely if i >= 0
        )


class ByteLevelSpelling(Spelling):
    """Byte-level BPE (ours, GPT-2's): every byte has a token, and a space belongs to its word."""

    @cached_property
    def word_starts(self) -> tuple[int, ...]:
        return tuple(
            i
            for i, token in enumerate(bytes_of(self.tokenizer.tokens()))
            if token[:1] == b" "
            and len(token) > 1
            and not token[1:2].isspace()
            and i not in self.added
        )

    def may_move_from(self, text: str) -> bool:
        return True


class WordSpelling(Spelling):
    """SentencePiece, and other tokenizers of the library whose tokens hold the space before a word.

    Where white space has no token, a space is put between two words that no token separates.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.dropped = not set(self._ids(" ")) - {tokenizer.unknown_id}

    @cached_property
    def word_starts(self) -> tuple[int, ...]:
        return tuple(
            i
            for i in range(self.tokenizer.vocab_size)
            if re.match(r" \S", self.token(i)) and i not in self.added
        )

    def filling(
        self, text: str, given: Sequence[int], ids: Sequence[int], moved: bool = False
    ) -> str:
        added = self._added(given, ids)
        if not self.dropped:
            return added
        if moved:
            return " " + added.removeprefix(" ")
        ends_open = text and not text[-1].isspace()
        return added if ends_open and self._separates(text, added) else added.removeprefix(" ")

    def _separates(self, text: str, added: str) -> bool:
        """Return whether a space stands between a text and what is added to it."""
        return True

    def _ids(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text, inside=True)
        except ValueError:
            return []


class WordPieceSpelling(WordSpelling):
    """WordPiece, and other tokenizers whose tokens are written according to those before them."""

    def _inner_text(self, token_id: int) -> str:
        return self._added(self._word, [token_id])

    def _added(self, given: Sequence[int], ids: Sequence[int]) -> str:
        near = given[-NEAR:]
        before, whole = self.tokenizer.decode(near), self.tokenizer.decode([*near, *ids])
        return whole[len(before) :] if whole.startswith(before) else self.tokenizer.decode(ids)

    def _separates(self, text: str, added: str) -> bool:
        return self._divides and _in_word(text[-1]) and _in_word(added[1:2])

    @cached_property
    def _divides(self) -> bool:
        """Whether two words joined without a space are tokenized as something else."""
        return self._ids(self.tokenizer.decode(self._word) * 2) != self._word * 2

    @cached_property
    def _word(self) -> list[int]:
        """A token that is a word, to decode others after it."""
        words = (
            i
            for i in range(self.tokenizer.vocab_size)
            if i not in self.added and self.tokenizer.decode([i]).isalpha()
        )
        return list(islice(words, 1))


def _in_word(character: str) -> bool:
    """Return whether a character belongs to a script that separates words by spaces."""
    return character.isalnum() and not any(low <= character <= high for low, high in UNSPACED)


def bytes_of(tokens: Iterable[str]) -> list[bytes]:
    """Return the bytes of each token of a byte-level vocabulary.

    Such vocabularies write each byte as one printable character. A token with any other character
    is not text and gets no bytes.
    """
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    return [
        bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else b""
        for token in tokens
    ]


@lru_cache(maxsize=8)
def spelled_bytes(tokenizer: Tokenizer) -> list[bytes] | None:
    """Return the bytes of each token, empty for end of text and other special tokens.

    None if the tokens of this tokenizer do not stand for fixed bytes.
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
