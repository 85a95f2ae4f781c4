"""A small model of text."""

from typing import Any

from tests.helpers import small_model
from tracformer import LanguageModel
from tracformer.data import Tokenizer

WORDS = ["the cat sat on the mat", "a dog and a cat", "once upon a time there was a cat", "the dog sat"] * 5
TEXT = "the cat [[3]] the [[2]] mat"


def make(tokenizer: Tokenizer, **changes: Any) -> LanguageModel:
    return LanguageModel(small_model(vocab_size=tokenizer.vocab_size, max_length=32, n_layer=5, **changes), tokenizer)
