"""Tracformer as `transformers` classes.

Importing this module makes "tracformer" known to `AutoConfig`, `AutoModel` and
`AutoModelForMaskedLM`. A folder is the same on both sides: the same `config.json`, the same tensor
names in `model.safetensors`.

- `TracformerPretrainedConfig`: the fields and checks of `TracformerConfig`, and the keys of
  transformers.
- `TracformerModel`, `TracformerForMaskedLM`: final states, and logits with a loss.
- `inputs.py`: from transformers' inputs to a `Batch`.

A folder also loads without this library (`model/modeling_tracformer.py`). The classes here are
faster, strict about files, and give the library's own interface as `core`.
"""

import copy
import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.attention import implementations
from tracformer.files import optional_package, remove_checksums, write_checksums
from tracformer.hf.inputs import IGNORED, read_batch
from tracformer.model import Tracformer, likelihood, storage
from tracformer.model.config import TracformerConfig
from tracformer.model.storage import FOREIGN_KEYS
from tracformer.publish import Evaluation, model_card, push_folder, write_model_card
from tracformer.renames import present_names, tensor_patterns

transformers = optional_package("transformers", "tracformer.hf", "hf")
outputs = optional_package("transformers.modeling_outputs", "tracformer.hf", "hf")

FIELDS = tuple(field.name for field in dataclasses.fields(TracformerConfig))
# What PreTrainedConfig accepts beside its own dataclass fields.
OPTIONS = {
    "attn_implementation",
    "experts_implementation",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
}


