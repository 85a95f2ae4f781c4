"""The two model classes of transformers: hidden states, and the masked language model."""

import copy
import tempfile
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tracformer.attention import implementations
from tracformer.files import optional_package
from tracformer.hf.batch import IGNORED, read_batch
from tracformer.hf.card import Evaluation, write_model_card
from tracformer.hf.config import TracformerPretrainedConfig
from tracformer.hf.hub import push_folder
from tracformer.model import Tracformer, TracformerConfig, likelihood, storage
from tracformer.renames import tensor_patterns

transformers = optional_package("transformers", "tracformer.hf", "hf")
outputs = optional_package("transformers.modeling_outputs", "tracformer.hf", "hf")

HUB_OPTIONS = ("repo_id", "private", "token", "revision", "create_pr", "commit_message")


class TracformerPreTrainedModel(transformers.PreTrainedModel):  # type: ignore[misc, name-defined]
    """Owns the core's modules under the core's names, so that both sides write the same file.

    `core` is the same model as a `Tracformer`: log-probabilities, and whatever else the library does with one.
    `attention` names one of the library's implementations; transformers' `attn_implementation` has no say here and is refused.
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
        self.__dict__["_shell"] = shell  # past nn.Module's registration: it owns nothing
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def core(self) -> Tracformer:
        """A `Tracformer` over these very modules. Made anew at each call: there is no second state that could fall behind."""
        core: Tracformer = copy.copy(self._shell)
        core._modules = self._modules
        core.config = self.config.to_core()
        core.training = self.training
        core.checkpoint_activations = self.gradient_checkpointing
        return core

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """transformers' own, but strict: it would fill a missing tensor with random numbers and skip an unexpected one."""
        options = {"use_safetensors": True, **options, "ignore_mismatched_sizes": True}  # so that all complaints come at once, from here
        if TracformerConfig.old_tensor_names:
            options["key_mapping"] = tensor_patterns(TracformerConfig.old_tensor_names)
        model, info = super().from_pretrained(*args, output_loading_info=True, **options)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        found = {name: shape for name, shape in expected.items() if name not in info["missing_keys"]}
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
        """The core's folder. `evaluation`, if given, goes into a model card beside it."""
        hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
        super().save_pretrained(save_directory, is_main_process, state_dict, **options)
        if evaluation is not None and is_main_process:
            write_model_card(save_directory, evaluation=evaluation)
        if push_to_hub and is_main_process:
            push_folder(save_directory, hub.pop("repo_id", Path(save_directory).name), **hub)

    def push_to_hub(self, repo_id: str, *, tokenizer: Any = None, evaluation: Evaluation | None = None, **options: Any) -> str:
        """Upload weights, configuration, card and, if given, the tokeniser (of either library); see `push_folder` for the options."""
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            if tokenizer is not None:
                save = getattr(tokenizer, "save_pretrained", None) or tokenizer.save
                save(folder)
            return push_folder(folder, repo_id, evaluation=evaluation, **options)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, every_n_layers: int = 1, offload: bool = False
    ) -> None:
        """Recompute each block in the backward pass (`Tracformer.checkpoint_activations`)."""
        asked = dict(gradient_checkpointing_kwargs or {})
        if asked.pop("use_reentrant", False) or asked or every_n_layers != 1 or offload:
            raise ValueError(
                f"gradient checkpointing was asked for with {dict(gradient_checkpointing_kwargs or {})}, every_n_layers={every_n_layers}, "
                f"offload={offload}; Tracformer recomputes every block, without reentrance and without offloading, and takes no options"
            )
        super().gradient_checkpointing_enable({"use_reentrant": False})

    def set_attn_implementation(self, attn_implementation: Any, allow_all_kernels: bool = False) -> None:
        _require_own_attention(attn_implementation)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> None:
        """None: the head is the input embedding itself, less the mask."""

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **options: Any) -> nn.Module:
        """The embedding as it is: one row a token, and one for the mask behind them."""
        if new_num_tokens not in (None, self.config.vocab_size + 1):
            raise ValueError(
                f"new_num_tokens is {new_num_tokens}, but the embedding has {self.config.vocab_size} tokens and the mask behind them, "
                "which a resized table would misplace; fine-tune with a grown vocabulary through `tracformer train init=FOLDER`"
            )
        return self.embedding

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the core's constructor has drawn the weights, and a tensor missing from a file is an error."""

    def _states(
        self, core: Tracformer, token_type_ids: Tensor | None, unsupported: Mapping[str, Any], **inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """Final states (N, d) of the positions that can be answered, and those positions as flat rows (N,)."""
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise ValueError("token_type_ids names a second segment; Tracformer has no segments")
        if wanted := [name for name, value in unsupported.items() if value]:
            raise ValueError(f"{wanted[0]} was asked for; Tracformer returns its final states alone")
        batch = read_batch(core.config, **inputs)
        return core.hidden(batch.tokens, batch.context, batch.mode, batch.lengths, batch.answered)


class TracformerModel(TracformerPreTrainedModel):
    """`last_hidden_state` (B, T, d): what the model knows of each position from the others; a token never enters its own state."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        mode: str | None = None,
        context: Tensor | None = None,
        insist: bool = False,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Mode and context as for `TracformerForMaskedLM`; zero in the padding."""
        unsupported = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "mode": mode, "context": context, "insist": insist}
        hidden, rows = self._states(self.core, token_type_ids, unsupported, **inputs)
        output = outputs.BaseModelOutput(last_hidden_state=_spread(hidden, rows, input_ids.shape))
        return output if _wants_dict(return_dict, self.config) else output.to_tuple()


