"""From the inputs of `transformers` to a batch: given tokens, predicted tokens and lengths.

transformers marks targets by the mask id in `input_ids`, and gives their true tokens as `labels`,
-100 elsewhere. Mode `ac` never reads the tokens under the mask. In `car` and `ar` the prefix
encoder reads the true tokens: they come from `labels`, or from `input_ids` if `context` says that a
token which is not masked is a target.
"""

import torch
from torch import Tensor

from tracformer.model.base import check_batch, check_mode
from tracformer.model.batch import Batch
from tracformer.model.config import TracformerConfig

IGNORED = -100  # transformers' label of a position without a loss


def default_mode(config: TracformerConfig) -> str:
    """Return `ac`, the task of a masked language model, if the weights were trained for it.

    Otherwise it is the first of `car` and `ar` that they were trained for.
    """
    return next(mode for mode in ("ac", "car", "ar") if mode in config.modes)


def read_batch(
    config: TracformerConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    mode: str | None = None,
    context: Tensor | None = None,
) -> tuple[Batch, str, Tensor]:
    """Return the inputs of transformers as a batch, the mode, and the positions to predict.

    These (B, T) are all positions except those for which the mode would read an unknown token.
    Unknown tokens are replaced by token 0.

    Args:
        config: Configuration of the model.
        input_ids: (B, T) ids, the mask at targets.
        attention_mask: (B, T), zero in the padding.
        labels: (B, T) true tokens of masked targets, -100 elsewhere.
        mode: By default `default_mode`.
        context: (B, T) bool, True where given; by default where `input_ids` is not the mask.

    Raises:
        ValueError: The inputs contradict each other, or the mode needs tokens that are unknown.
    """
    mode = default_mode(config) if mode is None else mode
    check_mode(config, mode)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}; it must be (B, T)")
    for name, tensor in (
        ("attention_mask", attention_mask),
        ("labels", labels),
        ("context", context),
    ):
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must have that of input_ids, "
                f"{tuple(input_ids.shape)}"
            )
    lengths = lengths_of(attention_mask, input_ids)
    inside = torch.arange(input_ids.shape[1], device=input_ids.device) < lengths[:, None]
    masked = input_ids == config.mask_id
    if context is None:
        context = ~masked
    elif bool((wrong := context.bool() & masked & inside).any()):
        raise ValueError(
            f"context gives {_place(wrong)}, where input_ids holds the mask {config.mask_id}; a "
            "given token must not be masked"
        )
    tokens = (
        input_ids if labels is None else _with_labels(config, input_ids, labels, context, inside)
    )
    unknown = tokens == config.mask_id
    answered = inside
    if mode != "ac":
        # Number of unknown tokens before each position.
        before = (unknown & inside).cumsum(1) - (unknown & inside).long()
        if bool((wrong := ~context & inside & (before > 0)).any()):
            raise ValueError(
                f"mode {mode!r} predicts a token from the true text before it, and "
                f"{_place(wrong)} follows a mask without a label; give labels for all masked "
                "tokens, leave one mask per sequence, or use mode 'ac' with weights trained for it"
            )
        answered = inside & (before == 0)
    batch = Batch(tokens.masked_fill(unknown, 0), context, lengths)
    check_batch(config, batch, mode)
    return batch, mode, answered


def lengths_of(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor:
    """Return the number of tokens (B,) of each row that are not padding.

    Padding must be on the right, since it would shift positions elsewhere.
    """
    B, T = input_ids.shape
    if attention_mask is None:
        return torch.full((B,), T, device=input_ids.device)
    text = attention_mask.to(input_ids.device) != 0
    lengths = text.sum(1)
    if bool((wrong := ~text & (torch.arange(T, device=text.device) < lengths[:, None])).any()):
        raise ValueError(
            f"attention_mask excludes {_place(wrong)} but not what follows; padding must be on the "
            "right: set tokenizer.padding_side = 'right'"
        )
    return lengths


def _with_labels(
    config: TracformerConfig, input_ids: Tensor, labels: Tensor, context: Tensor, inside: Tensor
) -> Tensor:
    """Return the text with the true token at every labelled target."""
    labelled = labels != IGNORED
    if bool((wrong := labelled & ((labels < 0) | (labels >= config.vocab_size))).any()):
        raise ValueError(
            f"label {int(labels[wrong][0])} is out of range; labels must lie in "
            f"0..{config.vocab_size - 1} or be {IGNORED}"
        )
    if bool((wrong := labelled & (context | ~inside)).any()):
        raise ValueError(
            f"labels gives a token for {_place(wrong)}, which is given or padding; labels must be "
            f"{IGNORED} except at masked tokens (with DataCollatorForLanguageModeling: "
            "mask_replace_prob=1.0, random_replace_prob=0.0)"
        )
    return torch.where(labelled, labels, input_ids)


def _place(wrong: Tensor) -> str:
    """Return the first True position of (B, T) in words."""
    row, position = (int(i) for i in wrong.nonzero()[0])
    return f"position {position} of row {row}"
