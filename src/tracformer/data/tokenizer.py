"""Tokenizer: text to ids and back, saved as one `tokenizer.json`.

Ids 0..vocab_size-1 are real tokens; end of text is one of them. Id vocab_size is the mask: an extra
row of the model's embedding. It is named in the file so that other tools can show it, and text
never produces it.

    Tokenizer               the class that all of the package uses
    reserve                 add the tokens that every model needs to a tokenizer of the library
    require_same_tokenizer  stop if data and model have different tokenizers

How each family of tokenizers encodes and decodes is in `codecs`; how to make or load a tokenizer
is in `make_tokenizer`.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from tracformer.data.codecs import (
    AlphabetError,
    Ids,
    codec_for,
    is_byte_level,
    spells_spaces,
)
from tracformer.files import CHECKSUMS_FILE, remove_checksums, write_atomically, write_checksums

__all__ = [
    "CONFIG_FILE",
    "EOT",
    "FOREIGN",
    "KIND_KEY",
    "MASK",
    "TOKENIZER_FILE",
    "AlphabetError",
    "Ids",
    "Tokenizer",
    "is_byte_level",
    "read_config",
    "require_same_tokenizer",
    "reserve",
    "spells_spaces",
]

EOT = "<|endoftext|>"
MASK = "<|mask|>"
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
KIND_KEY = "tracformer_kind"
FOREIGN = "hf"  # made elsewhere; our own kinds are "byte", "char" and "bpe"
SPECIAL = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}


class Tokenizer:
    """Convert text to token ids and back.

    Make one with `byte_tokenizer`, `char_tokenizer`, `train_bpe` or `build_tokenizer`; read one
    with `load_tokenizer`.

    Args:
        document: Text of a `tokenizer.json` of the `tokenizers` library. It is kept word for word:
            another version of the library may write the same tokenizer differently, and the
            fingerprint must not change.
        kind: "byte", "char", "bpe", or "hf" for a tokenizer that was made elsewhere.
        eot: The end-of-text token.

    Attributes:
        eot_id: Id of end of text.
        mask_id: Id of the mask, the highest id.

    Example:
        >>> from tracformer.data import char_tokenizer
        >>> tokenizer = char_tokenizer("ACGT")
        >>> tokenizer.encode("GATTACA"), tokenizer.eot_id, tokenizer.mask_id
        ([2, 0, 3, 3, 0, 1, 0], 4, 5)
        >>> tokenizer.decode([2, 0, 3])
        'GAT'
    """

    def __init__(self, document: str, kind: str, eot: str = EOT) -> None:
        self.document, self.kind, self.eot = document, kind, eot
        try:
            self._backend = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer of the `tokenizers` library: {error}") from error
        # Text that spells a special token is text: only code may insert an end of text or a mask.
        self._backend.encode_special_tokens = True
        eot_id, mask_id = self._backend.token_to_id(eot), self._backend.token_to_id(MASK)
        if eot_id is None or mask_id is None:
            raise ValueError(
                f"the tokenizer has no token {eot if eot_id is None else MASK!r}; build it with "
                "tracformer.data.build_tokenizer"
            )
        highest = max(self._backend.get_vocab(with_added_tokens=True).values())
        if mask_id != highest or eot_id == mask_id:
            raise ValueError(
                f"the mask token {MASK!r} has id {mask_id}; it must have the last id, {highest}, "
                "right after the real tokens"
            )
        self.eot_id: int = eot_id
        self.mask_id: int = mask_id
        self._codec = codec_for(kind, self._backend, json.loads(document))

    @property
    def vocab_size(self) -> int:
        """Number of real tokens, end of text included; the mask's id is the next one."""
        return self.mask_id

    @property
    def has_gaps(self) -> bool:
        """Whether this is an alphabet of aligned sequences, with `-`."""
        return self.kind == "char" and self._backend.token_to_id("-") is not None

    @property
    def adds_prefix_space(self) -> bool:
        """Whether the tokenizer adds a space before every text."""
        return self._codec.adds_prefix_space

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer's JSON in canonical form: equal for equal tokenizers."""
        canonical = json.dumps(
            json.loads(self.document), sort_keys=True, separators=(",", ":"), ensure_ascii=True
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    def encode(self, text: str, inside: bool = False) -> list[int]:
        """Return the ids of a text, without end of text.

        Args:
            text: The text.
            inside: The text continues other text, so a tokenizer that adds a space before every
                text adds none.

        Raises:
            AlphabetError: A character is outside a fixed alphabet.
            ValueError: The tokenizer cannot encode the text.
        """
        return self._codec.encode(text, inside)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Return one array of ids for each text, without end of text; BPE runs on all cores."""
        return self._codec.encode_batch(texts)

    def decode(self, ids: Iterable[int], skip_special: bool = False, inside: bool = False) -> str:
        """Return the text of ids.

        Bytes that are not UTF-8, for instance half a character at an edge, become U+FFFD.

        Args:
            ids: Token ids, 0 to `mask_id`.
            skip_special: Leave out special tokens such as end of text.
            inside: The ids continue other ids, so a tokenizer that removes the space at the
                beginning of a text keeps it.
        """
        values = [int(i) for i in ids]
        if wrong := [i for i in values if not 0 <= i <= self.mask_id]:
            raise ValueError(
                f"token id {wrong[0]} is out of range; this tokenizer's ids are 0..{self.mask_id} "
                "(the last one is the mask)"
            )
        return self._codec.decode(values, skip_special, inside)

    @property
    def bytes_of_ids(self) -> dict[int, int]:
        """The byte that each id stands for, in a tokenizer that falls back to bytes; else empty."""
        return self._codec.bytes_of_ids

    @cached_property
    def unknown_id(self) -> int | None:
        """Id of the unknown token; None if there is none."""
        model = json.loads(self.document)["model"]
        if model.get("unk_id") is not None:
            return int(model["unk_id"])
        found: int | None = self._backend.token_to_id(model.get("unk_token") or "")
        return found

    def tokens(self) -> list[str]:
        """Return the real tokens by id, as the tokenizer's file spells them."""
        return [self._backend.id_to_token(i) or "" for i in range(self.vocab_size)]

    def save(self, folder: str | PathLike[str]) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`.

        The second file lets Hugging Face's AutoTokenizer read the folder.
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
            # Tokens contain the space before a word, so the mask takes that space: the masked
            # token of "once upon a <|mask|>" is " time".
            config["added_tokens_decoder"] = {
                str(self.mask_id): {**SPECIAL, "content": MASK, "lstrip": True}
            }
        recorded = (path / CHECKSUMS_FILE).is_file()  # in a model folder
        remove_checksums(path)
        write_atomically(path / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        write_atomically(path / TOKENIZER_FILE, self.document)
        if recorded:
            write_checksums(path)

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Self:
        """Read what `save` wrote; for tokenizers made elsewhere use `load_tokenizer`."""
        path = Path(folder) / TOKENIZER_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer: there is no {TOKENIZER_FILE}")
        config = read_config(Path(folder))
        if KIND_KEY not in config:
            raise ValueError(
                f"the tokenizer in {folder} was not written by tracformer; read it with "
                "tracformer.data.load_tokenizer"
            )
        try:
            return cls(path.read_text(encoding="utf-8"), config[KIND_KEY], config["eos_token"])
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path} cannot be used: {error}") from error

    def __repr__(self) -> str:
        return (
            f"Tokenizer(kind={self.kind!r}, vocab_size={self.vocab_size}, "
            f"fingerprint={self.fingerprint[:12]!r})"
        )


def reserve(tokenizer: tokenizers.Tokenizer, kind: str, eot: str | None = EOT) -> Tokenizer:
    """Return a tokenizer of the library with the two tokens that every model needs.

    Args:
        tokenizer: A tokenizer of the `tokenizers` library; it is changed.
        kind: Kind of the result, see `Tokenizer`.
        eot: Its end-of-text token. One is added if the tokenizer does not have this one.

    Raises:
        ValueError: The ids have gaps, so that the mask cannot have the id after all others.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = tokenizer.get_vocab(with_added_tokens=True)
    missing = [] if eot in known else [EOT]
    missing += [] if MASK in known else [MASK]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in missing]
    )
    document = tokenizer.to_str()
    if len(set(tokenizer.get_vocab(with_added_tokens=True).values())) < len(known) + len(missing):
        raise ValueError(
            "the tokenizer's ids have gaps, so there is no free id for the mask after them; use "
            "another tokenizer"
        )
    return Tokenizer(document, kind, eot if eot is not None and eot in known else EOT)


def require_same_tokenizer(data: Tokenizer, model: Tokenizer) -> None:
    """Raise ValueError if data was tokenized with another tokenizer than the model's."""
    if data.fingerprint != model.fingerprint:
        raise ValueError(
            f"the data's tokenizer ({_describe(data)}) is not the model's ({_describe(model)}); "
            "prepare the data again with the model's folder as its tokenizer, or train a new model"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's `tokenizer_config.json`; empty if there is none."""
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