class TracformerForMaskedLM(TracformerPreTrainedModel):
    """Fills the mask. `logits` has vocab_size columns: the mask itself is never predicted."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mode: str | None = None,
        context: Tensor | None = None,
        insist: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Logits (B, T, vocab_size) and, with labels, the mean of -log p over the labelled targets.

        Given is what is not the mask id, or what `context` (B, T) says. `mode` is `ac` where the weights know it, else `car`. In `car` and
        `ar` the prefix encoder reads the true text: labels where there are any, so a loss is exact. Without labels only what stands before
        the first unknown token, and that token, can be answered: logits behind it are zero, as in the padding; a second mask is an error.

        `num_items_in_batch` replaces the divisor: the labels of all micro-batches and ranks, which Trainer counts. No label: loss zero.
        """
        core = self.core
        unsupported = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "mode": mode, "context": context}
        hidden, rows = self._states(core, token_type_ids, unsupported, insist=insist, **inputs)
        loss = None
        if labels is not None:
            answers = labels.flatten()[rows].long()
            chosen = (answers != IGNORED).nonzero()[:, 0]
            total = likelihood.weighted_nll(hidden[chosen], core.head, answers[chosen], None, core.head_bias)
            count = len(chosen) if num_items_in_batch is None else num_items_in_batch
            loss = total / torch.as_tensor(count, device=total.device).clamp(min=1)
        logits = _spread(likelihood.logits_of(hidden, core.head, core.head_bias), rows, input_ids.shape)
        output = outputs.MaskedLMOutput(loss=loss, logits=logits)
        return output if _wants_dict(return_dict, self.config) else output.to_tuple()


def _spread(values: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """(N, K) values of some flat rows into (B, T, K), zero elsewhere."""
    if len(rows) == shape.numel():
        return values.unflatten(0, shape)
    return values.new_zeros(shape.numel(), values.shape[-1]).index_copy(0, rows, values).unflatten(0, shape)


def _wants_dict(return_dict: bool | None, config: TracformerPretrainedConfig) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)


def _require_own_attention(name: Any) -> None:
    """ "eager" is what transformers writes for a model's own code."""
    if name not in (None, "eager"):
        raise ValueError(
            f"attn_implementation is {name!r}, but transformers' attentions do not know Tracformer's geometry; leave it out and choose one "
            f"of the library's with attention=: {', '.join(implementations())}"
        )
