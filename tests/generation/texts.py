"""A small model of text."""

from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tests.helpers import small_model
from tracformer import LanguageModel
from tracformer.data import Tokenizer
from tracformer.data.tokenizer import reserve

WORDS = [
    "the cat sat on the mat",
    "a dog and a cat",
    "once upon a time there was a cat",
    "the dog sat",
] * 5
TEXT = "the cat [[3]] the [[2]] mat"


def make(tokenizer: Tokenizer, **changes: Any) -> LanguageModel:
    return LanguageModel(
        small_model(vocab_size=tokenizer.vocab_size, max_length=32, n_layer=5, **changes), tokenizer
    )


def metaspace_tokenizer() -> Tokenizer:
    """Words with the space before them, which the first of a text has too and does not show."""
    letters = [*"▁acehst", "▁t", "▁th", "▁the", "▁c", "▁ca", "▁cat"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t")]
    backend = Backend(
        models.BPE(vocab={token: i for i, token in enumerate(letters)}, merges=merges)
    )
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return reserve(backend, "hf")


def llama_tokenizer() -> Tokenizer:
    """The same with the space put before the text while it is normalised, as Llama
    and Mistral have it.
    """
    backend = Backend.from_str(metaspace_tokenizer().document)
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend.to_str(), "hf")


def fallback_tokenizer() -> Tokenizer:
    """Llama's, with a token for every byte, for characters that have none."""
    letters = [*"▁acehst", "▁t", "▁th", "▁the", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    backend = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(letters)}, merges=merges, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return reserve(backend, "hf")


def t5_tokenizer() -> Tokenizer:
    """The same with words that are cut at spaces and get one each, as T5 has it."""
    backend = Backend.from_str(metaspace_tokenizer().document)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    return Tokenizer(backend.to_str(), "hf")


def wordpiece_tokenizer() -> Tokenizer:
    """Words without spaces or capitals; what goes on with a word is marked."""
    backend = Backend(
        models.WordPiece(vocab={"[UNK]": 0, "the": 1, "cat": 2, "##s": 3}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return reserve(backend, "hf")
