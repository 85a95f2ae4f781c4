"""The model as `GET /v1/models` tells of it: OpenAI's fields, then what the page needs to know."""

from typing import Any

from tracformer.generation.language import LanguageModel

KINDS = {"char": "characters", "byte": "bytes"}  # all others cut text into pieces of words


def describe(lm: LanguageModel, name: str, created: int = 0) -> dict[str, Any]:
    kind = KINDS.get(lm.tokenizer.kind, "bpe")
    letters = (token for i, token in enumerate(lm.tokenizer.tokens()) if i not in lm.spelling.special)
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tracformer",
        "max_length": lm.model.config.max_length,
        "modes": list(lm.model.config.modes),
        "tokenizer": kind,
        "alphabet": "".join(letters) if kind == "characters" else None,
        "parameters": lm.model.num_parameters(),
        "default": True,
    }
