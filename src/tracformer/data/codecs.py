"""How each family of tokenizers turns text into ids and ids into text.

`Tokenizer` holds one codec, chosen by `codec_for`:

    ByteCodec           one id per byte of UTF-8
    CharacterCodec      one id per character of a fixed alphabet
    LibraryCodec        whatever the `tokenizers` library does: byte-level BPE, WordPiece, ...
    SentencePieceCodec  a tokenizer that adds a space before every text, or that spells unknown
                        characters as bytes

SentencePiece writes a word together with the space before it, and it adds that space before the
first word of a text too. This is right for a document and wrong for a text from the middle of one.
With `inside=True` the text or the ids continue other text: no space is added or removed there.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

Ids = NDArray[np.uint32]


class AlphabetError(ValueError):
    """A character is outside a fixed alphabet.

    Attributes:
        character: The character.
        offset: Its position in the text.
        alphabet: All characters of the alphabet.
        text_number: Which text of the batch it is in.
    """

    def __init__(self, character: str, offset: int, alphabet: str, text_number: int = 0) -> None:
        self.character, self.offset = character, offset
        self.alphabet, self.text_number = alphabet, text_number
        super().__init__(self.explain(f"at offset {offset}"))

    def __reduce__(self) -> tuple[Any, ...]:
        # an exception of a worker process is made again from its arguments
        return type(self), (self.character, self.offset, self.alphabet, self.text_number)

    def explain(self, where: str) -> str:
        """Return the message for a character found at `where`, with advice."""
        shown = repr(self.alphabet)
        if len(self.alphabet) > 40:
            shown = f"{self.alphabet[:40] + '...'!r} ({len(self.alphabet)} characters)"
        advice = "clean the data, or use an alphabet that has it"
        if self.character in "-.":
            advice = (
                "remove the gaps, or use an alphabet with gaps such as 'protein-aligned' or "
                "'dna-aligned'"
            )
        return (
            f"character {self.character!r} {where} is outside the tokenizer's alphabet {shown}; "
            f"{advice}"
        )


class LibraryCodec:
    """Encode and decode as the `tokenizers` library does."""

    adds_prefix_space = False
    """Whether the tokenizer adds a space before every text, or removes one when it decodes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def bytes_of_ids(self) -> dict[int, int]:
        """The byte that each id stands for, of a tokenizer that falls back to bytes; else empty."""
        return {}

    def encode(self, text: str, inside: bool) -> list[int]:
        """Return the ids of one text."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return one array of ids for each text. BPE runs on all cores."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        # the library raises bare Exception, for instance for a word without an unknown token
        except Exception as error:
            raise ValueError(f"the tokenizer cannot encode this text: {error}") from error
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: list[int], skip_special: bool, inside: bool) -> str:
        """Return the text of the ids."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special)
        return text


class ByteCodec(LibraryCodec):
    """The ids are the bytes of UTF-8."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]


class CharacterCodec(LibraryCodec):
    """One id per character; a character outside the alphabet raises `AlphabetError`."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        letters = backend.get_vocab(with_added_tokens=False)
        self._alphabet = "".join(sorted(letters, key=letters.__getitem__))
        # code point to id, -1 outside the alphabet; the last entry stands for all above it
        self._lookup = np.full(max(map(ord, letters)) + 2, -1, np.int64)
        for letter, i in letters.items():
            self._lookup[ord(letter)] = i

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return the characters' ids of each text."""
        return [self._encode(text, number) for number, text in enumerate(texts)]

    def _encode(self, text: str, number: int) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ids = self._lookup[np.minimum(codes, len(self._lookup) - 1)]
        if len(ids) and ids.min() < 0:
            offset = int(np.argmax(ids < 0))
            raise AlphabetError(text[offset], offset, self._alphabet, number)
        return ids.astype(np.uint32)


