"""From transformers' inputs to the core's question: who is given, which tokens are true, how long each sequence is.

transformers writes a question as `input_ids` with the mask id at the targets, and the answers as `labels`, -100 where there is none.
The core wants `tokens`, the true text, and `context`, who of it is given. In mode `ac` the tokens under the mask are never read. In
`car` and `ar` the prefix is: a target's true token comes from its label, or from `input_ids` where `context` says that a token which is
spelled out is a target.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tracformer.model.check import check_batch, check_mode
from tracformer.model.config import TracformerConfig

IGNORED = -100  # transformers' label of a position without a loss


class Batch(NamedTuple):
    mode: str
    tokens: Tensor  # (B, T), a placeholder where the truth is unknown
    context: Tensor  # (B, T) bool, True where given
    lengths: Tensor  # (B,)
    answered: Tensor  # (B, T) bool: inside, and no token unknown that the mode reads


def default_mode(config: TracformerConfig) -> str:
    """A masked language model's question is `ac`: every target from what is given alone. Else what the weights were trained for."""
    return next(mode for mode in ("ac", "car", "ar") if mode in config.modes)


def read_batch(
    config: TracformerConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    mode: str | None = None,
    context: Tensor | None = None,
    insist: bool = False,
) -> Batch:
    mode = default_mode(config) if mode is None else mode
    check_mode(config, mode, insist)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be (B, T)")
    for name, tensor in (("attention_mask", attention_mask), ("labels", labels), ("context", context)):
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have that of input_ids, {tuple(input_ids.shape)}")
    lengths = lengths_of(attention_mask, input_ids)
    inside = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
    masked = input_ids == config.mask_id
    if context is None:
        context = ~masked
    elif bool((wrong := context.bool() & masked & inside).any()):
        raise ValueError(
            f"context gives {_place(wrong)}, where input_ids holds the mask {config.mask_id}; a given token must be spelled out"
        )
    tokens = input_ids if labels is None else _with_labels(config, input_ids, labels, context, inside)
    unknown = tokens == config.mask_id
    answered = inside
    if mode != "ac":
        before = (unknown & inside).cumsum(1) - (unknown & inside).long()  # unknown tokens among x_<t
        if bool((wrong := ~context & inside & (before > 0)).any()):
            raise ValueError(
                f"mode {mode!r} predicts a target from the true text before it, and {_place(wrong)} follows a mask without a label; "
                "give labels for every masked token, leave one mask a sequence, or use mode 'ac' with weights trained for it"
            )
        answered = inside & (before == 0)
    tokens = tokens.masked_fill(unknown, 0)
    return Batch(mode, tokens, context, check_batch(config, tokens, context, mode, lengths, insist), answered)


def lengths_of(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor:
    """(B,): how many tokens of each row are text. Padding stands on the right; anything else would shift positions."""
    B, T = input_ids.shape
    if attention_mask is None:
        return torch.full((B,), T, device=input_ids.device)
    text = attention_mask.to(input_ids.device) != 0
    lengths = text.sum(1)
    if bool((wrong := ~text & (torch.arange(T, device=text.device) < lengths[:, None])).any()):
        raise ValueError(
            f"attention_mask leaves out {_place(wrong)} and keeps what follows; padding must stand on the right, without holes: "
            "set tokenizer.padding_side = 'right'"
        )
    return lengths


def _with_labels(config: TracformerConfig, input_ids: Tensor, labels: Tensor, context: Tensor, inside: Tensor) -> Tensor:
    """The text with every labelled target spelled out."""
    labelled = labels != IGNORED
    if bool((wrong := labelled & ((labels < 0) | (labels >= config.vocab_size))).any()):
        raise ValueError(f"label {int(labels[wrong][0])} is out of range; labels must lie in 0..{config.vocab_size - 1} or be {IGNORED}")
    if bool((wrong := labelled & (context | ~inside)).any()):
        raise ValueError(
            f"labels names {_place(wrong)}, which is given or padding; labels must be {IGNORED} everywhere but at masked tokens "
            "(with DataCollatorForLanguageModeling: mask_replace_prob=1.0, random_replace_prob=0.0)"
        )
    return torch.where(labelled, labels, input_ids)


def _place(wrong: Tensor) -> str:
    row, position = (int(i) for i in wrong.nonzero()[0])
    return f"position {position} of row {row}"
