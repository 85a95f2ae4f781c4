"""How many bytes of text a token stands for: what makes bits per byte comparable between tokenisers."""

import json
from functools import lru_cache

from tracformer.data.tokenizer import Tokenizer, is_byte_level
from tracformer.generation.spelling import bytes_of


@lru_cache(maxsize=8)
def spelled_bytes(tokenizer: Tokenizer) -> list[bytes] | None:
    """Each real token's own bytes, none for end of text and other special tokens; None where tokens do not spell bytes one for one."""
    document = json.loads(tokenizer.document)
    if tokenizer.kind == "char":
        table = [token.encode() for token in tokenizer.tokens()]
    elif is_byte_level(document.get("decoder")):
        table = bytes_of(tokenizer.tokens())
    else:
        return None
    special = {int(token["id"]) for token in document.get("added_tokens") or [] if token.get("special")}
    return [b"" if i in special or i == tokenizer.eot_id else token for i, token in enumerate(table)]