class SentencePieceCodec(LibraryCodec):
    """A tokenizer that adds a prefix space or falls back to bytes, as SentencePiece models do.

    Args:
        backend: The tokenizer.
        document: Its `tokenizer.json`.
        tokens: Its real tokens by id.
    """

    def __init__(self, backend: Backend, document: dict[str, Any], tokens: Sequence[str]) -> None:
        super().__init__(backend)
        without = _without_prefix_space(document)
        self.adds_prefix_space = without is not None
        # `_inside` has the same tokens, but adds and removes no prefix space. `_spaced` encodes
        # text from its first white space on: it is the unchanged tokenizer if white space is
        # dropped and every word gets a space, as in T5; else it is `_inside`.
        self._inside = self._spaced = backend
        if without is not None:
            self._inside, plain = (_quiet(json.dumps(each)) for each in (without, document))
            self._spaced = self._inside if _spells_spaces_alike(self._inside, plain) else plain
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        self._bytes_of_ids = (
            {i: names[token] for i, token in enumerate(tokens) if token in names}
            if has_part(document.get("decoder"), "ByteFallback")
            else {}
        )

    @property
    def bytes_of_ids(self) -> dict[int, int]:
        """The byte that each id of the byte fallback stands for."""
        return self._bytes_of_ids

    def encode(self, text: str, inside: bool) -> list[int]:
        """Return the ids of one text; `inside` adds no space before it."""
        if not (inside and self.adds_prefix_space):
            return super().encode(text, inside)
        space = (i for i, character in enumerate(text) if character.isspace())
        first = len(text) if self._spaced is self._inside else next(space, len(text))
        parts = ((self._inside, text[:first]), (self._spaced, text[first:]))
        return [i for backend, part in parts if part for i in _ids(backend, part)]

    def decode(self, ids: list[int], skip_special: bool, inside: bool) -> str:
        """Return the text of the ids; `inside` keeps a space at its beginning.

        The bytes of the fallback are decoded here: the library's decoder replaces a whole run of
        them if one is wrong.
        """
        if not self._bytes_of_ids:
            return self._decode_run(ids, skip_special, inside)
        parts: list[str] = []
        for are_bytes, run in groupby(ids, self._bytes_of_ids.__contains__):
            if are_bytes:
                parts.append(bytes(self._bytes_of_ids[i] for i in run).decode(errors="replace"))
            else:
                parts.append(self._decode_run(list(run), skip_special, inside or bool(parts)))
        return "".join(parts)

    def _decode_run(self, ids: list[int], skip_special: bool, inside: bool) -> str:
        backend = self._inside if inside else self._backend
        text: str = backend.decode(ids, skip_special_tokens=skip_special)
        return text


def codec_for(kind: str, backend: Backend, document: dict[str, Any]) -> LibraryCodec:
    """Return the codec of a tokenizer of this kind ("byte", "char", "bpe" or "hf")."""
    if kind == "byte":
        return ByteCodec(backend)
    if kind == "char":
        return CharacterCodec(backend)
    if kind == "hf" and (
        has_part(document.get("decoder"), "ByteFallback") or _without_prefix_space(document)
    ):
        size = backend.get_vocab_size(with_added_tokens=True)
        tokens = [backend.id_to_token(i) or "" for i in range(size)]
        return SentencePieceCodec(backend, document, tokens)
    return LibraryCodec(backend)


def is_byte_level(decoder: Any) -> bool:
    """Return whether this decoder of a `tokenizer.json` turns tokens into bytes."""
    return has_part(decoder, "ByteLevel")


def spells_spaces(decoder: Any) -> bool:
    """Return whether tokens contain their spaces, as in byte-level BPE and SentencePiece.

    Args:
        decoder: The decoder of a `tokenizer.json`.
    """
    return is_byte_level(decoder) or "▁" in json.dumps(decoder, ensure_ascii=False)


def has_part(part: Any, kind: str) -> bool:
    """Return whether a part of a `tokenizer.json`, or a part inside it, is of this type."""
    if not isinstance(part, dict):
        return False
    return part.get("type") == kind or any(
        has_part(each, kind) for value in part.values() if isinstance(value, list) for each in value
    )


def _without_prefix_space(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the tokenizer without what adds or removes a prefix space; None if nothing does."""
    names = ("normalizer", "pre_tokenizer", "decoder")
    changed = {name: _unspaced(document.get(name)) for name in names}
    relevant = [
        name
        for name in names
        # `add_prefix_space` of a byte-level decoder has no effect
        if not (name == "decoder" and has_part(document.get(name), "ByteLevel"))
    ]
    if all(changed[name] == document.get(name) for name in relevant):
        return None
    return {**document, **changed}


def _unspaced(part: Any) -> Any:
    """Return a part of a `tokenizer.json` without prefix spaces; None if nothing is left."""
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Sequence":
        (key,) = (key for key, value in part.items() if isinstance(value, list))
        return {**part, key: [kept for each in part[key] if (kept := _unspaced(each)) is not None]}
    if kind == "Prepend" or (kind == "Strip" and part.get("content") == " " and part.get("start")):
        return None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel" and part.get("add_prefix_space"):
        return {**part, "add_prefix_space": False}
    return part


def _quiet(document: str) -> Backend:
    """Return a tokenizer for which text that spells a special token is text."""
    backend = Backend.from_str(document)
    backend.encode_special_tokens = True
    return backend


def _spells_spaces_alike(inside: Backend, plain: Backend) -> bool:
    """Return whether " word" has the ids without the prefix space that it has after a word."""
    candidates = (plain.decode([i]) for i in range(plain.get_vocab_size()))
    word = next((text for text in candidates if text.isalpha() and _ids(plain, text)), "")
    after_a_word = _ids(plain, f"{word} {word}")[len(_ids(plain, word)) :]
    return _ids(inside, f" {word}") == after_a_word


def _ids(backend: Backend, text: str) -> list[int]:
    return LibraryCodec(backend).encode(text, inside=False)