class TracformerPretrainedConfig(transformers.PreTrainedConfig):  # type: ignore[misc, name-defined]
    """Configuration with every field of `TracformerConfig`.

    Fields may have their usual names in transformers. An unknown key is an error.
    """

    model_type = TracformerConfig.model_type
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "max_length",
    }
    # Declared, since transformers would take an undeclared `max_length` for one of `generate`.
    max_length: int = TracformerConfig.max_length

    def __init__(self, **values: Any) -> None:
        values = {self.attribute_map.get(key, key): value for key, value in values.items()}
        values = present_names(values, TracformerConfig.old_config_keys)
        named = values.pop("model_type", self.model_type)
        if named != self.model_type:
            raise ValueError(f"model_type is {named!r}; expected {self.model_type!r}")
        foreign = (
            {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
            | FOREIGN_KEYS
            | OPTIONS
        )
        core = TracformerConfig.from_dict(
            {
                key: value
                for key, value in values.items()
                if key not in foreign and not key.startswith("_")
            }
        )
        for key, value in core.to_dict().items():
            setattr(self, key, value)
        super().__init__(**{key: value for key, value in values.items() if key not in FIELDS})

    def to_core(self) -> TracformerConfig:
        """Return the `TracformerConfig`, checked again since attributes can be set."""
        return TracformerConfig.from_dict({name: getattr(self, name) for name in FIELDS})

    def get_text_config(
        self, decoder: Any = None, encoder: Any = None
    ) -> "TracformerPretrainedConfig":
        """Return this configuration.

        transformers would take the fields `encoder` and `decoder`, which are words, for nested
        configurations.
        """
        return self

    @property
    def mask_id(self) -> int:
        """The mask token's id, which follows the vocabulary."""
        return int(self.vocab_size)


HUB_OPTIONS = ("repo_id", "private", "token", "revision", "create_pr", "commit_message")


class TracformerPreTrainedModel(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
    """Base class that holds a Tracformer's modules under their own names.

    So both libraries write the same file. `core` is the same model as a `Tracformer`, with
    log-probabilities and generation. `attention` names one of this library's implementations;
    transformers' `attn_implementation` does not apply and is refused.
    """

    config_class = TracformerPretrainedConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # Trainer then passes the number of labels of the whole step

    def __init__(self, config: TracformerPretrainedConfig, attention: str = "native") -> None:
        _require_own_attention(config._attn_implementation)
        super().__init__(config)
        shell = Tracformer(config.to_core(), attention)
        for name, module in shell.named_children():
            self.add_module(name, module)
        shell._modules = {}
        self.__dict__["_shell"] = shell  # not registered as a submodule: it owns nothing
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def core(self) -> Tracformer:
        """A `Tracformer` that shares these modules.

        It is made anew at each access, so that it cannot be out of date.
        """
        core: Tracformer = copy.copy(self._shell)
        core._modules = self._modules
        core.config = self.config.to_core()
        core.training = self.training
        core.checkpoint_activations = self.gradient_checkpointing
        return core

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Load a folder or an id of the hub, strictly.

        transformers alone would fill a missing tensor with random numbers and skip an unexpected
        one; here both are errors.
        """
        # Mismatches are collected and reported together below.
        options = {"use_safetensors": True, **options, "ignore_mismatched_sizes": True}
        if TracformerConfig.old_tensor_names:
            options["key_mapping"] = tensor_patterns(TracformerConfig.old_tensor_names)
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        found = {
            name: shape for name, shape in expected.items() if name not in info["missing_keys"]
        }
        found.update(dict.fromkeys(info["unexpected_keys"], ()))
        found.update({name: tuple(shape) for name, shape, _ in info["mismatched_keys"]})
        storage.compare(Path(model.name_or_path), found, expected)
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self,
        save_directory: str | PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        *,
        evaluation: Evaluation | None = None,
        **options: Any,
    ) -> None:
        """Write the folder; with `evaluation`, also a model card (`publish.model_card`)."""
        hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
        if is_main_process:
            remove_checksums(Path(save_directory))
        self.config.auto_map = dict(TracformerConfig.auto_map)
        super().save_pretrained(save_directory, is_main_process, state_dict, **options)
        if is_main_process:
            storage.write_code(Path(save_directory))
            write_checksums(Path(save_directory))
        if evaluation is not None and is_main_process:
            write_model_card(save_directory, evaluation=evaluation)
        if push_to_hub and is_main_process:
            push_folder(save_directory, hub.pop("repo_id", Path(save_directory).name), **hub)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: Any = None,
        evaluation: Evaluation | None = None,
        **options: Any,
    ) -> str:
        """Upload weights, configuration, card and, if given, a tokenizer of either library.

        See `publish.push_folder` for the options.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            if tokenizer is not None:
                save = getattr(tokenizer, "save_pretrained", None) or tokenizer.save
                save(folder)
            return push_folder(folder, repo_id, evaluation=evaluation, **options)

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute each block in the backward pass (`Tracformer.checkpoint_activations`)."""
        options = dict(gradient_checkpointing_kwargs or {})
        if options.pop("use_reentrant", False) or options or every_n_layers != 1 or offload:
            raise ValueError(
                "gradient checkpointing options are "
                f"{dict(gradient_checkpointing_kwargs or {})}, every_n_layers={every_n_layers}, "
                f"offload={offload}; Tracformer recomputes every block and takes no options"
            )
        super().gradient_checkpointing_enable({"use_reentrant": False})

    def set_attn_implementation(
        self, attn_implementation: Any, allow_all_kernels: bool = False
    ) -> None:
        """Refuse every implementation but this library's own."""
        _require_own_attention(attn_implementation)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.embedding = value

    def get_output_embeddings(self) -> None:
        """Return None: the head is the input embedding without the mask."""

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **options: Any
    ) -> nn.Module:
        """Return the embedding unchanged; another size is an error."""
        if new_num_tokens not in (None, self.config.vocab_size + 1):
            raise ValueError(
                f"new_num_tokens is {new_num_tokens}; the embedding has {self.config.vocab_size} "
                "tokens followed by the mask, which resizing would misplace. To fine-tune with a "
                "larger vocabulary, use `tracformer train init=FOLDER`"
            )
        return self.embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: the constructor has initialised the weights."""

    def _states(
        self,
        read: Callable[..., tuple[Tensor, Tensor]],
        token_type_ids: Tensor | None,
        unsupported: Mapping[str, Any],
        **inputs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return what `read` returns for the positions to predict, and these as flat rows (N,).

        `read` is the core's `states` or `hidden`.
        """
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise ValueError("token_type_ids names a second segment; Tracformer has no segments")
        if wanted := [name for name, value in unsupported.items() if value]:
            raise ValueError(
                f"{wanted[0]} is not supported; Tracformer returns only its final states"
            )
        return read(*read_batch(self.core.config, **inputs))


class TracformerModel(TracformerPreTrainedModel):
    """Tracformer without a head.

    `last_hidden_state` (B, T, d) describes each position given the others; a token never enters its
    own state.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        mode: str | None = None,
        context: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Return the final states, zero in the padding; see `TracformerForMaskedLM.forward`."""
        unsupported = {
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "mode": mode,
            "context": context,
        }
        states, rows = self._states(self.core.states, token_type_ids, unsupported, **inputs)
        output = outputs.BaseModelOutput(last_hidden_state=_spread(states, rows, input_ids.shape))
        return output if _wants_dict(return_dict, self.config) else output.to_tuple()


class TracformerForMaskedLM(TracformerPreTrainedModel):
    """Tracformer as a masked language model.

    `logits` have vocab_size columns: the mask is never predicted.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mode: str | None = None,
        context: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Return logits (B, T, vocab_size) and, with labels, the mean of -log p over their targets.

        Tokens that are not the mask are given, unless `context` (B, T) says otherwise. `mode` is by
        default `ac` where the weights were trained for it, else `car`. In `car` and `ar` the prefix
        encoder reads the true text: labels where there are any, so the loss is exact. Without
        labels only the tokens up to and including the first mask can be predicted: later logits are
        zero, as in the padding, and a second mask is an error.

        `num_items_in_batch` replaces the divisor of the loss: the number of labels of all
        micro-batches and ranks, which Trainer counts. Without labels the loss is zero.
        """
        core = self.core
        unsupported = {
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "mode": mode,
            "context": context,
        }
        hidden, rows = self._states(core.hidden, token_type_ids, unsupported, **inputs)
        loss = None
        if labels is not None:
            answers = labels.flatten()[rows].long()
            chosen = (answers != IGNORED).nonzero()[:, 0]
            total = likelihood.weighted_nll(
                hidden[chosen], core.head, answers[chosen], None, core.head_bias
            )
            count = len(chosen) if num_items_in_batch is None else num_items_in_batch
            loss = total / torch.as_tensor(count, device=total.device).clamp(min=1)
        logits = _spread(
            likelihood.logits_of(hidden, core.head, core.head_bias), rows, input_ids.shape
        )
        output = outputs.MaskedLMOutput(loss=loss, logits=logits)
        return output if _wants_dict(return_dict, self.config) else output.to_tuple()


def _spread(values: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Return (B, T, K) with values (N, K) at some flat rows, zero elsewhere."""
    if len(rows) == shape.numel():
        return values.unflatten(0, shape)
    return (
        values.new_zeros(shape.numel(), values.shape[-1])
        .index_copy(0, rows, values)
        .unflatten(0, shape)
    )


def _wants_dict(return_dict: bool | None, config: TracformerPretrainedConfig) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)


def _require_own_attention(name: Any) -> None:
    """Raise a ValueError for an attention of transformers.

    "eager" is what transformers calls a model's own code.
    """
    if name not in (None, "eager"):
        raise ValueError(
            f"attn_implementation is {name!r}, but transformers' attentions do not support "
            "Tracformer's geometry; leave it out, and choose one with "
            f"attention=: {', '.join(implementations())}"
        )


__all__ = [
    "TracformerForMaskedLM",
    "TracformerModel",
    "TracformerPretrainedConfig",
    "model_card",
    "push_folder",
    "write_model_card",
]

transformers.AutoConfig.register(
    TracformerPretrainedConfig.model_type, TracformerPretrainedConfig, exist_ok=True
)
transformers.AutoModel.register(TracformerPretrainedConfig, TracformerModel, exist_ok=True)
transformers.AutoModelForMaskedLM.register(
    TracformerPretrainedConfig, TracformerForMaskedLM, exist_ok=True
)
