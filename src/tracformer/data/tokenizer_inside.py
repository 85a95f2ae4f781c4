"""Text that does not begin a document, for tokenisers that put a space before every text.

SentencePiece's tokenisers spell a word with the space before it, the first word of a text too: that space is put there when a text is
read and hidden when it is written. Right for a document, wrong for a piece from the middle of one. Here the parts of a `tokenizer.json`
that do so are undone.
"""

import json
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend


class Inside(NamedTuple):
    """Two tokenisers that share their tokens."""

    backend: Backend  # puts no space, hides no space
    whole: Backend  # for what begins with white space, where that is dropped and every word given a space; else the same as `backend`

    def encode(self, text: str) -> list[int]:
        space = (i for i, character in enumerate(text) if character.isspace())
        first = len(text) if self.whole is self.backend else next(space, len(text))
        return [i for backend, part in ((self.backend, text[:first]), (self.whole, text[first:])) if part for i in _ids(backend, part)]


def inside_of(document: str) -> Inside | None:
    """None where a text is read and written in the same way wherever it stands."""
    parts = json.loads(document)
    changed = {name: unspaced(parts.get(name)) for name in ("normalizer", "pre_tokenizer", "decoder")}
    if all(changed[name] == parts.get(name) for name in changed if not (name == "decoder" and has_part(parts[name], "ByteLevel"))):
        return None
    backend, plain = (Backend.from_str(json.dumps({**parts, **each})) for each in (changed, {}))
    for each in (backend, plain):
        each.encode_special_tokens = True
    word = next((text for i in range(plain.get_vocab_size()) if (text := plain.decode([i])).isalpha() and _ids(plain, text)), "")
    behind = _ids(plain, f"{word} {word}")[len(_ids(plain, word)) :]  # how a word is spelt behind another
    return Inside(backend, backend if _ids(backend, f" {word}") == behind else plain)


def unspaced(part: Any) -> Any:
    """A part of a `tokenizer.json` that puts no space before a text or hides none; None where nothing is left of it."""
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
    return {**part, "add_prefix_space": False} if kind == "ByteLevel" and part.get("add_prefix_space") else part


def has_part(part: Any, kind: str) -> bool:
    """Is this, or one of its parts, of that kind?"""
    if not isinstance(part, dict):
        return False
    return part.get("type") == kind or any(has_part(each, kind) for value in part.values() if isinstance(value, list) for each in value)


def _ids(backend: Backend, text: str) -> list[int]:
    try:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the library raises bare Exception, for instance for a word without an unknown token
        raise ValueError(f"the tokeniser cannot encode this text: {error}") from error
    return ids
