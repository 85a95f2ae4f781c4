"""What a token is called in the answers of OpenAI's and llama.cpp's protocols."""

from functools import cached_property

from tracformer.generation.language import LanguageModel
from tracformer.generation.spelling import bytes_of


class Names:
    """Token id to its text; bytes that are no text by themselves are named `bytes:\\xe2\\x82`, as OpenAI does."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm

    def __getitem__(self, token_id: int) -> str:
        text = self.lm.spelling.token(token_id)
        raw = self.raw(token_id) if "\ufffd" in text else b""
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if raw else text

    def raw(self, token_id: int) -> bytes:
        """Its own bytes; none where only the tokeniser knows them."""
        text = self.lm.spelling.token(token_id)
        if "\ufffd" not in text:
            return text.encode()
        if self.lm.tokenizer.kind == "byte":
            return bytes([token_id])
        byte = self.lm.tokenizer.bytes_of_ids.get(token_id)
        return self._spelt[token_id] if byte is None else bytes([byte])

    @cached_property
    def _spelt(self) -> list[bytes]:
        return bytes_of(self.lm.tokenizer.tokens())
