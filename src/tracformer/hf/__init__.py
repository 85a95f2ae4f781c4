"""Tracformer on the Hugging Face side: import this, and `AutoConfig`, `AutoModel` and `AutoModelForMaskedLM` know "tracformer".

The folder is the core's own: the same `config.json`, the same tensor names in `model.safetensors`. Either side reads what the other wrote.
"""

from tracformer.files import optional_package
from tracformer.hf.card import model_card, write_model_card
from tracformer.hf.config import TracformerPretrainedConfig
from tracformer.hf.hub import push_folder
from tracformer.hf.model import TracformerForMaskedLM, TracformerModel

__all__ = ["TracformerForMaskedLM", "TracformerModel", "TracformerPretrainedConfig", "model_card", "push_folder", "write_model_card"]

_transformers = optional_package("transformers", "tracformer.hf", "hf")
_transformers.AutoConfig.register(TracformerPretrainedConfig.model_type, TracformerPretrainedConfig, exist_ok=True)
_transformers.AutoModel.register(TracformerPretrainedConfig, TracformerModel, exist_ok=True)
_transformers.AutoModelForMaskedLM.register(TracformerPretrainedConfig, TracformerForMaskedLM, exist_ok=True)
