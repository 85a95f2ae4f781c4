"""How much is measured: the full run, a quick look, or sizes of your own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Scale:
    name: str
    device: str = "cpu"
    dtype: str = "float32"  # of the attention part
    rounds: int = 3  # timed runs of one thing, of which the fastest counts

    # machine
    matmul_shapes: int = 5
    bandwidth_mebibytes: int = 512

    # attention: n_max 32 is the wider of the paper's two settings
    heads: int = 9
    head_size: int = 64
    n_max: int = 32
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    decoder_lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    masks_up_to: int = 4096  # dense masks, and the reference
    causal_up_to: int = 16384
    compiled_lengths: tuple[int, ...] = (1024,)  # torch.compile takes most of a minute for each layer
    memory_lengths: tuple[int, ...] = (1024, 4096, 8192)

    # training: (preset, batch), each at its own length; the first attention and precision are what the target is about
    presets: tuple[tuple[str, int], ...] = (("laptop", 16), ("laptop-long", 4), ("paper-small", 2))
    shrink: Mapping[str, Any] | None = None  # changes to those presets, for tests
    peers: tuple[str, ...] = ("gpt2", "bert", "bart")
    compile_preset: str = "laptop"

    # equal weight operations a token: (length, batch)
    wide: tuple[tuple[int, int], ...] = ((1024, 1), (4096, 1))
    wide_width: int = 768
    wide_heads: int = 12
    wide_vocab: int = 50257
    wide_rounds: int = 2

    # generation
    generation_preset: str = "paper-small"
    batches: tuple[int, ...] = (1, 16)
    tokens: int = 32
    generation_rounds: int = 5
    requests: int = 32  # at once, of the engine

    # long sequences
    long_lengths: tuple[int, ...] = (8192, 16384, 32768)
    long_preset: str = "laptop-32k"


FULL = Scale("full")

QUICK = Scale(
    "quick",
    rounds=1,
    matmul_shapes=3,
    bandwidth_mebibytes=256,
    lengths=(512, 1024, 2048),
    decoder_lengths=(512, 1024),
    masks_up_to=1024,
    causal_up_to=2048,
    compiled_lengths=(),
    memory_lengths=(1024,),
    presets=(("laptop", 2),),
    compile_preset="",
    wide=((1024, 1),),
    wide_width=192,
    wide_heads=3,
    wide_vocab=4096,
    wide_rounds=1,
    generation_preset="laptop",
    tokens=16,
    generation_rounds=2,
    requests=8,
    long_lengths=(2048, 4096),
)
