"""Tokenizer: text to ids and back.

Text that does not begin a document, for tokenisers that put a space before every text.

SentencePiece's tokenisers spell a word with the space before it, the first word of a text too: that
space is put there when a text is read and hidden when it is written. Right for a document, wrong
for a piece from the middle of one. Here the parts of a `tokenizer.json` that do so are undone.

The tokeniser: text to ids and back, one `tokenizer.json` beside the data and the model, whatever
kind it is.

Ids 0..vocab_size-1 are real tokens, end of text among them. Id vocab_size is the mask: one extra
row of the model's embedding, named in the file so that other tools can show it, and never produced
from text.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tracformer.files import write_atomically


class Inside(NamedTuple):
    """Two tokenisers that share their tokens."""

    backend: Backend  # puts no space, hides no space
    # for what begins with white space, where that is dropped and every word given a space; else the
    # same as `backend`
    whole: Backend

    def encode(self, text: str) -> list[int]:
        space = (i for i, character in enumerate(text) if character.isspace())
        first = len(text) if self.whole is self.backend else next(space, len(text))
        return [
            i
            for backend, part in ((self.backend, text[:first]), (self.whole, text[first:]))
            if part
            for i in _ids(backend, part)
        ]


def inside_of(document: str) -> Inside | None:
    """None where a text is read and written in the same way wherever it stands."""
    parts = json.loads(document)
    changed = {
        name: unspaced(parts.get(name)) for name in ("normalizer", "pre_tokenizer", "decoder")
    }
    if all(
        changed[name] == parts.get(name)
        for name in changed
        if not (name == "decoder" and has_part(parts[name], "ByteLevel"))
    ):
        return None
    backend, plain = (Backend.from_str(json.dumps({**parts, **each})) for each in (changed, {}))
    for each in (backend, plain):
        each.encode_special_tokens = True
    word = next(
        (
            text
            for i in range(plain.get_vocab_size())
            if (text := plain.decode([i])).isalpha() and _ids(plain, text)
        ),
        "",
    )
    # how a word is spelt behind another
    behind = _ids(plain, f"{word} {word}")[len(_ids(plain, word)) :]
    return Inside(backend, backend if _ids(backend, f" {word}") == behind else plain)


def unspaced(part: Any) -> Any:
    """A part of a `tokenizer.json` that puts no space before a text or hides none; None where
    nothing is left of it.
    """
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if kind == "Sequence":
        (key,) = (key for key, value in part.items() if isinstance(value, list))
        return {**part, key: [kept for each in part[key] if (kept := unspaced(each)) is not None]}
    if kind == "Prepend" or (kind == "Strip" and part.get("content") == " " and part.get("start")):
        return None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return (
        {**part, "add_prefix_space": False}
        if kind == "ByteLevel" and part.get("add_prefix_space")
        else part
    )


def has_part(part: Any, kind: str) -> bool:
    """Is this, or one of its parts, of that kind?"""
    if not isinstance(part, dict):
        return False
    return part.get("type") == kind or any(
        has_part(each, kind) for value in part.values() if isinstance(value, list) for each in value
    )


def _ids(backend: Backend, text: str) -> list[int]:
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    # the library raises bare Exception, for instance for a word without an unknown token
    except Exception as error:
        raise ValueError(f"the tokeniser cannot encode this text: {error}") from error
    return ids


EOT = "<|endoftext|>"
MASK = "<|mask|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
KIND_KEY = "tracformer_kind"
SPECIAL = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
FOREIGN = "hf"  # made elsewhere; ours are "byte", "char" and "bpe"

Ids = NDArray[np.uint32]


class AlphabetError(ValueError):
    """A character outside a fixed alphabet. Callers that know where the text came from say so."""

    def __init__(self, character: str, offset: int, alphabet: str, text_number: int = 0) -> None:
        self.character, self.offset, self.alphabet, self.text_number = (
            character,
            offset,
            alphabet,
            text_number,
        )
        super().__init__(self.explain(f"at offset {offset}"))

    def explain(self, where: str) -> str:
        shown = (
            self.alphabet
            if len(self.alphabet) <= 40
            else f"{self.alphabet[:40]}... ({len(self.alphabet)} characters)"
        )
        advice = (
            "; remove the gaps, or use an alphabet with gaps such as 'protein-aligned' or "
            "'dna-aligned'"
        )
        return (
            f"character {self.character!r} {where} is outside the tokeniser's alphabet {shown!r}"
            + (
                advice
                if self.character in "-."
                else "; clean the data, or use an alphabet that has it"
            )
        )


class Tokenizer:
    """Wraps the `tokenizers` library; `document` is the text of its `tokenizer.json`, kept word for
    word.

    The fingerprint is taken from that document, not from what the library would write today:
    another version of the library may write the same tokeniser in other words.
    """

    def __init__(self, document: str, kind: str, eot: str = EOT) -> None:
        self.document, self.kind, self.eot = document, kind, eot
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokeniser of the `tokenizers` library: {error}") from error
        # Text that spells a special token is text: only the code around the model may place an end
        # of text or a mask.
        self._tokenizer.encode_special_tokens = True
        eot_id, mask_id = self._tokenizer.token_to_id(eot), self._tokenizer.token_to_id(MASK)
        if eot_id is None or mask_id is None:
            raise ValueError(
                f"the tokeniser has no token {eot if eot_id is None else MASK!r}; build it with "
                "tracformer.data.build_tokenizer"
            )
        highest = max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        if mask_id != highest or eot_id == mask_id:
            raise ValueError(
                f"the mask token {MASK!r} has id {mask_id}; it must be the last id, {highest}, "
                "right behind the real tokens"
            )
        self.eot_id: int = eot_id
        self.mask_id: int = mask_id
        self._lookup = self._char_lookup() if kind == "char" else None

    @property
    def vocab_size(self) -> int:
        """Real tokens, end of text included: what the model can predict.

        The mask's id is the next one.
        """
        return self.mask_id

    @property
    def has_gaps(self) -> bool:
        """An alphabet of aligned sequences."""
        return self.kind == "char" and self._tokenizer.token_to_id("-") is not None

    @property
    def puts_spaces(self) -> bool:
        """Does it put a space before every text, or hide one?"""
        return self._inside is not None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON: equal if and only if two tokenisers' files
        say the same.
        """
        return hashlib.sha256(_canonical(json.loads(self.document)).encode()).hexdigest()

    def encode(self, text: str, inside: bool = False) -> list[int]:
        """`inside`: the text stands behind other text, so that a tokeniser which puts a space
        before every text puts none before this.
        """
        if inside and self._inside is not None:
            return self._inside.encode(text)
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """One array of ids a text, without end of text; BPE runs on all cores."""
        if self.kind == "byte":
            return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
        if self._lookup is not None:
            return [
                self._encode_characters(self._lookup, text, number)
                for number, text in enumerate(texts)
            ]
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        # the library raises bare Exception, for instance for a word without an unknown token
        except Exception as error:
            raise ValueError(f"the tokeniser cannot encode this text: {error}") from error
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special: bool = False, inside: bool = False) -> str:
        """The text of ids; bytes that are not UTF-8 (half a character at an edge) become U+FFFD.

        inside: they stand behind others, so that a tokeniser which hides the space before a text
        shows that of the first.
        """
        values = [int(i) for i in ids]
        if wrong := [i for i in values if not 0 <= i <= self.mask_id]:
            raise ValueError(
                f"token id {wrong[0]} is out of range; this tokeniser's ids are 0..{self.mask_id} "
                "(the last one is the mask)"
            )
        within = self._tokenizer if self._inside is None else self._inside.backend
        parts = []
        for spelt, run in (
            groupby(values, self.bytes_of_ids.__contains__)
            if self.bytes_of_ids
            else [(False, values)]
        ):
            if spelt:
                parts.append(bytes(self.bytes_of_ids[i] for i in run).decode(errors="replace"))
            else:
                parts.append(
                    (within if inside or parts else self._tokenizer).decode(
                        list(run), skip_special_tokens=skip_special
                    )
                )
        return "".join(parts)

    @cached_property
    def bytes_of_ids(self) -> dict[int, int]:
        """Of a tokeniser that falls back to bytes: which ids are bytes.

        Its own decoder spoils a row of them for one that is wrong.
        """
        if self.kind != FOREIGN or not has_part(
            json.loads(self.document).get("decoder"), "ByteFallback"
        ):
            return {}
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        return {i: names[token] for i, token in enumerate(self.tokens()) if token in names}

    @cached_property
    def unknown_id(self) -> int | None:
        """What stands for text that has no tokens, if anything does."""
        model = json.loads(self.document)["model"]
        return (
            model["unk_id"]
            if model.get("unk_id") is not None
            else self._tokenizer.token_to_id(model.get("unk_token") or "")
        )

    def tokens(self) -> list[str]:
        """The real tokens by id, as the tokeniser spells them."""
        return [self._tokenizer.id_to_token(i) or "" for i in range(self.vocab_size)]

    def save(self, folder: str | PathLike[str]) -> None:
        """Write `tokenizer.json`, and a `tokenizer_config.json` with which Hugging Face's
        AutoTokenizer reads it.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            KIND_KEY: self.kind,
            "eos_token": self.eot,
            "mask_token": MASK,
            "clean_up_tokenization_spaces": False,
        }
        if self.kind != "byte" and spells_spaces(json.loads(self.document).get("decoder")):
            # Words are spelt with the space before them, so that space belongs to the mask: "once
            # upon a <|mask|>" asks for " time".
            config["added_tokens_decoder"] = {
                str(self.mask_id): {**SPECIAL, "content": MASK, "lstrip": True}
            }
        write_atomically(path / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        write_atomically(path / TOKENIZER_FILE, self.document)

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Self:
        """What `save` wrote. For tokenisers made elsewhere see `load_tokenizer`."""
        path = Path(folder) / TOKENIZER_FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no tokeniser: there is no {TOKENIZER_FILE} in it"
            )
        config = read_config(Path(folder))
        if KIND_KEY not in config:
            raise ValueError(
                f"{folder} holds a tokeniser that tracformer did not write; read it with "
                "tracformer.data.load_tokenizer"
            )
        try:
            return cls(path.read_text(encoding="utf-8"), config[KIND_KEY], config["eos_token"])
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} cannot be used: {error}") from error

    @cached_property
    def _inside(self) -> "Inside | None":
        return inside_of(self.document) if self.kind == FOREIGN else None

    def _char_lookup(self) -> NDArray[np.int64]:
        """Code point to id, -1 outside the alphabet."""
        letters = self._tokenizer.get_vocab(with_added_tokens=False)
        # the last entry stands for everything above
        table = np.full(max(map(ord, letters)) + 2, -1, np.int64)
        for letter, i in letters.items():
            table[ord(letter)] = i
        return table

    def _encode_characters(self, lookup: NDArray[np.int64], text: str, number: int) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        ids = lookup[np.minimum(codes, len(lookup) - 1)]
        if len(ids) and ids.min() < 0:
            offset = int(np.argmax(ids < 0))
            letters = self._tokenizer.get_vocab(with_added_tokens=False)
            raise AlphabetError(
                text[offset], offset, "".join(sorted(letters, key=letters.__getitem__)), number
            )
        return ids.astype(np.uint32)

    def __repr__(self) -> str:
        return (
            f"Tokenizer(kind={self.kind!r}, vocab_size={self.vocab_size}, "
            f"fingerprint={self.fingerprint[:12]!r})"
        )


def reserve(tokenizer: tokenizers.Tokenizer, kind: str, eot: str | None = EOT) -> Tokenizer:
    """Give a tokeniser of the library the two tokens that every model needs: end of text if it has
    none, and the mask behind all.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = tokenizer.get_vocab(with_added_tokens=True)
    missing = [
        token
        for token in (EOT if eot not in known else None, MASK if MASK not in known else None)
        if token is not None
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in missing]
    )
    document = tokenizer.to_str()
    if len(set(tokenizer.get_vocab(with_added_tokens=True).values())) < len(known) + len(missing):
        raise ValueError(
            "the tokeniser's ids have gaps, so that no id is free behind them for the mask; use "
            "another tokeniser"
        )
    return Tokenizer(document, kind, eot if eot is not None and eot in known else EOT)


def require_same_tokenizer(data: Tokenizer, model: Tokenizer) -> None:
    """Ids mean nothing under another tokeniser: stop before a model reads them."""
    if data.fingerprint != model.fingerprint:
        raise ValueError(
            f"the data's tokeniser ({_describe(data)}) is not the model's ({_describe(model)}); "
            "prepare the data again with the model's folder as its tokeniser, or train a new model"
        )


def is_byte_level(decoder: Any) -> bool:
    """Does this decoder of a `tokenizer.json` turn tokens into bytes?"""
    return has_part(decoder, "ByteLevel")


def spells_spaces(decoder: Any) -> bool:
    """Does this decoder of a `tokenizer.json` find spaces in the tokens themselves, as of
    byte-level BPE or SentencePiece?
    """
    return is_byte_level(decoder) or "▁" in json.dumps(decoder, ensure_ascii=False)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}; expected a JSON object")
    return config


def _describe(tokenizer: Tokenizer) -> str:
    return (
        f"{tokenizer.kind}, {tokenizer.vocab_size} tokens, fingerprint {tokenizer.fingerprint[:12]}"
    )


def _canonical(document: Any) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
