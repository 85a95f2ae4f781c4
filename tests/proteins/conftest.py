"""A tiny model with random weights that reads single residues."""

import pytest
import torch

from tracformer import Tracformer, TracformerConfig
from tracformer.data import Tokenizer, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer("protein")


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Tracformer:
    torch.manual_seed(0)
    config = TracformerConfig(
        vocab_size=tokenizer.vocab_size, max_length=16, n_layer=4, n_head=2, d_model=16, n_max=4
    )
    model = Tracformer(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()
