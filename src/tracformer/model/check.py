"""Every complaint about a batch, in one place: each quotes the value and says what is allowed."""

import torch
from torch import Tensor

from tracformer.model.config import ModelConfig

PREFERRED = ("car", "ac", "ar")
IDS = (torch.int32, torch.int64)  # what embeddings take
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_batch(config: ModelConfig, tokens: Tensor, context: Tensor, mode: str, lengths: Tensor | None, insist: bool = False) -> Tensor:
    """The batch's true lengths (B,), or a ValueError."""
    check_mode(config, mode, insist)
    if tokens.dim() != 2 or tokens.dtype not in IDS:
        raise ValueError(f"tokens is {_describe(tokens)}; it must be a (B, T) tensor of int64 or int32")
    B, T = tokens.shape
    if B == 0 or T == 0:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}: an empty batch; give at least one sequence of at least one token")
    if T > config.max_length:
        raise ValueError(f"sequences are {T} tokens long; this model takes at most max_length = {config.max_length}")
    if context.shape != tokens.shape or context.dtype != torch.bool:
        raise ValueError(f"context is {_describe(context)}; it must be a bool tensor of tokens' shape {tuple(tokens.shape)}")
    if context.device != tokens.device:
        raise ValueError(f"context is on {context.device} and tokens on {tokens.device}; they must be on one device")
    if lengths is None:
        lengths = torch.full((B,), T, device=tokens.device)
        inside = tokens
    else:
        if lengths.shape != (B,) or lengths.dtype not in INTEGERS:
            raise ValueError(f"lengths is {_describe(lengths)}; it must be a ({B},) tensor of integers")
        lengths = lengths.to(tokens.device, torch.int64).contiguous()  # compiled code walks over them
        low, high = (int(x) for x in lengths.aminmax())
        if low < 1 or high > T:
            raise ValueError(f"lengths range from {low} to {high}; each must lie in 1..{T}, the padded length")
        inside = tokens[torch.arange(T, device=tokens.device) < lengths[:, None]]
    low, high = (int(x) for x in inside.aminmax())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is out of range; ids must lie in 0..{config.vocab_size - 1} (vocab_size {config.vocab_size})")
    return lengths


def check_mode(config: ModelConfig, mode: str, insist: bool = False) -> None:
    if mode not in config.possible_modes:
        raise ValueError(f"mode is {mode!r}; allowed for {config.model_type}: {', '.join(config.possible_modes)}")
    if mode not in config.modes and not insist:
        raise ValueError(
            f"mode is {mode!r}, but these weights were trained for: {', '.join(config.modes)}; "
            "pass insist=True, in Python, to run it all the same"
        )


def preferred_mode(config: ModelConfig) -> str:
    """The mode of a question that names none: of those the weights were trained for, the first of car, ac, ar, else the first."""
    return next((mode for mode in PREFERRED if mode in config.modes), config.modes[0])


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
