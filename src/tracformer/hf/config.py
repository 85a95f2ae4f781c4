"""The configuration as transformers wants it: the core's fields and checks, beside the keys that transformers keeps for itself."""

import dataclasses
from typing import Any

from tracformer.files import optional_package
from tracformer.model.config import TracformerConfig
from tracformer.model.storage import FOREIGN_KEYS
from tracformer.renames import present_names

transformers = optional_package("transformers", "tracformer.hf", "hf")

FIELDS = tuple(field.name for field in dataclasses.fields(TracformerConfig))
# What PreTrainedConfig takes beside its own dataclass fields.
OPTIONS = {"attn_implementation", "experts_implementation", "name_or_path", "num_labels", "output_attentions", "quantization_config"}


class TracformerPretrainedConfig(transformers.PreTrainedConfig):  # type: ignore[misc, name-defined]
    """Takes every field of `TracformerConfig`, by its name there or by transformers' usual one; refuses a key that neither side knows."""

    model_type = TracformerConfig.model_type
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "max_length",
    }
    max_length: int = TracformerConfig.max_length  # declared, since transformers takes an undeclared `max_length` for one of `generate`

    def __init__(self, **values: Any) -> None:
        values = {self.attribute_map.get(key, key): value for key, value in values.items()}
        values = present_names(values, TracformerConfig.old_config_keys)
        named = values.pop("model_type", self.model_type)
        if named != self.model_type:
            raise ValueError(f"model_type is {named!r}; expected {self.model_type!r}")
        foreign = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)} | FOREIGN_KEYS | OPTIONS
        core = TracformerConfig.from_dict({key: value for key, value in values.items() if key not in foreign and not key.startswith("_")})
        for key, value in core.to_dict().items():
            setattr(self, key, value)
        super().__init__(**{key: value for key, value in values.items() if key not in FIELDS})

    @classmethod
    def from_core(cls, config: TracformerConfig) -> "TracformerPretrainedConfig":
        return cls(**config.to_dict())

    def to_core(self) -> TracformerConfig:
        """The core's configuration, checked anew: transformers lets anyone set an attribute."""
        return TracformerConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> "TracformerPretrainedConfig":
        """Itself: transformers would take our fields `encoder` and `decoder`, which are words, for configurations inside this one."""
        return self

    @property
    def mask_id(self) -> int:
        """The mask token's id, right behind the vocabulary."""
        return int(self.vocab_size)
