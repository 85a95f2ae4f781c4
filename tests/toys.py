"""Toy models and tokenizers whose answers are known.

- `Chain`: a Markov chain over a few letters; `ar` is the chain, `car` its exact conditional.
- `make`: a small random model of text. Tokenizers of several families.
"""

from itertools import product
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from torch import Tensor, nn

from tests.helpers import small_model
from tracformer import LanguageModel
from tracformer.data import Tokenizer
from tracformer.data.tokenizer import reserve
from tracformer.model.base import EXACT, ConditionalModel
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig


class ChainConfig(ModelConfig):
    model_type = "chain"
    possible_modes = ("car", "ar")
    presets = {}  # noqa: RUF012


class Chain(ConditionalModel):
    config_class = ChainConfig
    answers = {"car": EXACT, "ar": EXACT}  # noqa: RUF012

    def __init__(
        self, letters: int = 3, max_length: int = 12, distortion: float = 0.0, seed: int = 0
    ) -> None:
        """The last token is end of text; after it the chain starts anew.

        `distortion`: how far `car` is from the truth.
        """
        super().__init__()
        V = letters + 1
        self.config = ChainConfig(vocab_size=V, max_length=max_length)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(V, V, generator=generator, dtype=torch.float64)
        logits[-1, -1] = -3.0  # few empty documents
        self.steps = logits.log_softmax(1)  # (V, V): log p(next | token)
        self.skew = distortion * torch.randn(V, generator=generator, dtype=torch.float64)
        self.scale = nn.Parameter(torch.eye(V, dtype=torch.float64))

    @property
    def head(self) -> Tensor:
        return self.scale

    def blocks(self) -> list[nn.Module]:
        return []

    def embedding_tables(self) -> list[Tensor]:
        return []

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        tokens, context, lengths = batch.tokens, batch.context, batch.lengths
        before = torch.cat((torch.full_like(tokens[:, :1], len(self.steps) - 1), tokens[:, :-1]), 1)
        logits = self.steps[before]  # (B, T, V): the chain starts as after an end of text
        if mode == "car":
            logits = (logits + self._ahead(tokens, context, lengths)).log_softmax(-1) + self.skew
        rows = wanted.flatten().nonzero()[:, 0]
        return logits.flatten(0, 1)[rows], rows

    def _ahead(self, tokens: Tensor, context: Tensor, lengths: Tensor) -> Tensor:
        """(B, T, V): log p(all that is given behind t | x_t = v)."""
        B, T = tokens.shape
        V = len(self.steps)
        ahead = torch.zeros(B, T, V, dtype=torch.float64)
        for t in range(T - 2, -1, -1):
            # log 1 or log 0: which x_{t+1} agree with what is given
            fits = torch.zeros(B, V, dtype=torch.float64)
            known = context[:, t + 1]
            fits[known] = -torch.inf
            fits[known, tokens[known, t + 1]] = 0.0
            message = (self.steps + (fits + ahead[:, t + 1])[:, None, :]).logsumexp(-1)
            ahead[:, t] = message * (t + 1 < lengths)[:, None]
        return ahead

    def log_mass(self, tokens: list[int], context: list[bool], letters: int | None = None) -> float:
        """log of the sum of p(text) over all ways to fill what is not given, with the first
        `letters` tokens (None: all).
        """
        allowed = range(self.config.vocab_size if letters is None else letters)
        holes = [i for i, given in enumerate(context) if not given]
        rows = torch.tensor([tokens] * len(allowed) ** len(holes))
        rows[:, holes] = torch.tensor(list(product(allowed, repeat=len(holes))), dtype=rows.dtype)
        before = torch.cat((torch.full_like(rows[:, :1], len(self.steps) - 1), rows[:, :-1]), 1)
        return float(self.steps[before, rows].sum(1).logsumexp(0))


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
    """Words without spaces or capitals; the continuation of a word is marked."""
    backend = Backend(
        models.WordPiece(vocab={"[UNK]": 0, "the": 1, "cat": 2, "##s": 3}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return reserve(backend, "hf")
