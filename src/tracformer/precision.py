"""In which precision sums of half-precision numbers are taken."""

import torch


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half precisions; every other dtype as it is."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
