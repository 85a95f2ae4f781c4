"""GPT-2 folders in the layout of `transformers`, such as the published `gpt2`: their `config.json` and weights, as our system reads them.

Their configuration and ours both say `model_type: gpt2`. Theirs has `n_embd` and `n_positions`, ours never; that tells them apart.
Whatever would make the network another function than ours is refused with its reason.
"""

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tracformer.model import storage
from tracformer.peers.pickled import read_pickle

PICKLE_FILE = "pytorch_model.bin"
THEIR_KEYS = ("n_embd", "n_positions", "n_ctx")
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
CAUSAL_BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # the causal mask, which older files carry along


def is_published(document: Mapping[str, Any]) -> bool:
    """Is this the `config.json` of a GPT-2 that `transformers` wrote, and not of our own folder?"""
    return document.get("model_type") == "gpt2" and any(key in document for key in THEIR_KEYS)


def published_config(folder: str | PathLike[str], vocab_size: int | None = None) -> dict[str, Any]:
    """The fields of our `GPT2Config`. `vocab_size`, where given, is what a tokeniser calls for."""
    document, path = storage.load_document(folder), Path(folder) / storage.CONFIG_FILE
    if document.get("model_type") != "gpt2":
        raise ValueError(f"{path} describes a model of type {document.get('model_type')!r}; expected 'gpt2'")
    if not is_published(document):
        raise ValueError(f"{path} has none of the keys {', '.join(THEIR_KEYS)}: it is not a GPT-2 folder that transformers wrote")
    positions = document.get("n_positions", document.get("n_ctx"))
    sizes = {key: document.get(key) for key in SIZES} | {"n_positions": positions}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path}: {key} is {value!r}; it must be a positive integer")
    for key, value in FIXED.items():
        if document.get(key, value) != value:
            raise ValueError(f"{path}: {key} is {document[key]!r}; this system computes GPT-2 with {key} = {value!r} only")
    if document.get("n_inner") not in (None, 4 * document["n_embd"]):
        raise ValueError(f"{path}: n_inner is {document['n_inner']!r}; only 4 * n_embd = {4 * document['n_embd']} is read")
    if vocab_size is not None and document["vocab_size"] != vocab_size:
        raise ValueError(f"{path}: vocab_size is {document['vocab_size']}, but the tokeniser has {vocab_size} tokens")
    bos = document.get("bos_token_id")
    return {
        "vocab_size": document["vocab_size"],
        "max_length": positions,
        "n_layer": document["n_layer"],
        "n_head": document["n_head"],
        "d_model": document["n_embd"],
        "dropout": document.get("resid_pdrop", 0.1),
        "bos_id": -1 if bos is None else bos,
    }


def published_weights(folder: str | PathLike[str], expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of a `GPT2Model` by its own names, checked against the names and shapes that the configuration calls for."""
    path, tensors = _read(Path(folder))
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    head = tensors.pop("lm_head.weight", None)
    table = tensors.get("wte.weight")
    if head is not None and (table is None or not torch.equal(head, table)):
        raise ValueError(f"{path}: lm_head.weight differs from wte.weight; this system's head is the embedding itself")
    tensors = {name: tensor for name, tensor in tensors.items() if not CAUSAL_BUFFERS.fullmatch(name)}
    storage.compare(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
    return tensors


def _read(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    safe, pickled = folder / storage.WEIGHTS_FILE, folder / PICKLE_FILE
    if safe.is_file():
        try:
            return safe, load_file(safe)
        except SafetensorError as error:
            raise ValueError(f"{safe} is damaged or not a safetensors file: {error}") from error
    if not pickled.is_file():
        parts = [path.name for path in (safe, pickled) if path.with_name(f"{path.name}.index.json").is_file()]
        told = f"its {parts[0]} is split into parts; save it as one file" if parts else f"there is no {safe.name} or {PICKLE_FILE} in it"
        raise FileNotFoundError(f"{folder} holds no weights: {told}")
    found = read_pickle(pickled)
    if not isinstance(found, dict) or not all(isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()):
        raise ValueError(f"{pickled} does not hold tensors by name; get the model as {safe.name}")
    return pickled, found
