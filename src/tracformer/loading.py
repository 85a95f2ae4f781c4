"""Load a model and its tokeniser from a folder, by the name of a bundled model, or by an id of the
Hugging Face hub.
"""

import re
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from tracformer import bundled, native
from tracformer.baselines import load_model
from tracformer.data.make_tokenizer import load_tokenizer
from tracformer.data.tokenizer import Tokenizer
from tracformer.devices import pick_device
from tracformer.files import optional_package
from tracformer.model import storage
from tracformer.model.base import ConditionalModel

# where a run keeps its models: the best on validation data, and the last
PLACES = ("best", "model")
GPT2_TOKENIZER, GPT2_TOKENS = "openai-community/gpt2", 50257
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(where: str | PathLike[str]) -> Path:
    """The folder of a model: the one named, the best or last model of the run it holds, a bundled
    one, or a download from the hub.
    """
    path = Path(where)
    if path.is_dir():
        for folder in (path, *(path / place for place in PLACES)):
            if (folder / storage.CONFIG_FILE).is_file():
                return folder
    if (inside := bundled.folder(str(where))) is not None:  # whatever else is called so here
        return inside
    if not path.exists():
        # A slip in a folder's name also looks like an id of the hub; where the first part is a
        # folder here, it is a slip.
        if HUB_ID.fullmatch(str(where)) and not path.parent.is_dir():
            return _download(str(where))
        raise FileNotFoundError(
            f"{where} does not exist; give a model's folder, a run's folder, the name of a bundled "
            "model "
            f"({', '.join(bundled.names())}), or an id OWNER/NAME of the Hugging Face hub"
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
    **options: Any,
) -> tuple[ConditionalModel, Tokenizer]:
    """Whatever the folder's `config.json` says it holds, and the tokeniser beside it
    unless another is named.
    """
    options |= {
        "device": pick_device(device) if isinstance(device, str) else device,
        "dtype": dtype,
    }
    document = storage.load_document(folder)
    if "tracformer" in (document.get("model_type"), document.get("backbone")):
        # nothing is compiled to answer a question
        options["attention"] = "native" if native.ready() else "blocked"
    model = load_model(folder, **options)
    spelled = load_tokenizer(tokenizer_of(folder, model) if tokenizer is None else tokenizer)
    require_fit(model, spelled, folder)
    return model, spelled


def tokenizer_of(folder: Path, model: ConditionalModel) -> str | Path:
    """The folder; or GPT-2's on the hub, where published weights of its vocabulary
    come without one.
    """
    alone = not any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    )
    return GPT2_TOKENIZER if alone and model.config.vocab_size == GPT2_TOKENS else folder


def require_fit(model: ConditionalModel, tokenizer: Tokenizer, folder: Path | None = None) -> None:
    """Raise a ValueError unless the tokeniser has as many tokens as the model; `folder` is where
    the model was read from.
    """
    if tokenizer.vocab_size != model.config.vocab_size:
        source = f" of {folder}" if folder else ""
        raise ValueError(
            f"the tokeniser has {tokenizer.vocab_size} tokens and the model{source} "
            f"{model.config.vocab_size}; they do not belong "
            "together: use the tokeniser that the model was trained with"
        )


def _download(name: str) -> Path:
    hub = optional_package(
        "huggingface_hub",
        f"{name!r} is no folder here; downloading it from the Hugging Face hub",
        "hub",
    )
    try:
        folder = Path(
            hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt"])
        )
        # a pickle, which is read only as far as it holds tensors
        if not any(folder.glob("*.safetensors")):
            folder = Path(
                hub.snapshot_download(name, allow_patterns=["*.json", "*.txt", "pytorch_model.bin"])
            )
    except Exception as error:  # many kinds: no network, no such id, no access
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FileNotFoundError(
            f"{name} is no folder here, and the Hugging Face hub gave none: {first}"
        ) from error
    return find_folder(folder)
