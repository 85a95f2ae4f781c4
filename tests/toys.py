"""Toy models, tokenizers, sources and random batches.

- `small_model`, `small_baseline`, `small_diffusion`, `small_plaid`: float64 models with large random
  weights, so that no term vanishes; `random_batch`, `random_question`: batches for them.
- `Chain`: a Markov chain over a few letters; `ar` is the chain, `car` its exact conditional.
- `make`: a small random model of text. Tokenizers of several families.
- `chain_source`, `small_source`: letters of hidden Markov chains; `known_subject` is a model that
  answers with their conditionals, `random_mdlm` one whose answers are bounds.
- `on_ranks`: run a function on several ranks, which are threads.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from torch import Tensor, nn

from tracformer import LanguageModel, Tracformer, TracformerConfig
from tracformer.baselines import find_family
from tracformer.baselines.diffusion import DiffusionModel
from tracformer.baselines.mdlm import MDLM, MDLMConfig
from tracformer.baselines.plaid import Plaid, PlaidConfig
from tracformer.data import TextSource, Tokenizer, char_tokenizer
from tracformer.data.prepare import prepare
from tracformer.data.tokenizer import reserve
from tracformer.evaluation.exact_sources import ChainSource, HiddenMarkov, mixing_chain
from tracformer.evaluation.task import Subject
from tracformer.model.base import EXACT, MARGINAL, ConditionalModel, Estimate
from tracformer.model.batch import Batch
from tracformer.model.config import ModelConfig


def small_model(attention: str = "blocked", seed: int = 0, **changes: Any) -> Tracformer:
    """Return a float64 model whose weights, biases and norms are large random numbers.

    Zeros or small numbers could hide errors.
    """
    values = {
        "vocab_size": 7,
        "max_length": 16,
        "n_layer": 4,
        "n_head": 2,
        "d_model": 8,
        "n_max": 3,
        **changes,
    }
    model = Tracformer(TracformerConfig(**values), attention).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.35
            parameter.copy_(1.0 + noise if "norm" in name and name.endswith("weight") else noise)
    return model


def random_batch(
    model: Tracformer, batch: int, length: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, a context with about half given, and lengths of which the first is full."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    context = torch.rand(batch, length, generator=generator) < torch.rand(
        batch, 1, generator=generator
    )
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    lengths[0] = length
    return tokens, context, lengths


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
        """(B, T, V): log p(all that is given after t | x_t = v)."""
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


SMALL = {"vocab_size": 7, "max_length": 12, "n_layer": 2, "n_head": 2, "d_model": 8}

SYSTEM_MODES = [
    ("bart", "car"),
    ("bart norm=pre", "car"),
    ("bert", "ac"),
    ("bert norm=pre", "ac"),
    ("bert-bidir", "ac"),
    ("bert-bidir separate=True", "ac"),
    ("gpt2", "ar"),
    ("gpt2-fim", "car"),
    ("gpt2-fim", "ar"),
    ("bart-modern", "car"),
    ("bart-modern neighbours=1", "car"),
    ("bert-modern", "ac"),
    ("bert-modern neighbours=1", "ac"),
    ("bert-bidir-modern", "ac"),
    ("ac-gpt", "car"),
    ("ac-gpt neighbours=1", "car"),
    ("ac-gpt", "ar"),
    ("as-arm", "car"),
    ("as-arm neighbours=1", "car"),
    ("as-arm", "ac"),
    ("as-arm neighbours=1", "ac"),
    ("sigma-gpt", "car"),
    ("sigma-gpt", "ac"),
    ("compact", "car"),
    ("compact", "ac"),
    ("compact", "ar"),
    ("compact neighbours=0", "car"),
    ("compact n_layer=3 neighbours=2 window=3", "car"),
    ("compact n_layer=3 neighbours=2 window=3", "ac"),
    ("aligned n_encoder=2", "car"),
    ("aligned n_encoder=2", "ac"),
    ("aligned n_encoder=2", "ar"),
]

FAMILIES = ["bart", "bert", "bert-bidir", "gpt2", "gpt2-fim"]  # built on `transformers`

# this package's blocks
OWN = [
    "bart-modern",
    "bert-modern",
    "bert-bidir-modern",
    "ac-gpt",
    "as-arm",
    "sigma-gpt",
    "compact",
    "aligned",
]

UNTIED = [("bart", "car"), ("bert", "ac"), ("bert-bidir", "ac")]


def small_baseline(family: str, seed: int = 0, **changes: Any) -> ConditionalModel:
    """Return a small model with large random weights.

    Args:
        family: Name of a system, with settings if any: "bart norm=pre".
        seed: Seed of the weights.
        **changes: Further settings.
    """
    name, *settings = family.split()
    kind = find_family(name).model_class
    values = {
        key: yaml.safe_load(value) for key, value in (setting.split("=") for setting in settings)
    }
    model = kind(kind.config_class(**{**SMALL, **values, **changes})).double().eval()
    return with_random_weights(model, seed)


def with_random_weights(model: Any, seed: int, kept: str = "") -> Any:
    """Give a model large random weights, norms around one; the parameter `kept` is not changed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4
            if name != kept:
                parameter.copy_(1.0 + noise if bool((parameter == 1).all()) else noise)
    return model


