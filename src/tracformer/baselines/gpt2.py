"""GPT-2, GPT-2 that fills in the middle, and published GPT-2 weights.

**GPT-2** (`GPT2`): left to right, p(x_t | bos, x_<t). Tokens after a blank are not seen.

The network is `GPT2Model` of `transformers`, whose head is the embedding. The first token is
predicted too: the network reads `bos_id`, GPT-2's <|endoftext|>, before the text. The last token is
never read, so `max_length` positions suffice. `from_pretrained` also reads a folder that
`transformers` wrote, such as the published `gpt2` (`published_config`, `published_weights`).

**Fill in the middle** (`GPT2Fim`): the text is reordered, so that a left-to-right model sees what
follows a blank.

A hole is a maximal run of targets. The network reads the given text with one marker in the place of
each hole, whatever its length, and then the contents of the holes in order, each after an opener:

    text      a b _ _ e f _ h        (targets c d, g)
    reading   bos a b HOLE e f HOLE h  OPEN c d  OPEN g

This gives p(x_t | x_C, x_<t) for targets, and the chain rule gives a joint. For one hole it is
prefix-suffix-middle with the marker between prefix and suffix. Two choices were made:

- The lengths of the holes are known to the question, as for every other system: only real tokens
  are predicted and normalised over, neither an opener nor an end. Among the fillings of these
  lengths it is an exact joint. But the network does not read the lengths: while it fills a hole it
  does not know where the hole ends.
- Positions count along the reading. A text of n tokens with h holes takes n + 2h of them (the last
  token is never read), and there are max_length + 2 max_holes. By default that suffices for every
  pattern; but positions that training never reached are untrained, so train with as many holes as
  generation needs.

Mode `ar` is plain GPT-2, without markers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tracformer.baselines.pickle_reader import PICKLE_FILE, read_pickle
from tracformer.baselines.transformer import (
    TransformerConfig,
    TransformersModel,
    pick,
    shifted_right,
    size_presets,
    start_positions,
    transformers_for,
)
from tracformer.model import storage
from tracformer.model.base import EXACT
from tracformer.model.batch import Batch

PRESETS = size_presets((12, 12, 768), (7, 4, 128, 0.05), (8, 3, 144, 0.05), (9, 4, 256, 0.04))


@dataclass(frozen=True)
class GPT2Config(TransformerConfig):
    """Shape of a `GPT2`."""

    model_type = "gpt2"
    possible_modes: ClassVar[tuple[str, ...]] = ("ar",)
    presets = PRESETS

    # Read before the text. -1: the last token, which is the end of text of GPT-2 and of our own
    # tokenizers.
    bos_id: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bos_id == -1:
            object.__setattr__(self, "bos_id", self.vocab_size - 1)
        if not isinstance(self.bos_id, int) or not 0 <= self.bos_id < self.vocab_size:
            raise ValueError(
                f"bos_id is {self.bos_id!r}; it must lie in 0..{self.vocab_size - 1} (vocab_size "
                f"{self.vocab_size})"
            )

    @property
    def rows(self) -> int:
        """The number of rows of the embedding; there is none for the mask, which is never read."""
        return self.vocab_size

    @property
    def positions(self) -> int:
        """The number of rows of the table of positions."""
        return self.max_length


class GPT2(TransformersModel):
    """GPT-2: p(x_t | bos, x_<t)."""

    config: GPT2Config
    config_class = GPT2Config
    answers = {"ar": EXACT}  # noqa: RUF012
    limits = {"ar": "does not see the text after a blank"}  # noqa: RUF012

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.network = gpt2_network(config, config.rows, config.positions)

    @property
    def head(self) -> Tensor:
        table: Tensor = self.network.wte.weight
        return table[: self.config.vocab_size]

    def blocks(self) -> list[nn.Module]:
        return list(self.network.h)

    def embedding_tables(self) -> list[Tensor]:
        return [self.network.wte.weight, self.network.wpe.weight]

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        return pick(self.read(shifted_right(batch.tokens, self.config.bos_id)), wanted)

    def read(self, ids: Tensor) -> Tensor:
        """Return features (B, T, d) of ids (B, T).

        Each position sees itself and those before it, so padding on the right has no effect.
        """
        features: Tensor = self.network(input_ids=ids, use_cache=False).last_hidden_state
        return features

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        document: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        document = storage.load_document(folder) if document is None else document
        if document.get("model_type") != cls.config_class.model_type or not is_published(document):
            return super().from_pretrained(
                folder, dtype=dtype, device=device, document=document, **options
            )
        path = Path(folder) / storage.CONFIG_FILE
        model = cls(published_config(path, document), **options)
        expected = {
            name: tuple(tensor.shape) for name, tensor in model.network.state_dict().items()
        }
        weights = published_weights(folder, expected)
        model.to(device, dtype).network.load_state_dict(weights)
        return model.eval()


def gpt2_network(config: TransformerConfig, rows: int, positions: int) -> Any:
    """Return a `GPT2Model` of the configured shape.

    Args:
        config: Layers, heads, width, dropout and initial weights.
        rows: Number of rows of the embedding.
        positions: Number of rows of the table of positions.
    """
    transformers = transformers_for(config.model_type)
    network = transformers.GPT2Model(
        transformers.GPT2Config(
            vocab_size=rows,
            n_positions=positions,
            n_embd=config.d_model,
            n_layer=config.n_layer,
            n_head=config.n_head,
            activation_function="gelu_pytorch_tanh",  # the function of "gelu_new" in one operation
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            initializer_range=config.init_std,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    )
    start_positions(config, network.wpe.weight)
    return network


# ---- published weights

PUBLISHED_KEYS = ("n_embd", "n_positions", "n_ctx")  # of transformers' configuration, not of ours
SIZES = ("vocab_size", "n_embd", "n_layer", "n_head")
# What our network computes; a file that leaves a key out means the same.
FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
# The causal mask, which older files hold as a buffer.
CAUSAL_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")


def is_published(document: Mapping[str, Any]) -> bool:
    """Return whether `transformers` wrote this `config.json`; both say `model_type: gpt2`."""
    return any(key in document for key in PUBLISHED_KEYS)


def published_config(path: Path, document: Mapping[str, Any]) -> GPT2Config:
    """Return the configuration of a GPT-2 folder that `transformers` wrote.

    Args:
        path: The `config.json`, for messages.
        document: Its content.

    Raises:
        ValueError: A size is not a positive integer, or an option makes the network compute
            something else than this one.
    """
    positions: Any = document.get("n_positions", document.get("n_ctx"))
    sizes = {key: document.get(key) for key in SIZES} | {"n_positions": positions}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path}: {key} is {value!r}; it must be a positive integer")
    for key, value in FIXED.items():
        if document.get(key, value) != value:
            raise ValueError(f"{path}: {key} is {document[key]!r}; only {value!r} is supported")
    if document.get("n_inner") not in (None, 4 * document["n_embd"]):
        raise ValueError(
            f"{path}: n_inner is {document['n_inner']!r}; only 4 * n_embd = "
            f"{4 * document['n_embd']} is supported"
        )
    bos = document.get("bos_token_id")
    return GPT2Config(
        vocab_size=document["vocab_size"],
        max_length=positions,
        n_layer=document["n_layer"],
        n_head=document["n_head"],
        d_model=document["n_embd"],
        dropout=document.get("resid_pdrop", 0.1),
        bos_id=-1 if bos is None else bos,
    )


def published_weights(
    folder: str | PathLike[str], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return the tensors of a `GPT2Model` by its own names.

    Args:
        folder: Folder that `transformers` wrote.
        expected: Shape of each tensor by its name, which the configuration implies.

    Raises:
        FileNotFoundError: The folder holds no weights, or only in several parts.
        ValueError: The file is damaged, or its tensors are not those expected.
    """
    path, tensors = _read_published(Path(folder))
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    head = tensors.pop("lm_head.weight", None)
    table = tensors.get("wte.weight")
    if head is not None and (table is None or not torch.equal(head, table)):
        raise ValueError(
            f"{path}: lm_head.weight differs from wte.weight; only a head tied to the embedding is "
            "supported"
        )
    tensors = {
        name: tensor for name, tensor in tensors.items() if not CAUSAL_BUFFERS.fullmatch(name)
    }
    storage.compare(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    return tensors


def _read_published(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Return the file of weights and its tensors; safetensors are preferred to a pickle."""
    safe, pickled = folder / storage.WEIGHTS_FILE, folder / PICKLE_FILE
    if safe.is_file():
        try:
            return safe, load_file(safe)
        except SafetensorError as error:
            raise ValueError(f"{safe} is damaged or not a safetensors file: {error}") from error
    if not pickled.is_file():
        parts = [
            path.name
            for path in (safe, pickled)
            if path.with_name(f"{path.name}.index.json").is_file()
        ]
        problem = (
            f"its {parts[0]} is split into parts; save it as one file"
            if parts
            else f"there is no {safe.name} or {PICKLE_FILE} in it"
        )
        raise FileNotFoundError(f"{folder} holds no weights: {problem}")
    found = read_pickle(pickled)
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise ValueError(f"{pickled} does not hold tensors by name; get the model as {safe.name}")
    return pickled, found


# ---- fill in the middle


@dataclass(frozen=True)
class GPT2FimConfig(GPT2Config):
    """Shape of a `GPT2Fim`."""

    model_type = "gpt2-fim"
    possible_modes = ("car", "ar")
    presets = PRESETS

    # Number of holes in a text of max_length tokens for which there are positions. -1: the maximum.
    max_holes: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_holes == -1:
            object.__setattr__(self, "max_holes", (self.max_length + 1) // 2)
        self.require_positive("max_holes")

    @property
    def rows(self) -> int:
        return self.vocab_size + 2

    @property
    def positions(self) -> int:
        return self.max_length + 2 * self.max_holes

    @property
    def hole_id(self) -> int:
        """The id of the marker for a hole of any length, which is the mask."""
        return self.mask_id

    @property
    def open_id(self) -> int:
        """The id of the opener before the contents of a hole."""
        return self.vocab_size + 1


class GPT2Fim(GPT2):
    """GPT-2 over reordered text: p(x_t | x_C, x_<t)."""

    config: GPT2FimConfig
    config_class = GPT2FimConfig
    answers = {"car": EXACT, "ar": EXACT}  # noqa: RUF012
    limits = {  # noqa: RUF012
        "car": "does not see the length of a blank while filling it",
        "ar": "does not see the text after a blank",
    }

    def states(self, batch: Batch, mode: str, wanted: Tensor) -> Tensor:
        if mode == "ar":
            return super().states(batch, mode, wanted)
        reading, slots = self.reorder(batch)
        features = self.read(reading)  # (B, S, d)
        row, position = wanted.nonzero(as_tuple=True)
        return features[row, slots[row, position] - 1]

    def reorder(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the readings (B, S), padded on the right, and the slot (B, T) of each target.

        The slot before a target's predicts it.
        """
        target = batch.targets()
        start = target & ~torch.nn.functional.pad(target[:, :-1], (1, 0))  # of a hole
        # The first part holds the given tokens, and one marker per hole.
        kept = start | batch.given()
        holes, targets = start.sum(1), target.sum(1)  # (B,)
        needed = batch.lengths + 2 * holes
        if int(needed.max()) > self.config.positions:
            worst = int(needed.argmax())
            raise ValueError(
                f"a text of {int(batch.lengths[worst])} tokens with {int(holes[worst])} holes "
                f"takes {int(needed[worst])} positions; this model has {self.config.positions} "
                f"(max_length {self.config.max_length} + 2 max_holes {self.config.max_holes})"
            )
        # (B, 1) the slot of the first opener, after bos and the first part
        first = 1 + kept.sum(1, keepdim=True)
        hole = start.cumsum(1)  # counts from 1
        slots = first + hole + target.cumsum(1) - 1  # after that many openers and contents
        reading = batch.tokens.new_zeros(len(batch), int((first[:, 0] + holes + targets).max()))
        reading[:, 0] = self.config.bos_id
        for places, at, what in (
            (kept, kept.cumsum(1), batch.tokens.masked_fill(start, self.config.hole_id)),
            (start, slots - 1, torch.full_like(batch.tokens, self.config.open_id)),
            (target, slots, batch.tokens),
        ):
            row, position = places.nonzero(as_tuple=True)
            reading[row, at[row, position]] = what[row, position]
        return reading[:, :-1], slots  # the last token predicts nothing