def random_question(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, a context with about half the tokens given, and lengths.

    Every row has a target; the first has the full length.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SMALL["vocab_size"], (batch, length), generator=generator)
    context = torch.rand(batch, length, generator=generator) < 0.5
    lengths = torch.randint(2, length + 1, (batch,), generator=generator)
    lengths[0] = length
    context[torch.arange(batch), lengths // 2] = False
    return tokens, context, lengths


SYSTEMS = ("mdlm", "sedd", "d3pm")

TRACFORMER = {"backbone": "tracformer", "n_layer": 4, "n_max": 3}

DIFFUSION_MODES = [
    *((f"{system} d_condition=6", "ac") for system in SYSTEMS),
    ("mdlm " + " ".join(f"{key}={value}" for key, value in TRACFORMER.items()), "ac"),
]


def small_diffusion(system: str, seed: int = 0, **changes: Any) -> DiffusionModel:
    """Return a float64 diffusion model with large random weights."""
    model = small_baseline(f"{system} d_condition=6", seed, **changes)
    assert isinstance(model, DiffusionModel)
    return model


PLAID_SHAPE = {**SMALL, "d_condition": 6, "d_embedding": 3}


def small_plaid(seed: int = 0, **changes: Any) -> Plaid:
    """Return a float64 PLAID with large random weights.

    The schedule's ends stay in order.
    """
    model = Plaid(PlaidConfig(**{**PLAID_SHAPE, **changes})).double().eval()
    return with_random_weights(model, seed, kept="schedule.bounds")


LETTERS = "abcde"
SMALL_LETTERS, SMALL_LENGTH = "ABCDE", 5


class KnownConfig(ModelConfig):
    model_type = "known"
    possible_modes = ("car", "ac", "ar")
    presets = {}  # noqa: RUF012


class Known(ConditionalModel):
    """Answers with the conditionals of a chain; end of text, the last id, never occurs."""

    config_class = KnownConfig
    answers = {"car": EXACT, "ac": MARGINAL, "ar": EXACT}  # noqa: RUF012

    def __init__(self, source: ChainSource, max_length: int = 64) -> None:
        super().__init__()
        self.source = source
        self.config = KnownConfig(vocab_size=source.symbols + 1, max_length=max_length)
        self.scale = nn.Parameter(torch.eye(source.symbols + 1, dtype=torch.float64))
        self.batches: list[int] = []  # the size of every batch

    @property
    def head(self) -> Tensor:
        return self.scale

    def blocks(self) -> list[nn.Module]:
        return []

    def embedding_tables(self) -> list[Tensor]:
        return []

    def hidden(self, batch: Batch, mode: str, wanted: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def estimate(  # type: ignore[override]
        self, batch: Batch, mode: str = "car", **rest: object
    ) -> Estimate:
        self.batches.append(len(batch))
        x, given = batch.tokens.numpy(), batch.context.numpy()
        known = {"car": np.ones_like(given), "ac": given, "ar": np.ones_like(given)}[mode]
        after = np.zeros_like(given) if mode == "ar" else given
        logs = self.source.log_conditionals(x, known, after)
        log_probs = np.take_along_axis(logs, x[..., None], 2)[..., 0]
        return Estimate(torch.from_numpy(np.where(given, 0.0, log_probs)), None)


def chain_source(length: int = 20) -> ChainSource:
    chain = HiddenMarkov.random(states=4, symbols=len(LETTERS), seed=3)
    return ChainSource("letters", length, chain)


def chain_tokenizer() -> Tokenizer:
    return char_tokenizer(LETTERS)


def write_lines(path: Path, count: int, length: int, seed: int = 0) -> np.ndarray:
    """Write samples of the source, one on each line; return the tokens."""
    tokens = chain_source(length).sample(count, np.random.default_rng(seed))
    path.write_text("".join("".join(LETTERS[i] for i in row) + "\n" for row in tokens))
    return tokens


def known_subject(mode: str = "car", **changes: object) -> Subject:
    model = Known(chain_source())
    return Subject(model, chain_tokenizer(), "truth", mode, **changes)  # type: ignore[arg-type]


def small_source() -> ChainSource:
    return ChainSource("small", SMALL_LENGTH, mixing_chain(4, len(SMALL_LETTERS), 0, 0.3))


def small_tokenizer() -> Tokenizer:
    return char_tokenizer(SMALL_LETTERS)


def write_prepared(folder: Path, sequences: int) -> Path:
    """Write a prepared folder whose documents are sequences of `small_source`."""
    tokens = small_source().sample(sequences, np.random.default_rng(0))
    texts = ["".join(SMALL_LETTERS[i] for i in row) for row in tokens.tolist()]
    prepare(folder / "data", {"validation": TextSource(texts)}, small_tokenizer(), quiet=True)
    return folder / "data"


def random_mdlm(vocab_size: int = 6, max_length: int = 16, std: float = 0.5) -> MDLM:
    """Return a small MDLM in float64 with normal random weights."""
    shape = {"n_layer": 1, "n_head": 2, "d_model": 8, "d_condition": 4}
    torch.manual_seed(0)
    config = MDLMConfig(vocab_size=vocab_size, max_length=max_length, **shape)
    model = MDLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model


Found = TypeVar("Found")


class ThreadRanks:
    """What tasks use of `Ranks`, with sums over threads."""

    def __init__(self, rank: int, barrier: Barrier, board: dict[int, list[float]]) -> None:
        self.rank, self.world, self.device = rank, barrier.parties, torch.device("cpu")
        self._barrier, self._board = barrier, board

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, values: list[float]) -> list[float]:
        self._board[self.rank] = values
        self._barrier.wait(60)
        summed = [sum(each) for each in zip(*self._board.values(), strict=True)]
        self._barrier.wait(60)
        return summed

    def barrier(self) -> None:
        self._barrier.wait(60)


def on_ranks(world: int, work: Callable[[Any], Found]) -> list[Found]:
    """Return work(ranks) of every rank; they run at once."""
    barrier, board = Barrier(world), dict[int, list[float]]()
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: work(ThreadRanks(rank, barrier, board)), range(world)))
