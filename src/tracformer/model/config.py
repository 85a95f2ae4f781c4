"""Configurations: the base class of all systems, and that of the Tracformer with its presets."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from tracformer.geometry import KEY_SETS
from tracformer.renames import present_names

MODES = ("car", "ac", "ar")
# Largest values of fields with these names, in every system, and of all other integers: beyond
# them a configuration is a mistake that would exhaust memory or time before it is found.
LARGEST = {
    "n_layer": 1024,
    "n_encoder": 1024,
    "n_head": 1024,
    "d_model": 2**16,
    "d_feedforward": 2**18,
}
LARGEST_INT = 2**24
ROTARY_BASES = (1.0, 1e12)


@dataclass(frozen=True)
class ModelConfig:
    """The configuration that all systems share; each system adds its own fields.

    A folder's `config.json` names the system by its `model_type`.
    """

    model_type: ClassVar[str]
    possible_modes: ClassVar[tuple[str, ...]]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # fields that training from a model's weights (`init`) may change
    changeable: ClassVar[tuple[str, ...]] = ("dropout", "modes")
    # transformers' class -> class in the code that `storage.save` puts into the folder
    auto_map: ClassVar[Mapping[str, str]] = {}
    # Names of older files: old -> present; see `tracformer.renames`.
    old_config_keys: ClassVar[Mapping[str, str]] = {}
    old_tensor_names: ClassVar[Mapping[str, str]] = {}  # with * for any text: "blocks.*.fc.weight"

    vocab_size: int = 50257  # without the mask, which has an id of its own and is never predicted
    max_length: int = 1024  # longest sequence
    # modes that the weights were trained in; any other is an error. Empty: all possible modes
    modes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_types()
        self.require_positive("vocab_size", "max_length")
        object.__setattr__(self, "modes", tuple(self.modes) or self.possible_modes)
        if any(mode not in self.possible_modes for mode in self.modes):
            raise ValueError(
                f"modes is {self.modes!r}; it must name at least one of: "
                f"{', '.join(self.possible_modes)}"
            )

    def _check_types(self) -> None:
        """Check that numbers are finite and not absurd, and that bool fields hold bools."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            largest = LARGEST.get(field.name, LARGEST_INT)
            if isinstance(value, int) and abs(value) > largest:
                raise ValueError(f"{field.name} is {value}; it must be at most {largest}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{field.name} is {value}; it must be a finite number")
            if field.type is float and (
                isinstance(value, bool) or not isinstance(value, int | float)
            ):
                raise ValueError(f"{field.name} is {value!r}; it must be a number")
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name} is {value!r}; it must be true or false")
            low, high = ROTARY_BASES
            if field.name == "rotary_base" and not low <= value <= high:
                raise ValueError(f"rotary_base is {value!r}; it must lie in [{low:g}, {high:g}]")

    def require_positive(self, *fields: str) -> None:
        """Raise a ValueError unless these fields are positive integers."""
        for field in fields:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field} is {value!r}; it must be a positive integer")

    @classmethod
    def modes_trained_by(cls, modes: set[str], values: Mapping[str, Any]) -> set[str]:
        """Return the modes that training in `modes` teaches a model of this configuration."""
        return modes

    @property
    def mask_id(self) -> int:
        """The id of the mask token, the first after the vocabulary."""
        return self.vocab_size

    @property
    def fixed_length(self) -> bool:
        """Whether every sequence must have exactly `max_length` tokens."""
        return False

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a named configuration with some fields changed.

        Example:
            >>> TracformerConfig.preset("laptop", vocab_size=1000).vocab_size
            1000
        """
        if name not in cls.presets:
            raise ValueError(f"preset is {name!r}; available: {', '.join(cls.presets)}")
        return cls.from_dict({**cls.presets[name], **present_names(changes, cls.old_config_keys)})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a checked configuration; keys may have names of older versions."""
        values = present_names(values, cls.old_config_keys)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"unknown configuration keys: {', '.join(unknown)}; known: "
                f"{', '.join(sorted(known))}"
            )
        return cls(**values)


ENCODERS = ("multiscope", "full")
DECODERS = ("strided", "dense", "neighbours")

PAPER = {"vocab_size": 50257, "max_length": 1024, "n_layer": 10, "n_head": 9, "d_model": 576}

PRESETS: dict[str, dict[str, Any]] = {
    "paper-small": {**PAPER, "n_max": 16, "dropout": 0.1},  # Table 6: WikiText-103, LAMBADA, 1BW
    "paper-owt": {**PAPER, "n_max": 32, "dropout": 0.0},  # Table 10: OpenWebText
    # Sizes for one machine without a GPU; set vocab_size to that of your tokenizer.
    "tiny": {
        "vocab_size": 256,
        "max_length": 128,
        "n_layer": 7,
        "n_head": 3,
        "d_model": 96,
        "n_max": 8,
        "init_std": 0.06,
    },  # 1.6M
    # 2.1M without embeddings; the presets "mini" of all systems are about equal in size
    "mini": {
        "vocab_size": 4096,
        "max_length": 256,
        "n_layer": 8,
        "n_head": 2,
        "d_model": 104,
        "n_max": 16,
        "init_std": 0.06,
    },
    "laptop": {
        "vocab_size": 4096,
        "max_length": 256,
        "n_layer": 8,
        "n_head": 3,
        "d_model": 192,
        "n_max": 16,
        "init_std": 0.04,
    },  # 7.9M
    "laptop-long": {
        "vocab_size": 4096,
        "max_length": 1024,
        "n_layer": 10,
        "n_head": 3,
        "d_model": 192,
        "n_max": 16,
        "init_std": 0.04,
    },  # 9.7M
    # Long sequences: with recomputed activations, a training step on 32768 tokens takes a few GiB.
    "laptop-32k": {
        "vocab_size": 4096,
        "max_length": 32768,
        "n_layer": 15,
        "n_head": 3,
        "d_model": 96,
        "n_max": 16,
        "init_std": 0.06,
    },  # 3.8M
}


@dataclass(frozen=True)
class TracformerConfig(ModelConfig):
    """Sizes and switches of a Tracformer; the switches are the paper's ablations.

    Args:
        vocab_size: Number of tokens.
        max_length: Longest sequence.
        modes: Modes that the weights are trained in.
        n_layer: Layers of the encoder, and of the decoder; 2^n_layer must reach `max_length`.
        n_head: Attention heads.
        d_model: Width of the residual stream, divisible by `n_head`.
        n_max: Sets the number of keys of an encoder query.
        dropout: Dropout on embeddings and residual branches.
        encoder: "multiscope", or "full" for dense attention.
        decoder: "strided", "dense" or "neighbours".
        key_set: "stepped", or "rounded" as in the body of the paper.
        rotary_base: Base of the rotary position angles.
        init_std: Standard deviation of the initial weights.
        columns: For the rows of an alignment, all of `max_length` letters: learn an embedding, an
            output matrix and an output bias for each column, beside those of all columns.

    Raises:
        ValueError: A field is out of bounds, or two fields do not fit.

    Example:
        >>> TracformerConfig(vocab_size=100, max_length=64, n_layer=6, d_model=32, n_head=2).n_max
        16
    """

    model_type = "tracformer"
    possible_modes = MODES
    presets = PRESETS
    auto_map = {  # noqa: RUF012
        "AutoConfig": "modeling_tracformer.TracformerHubConfig",
        "AutoModel": "modeling_tracformer.TracformerHubModel",
        "AutoModelForMaskedLM": "modeling_tracformer.TracformerHubForMaskedLM",
    }

    n_layer: int = 10  # of the encoder, and of the decoder; 2^n_layer must be at least max_length
    n_head: int = 9
    d_model: int = 576
    n_max: int = 16  # sets the number of keys of an encoder query (section 4.1 of the paper)
    dropout: float = 0.0  # on embeddings and residual branches, never inside attention
    encoder: str = "multiscope"  # "full": dense causal and reverse-causal, the paper's ablation
    # "dense": reads every feature; "neighbours": dense, but layer 1 reads only t-1 and t+1
    decoder: str = "strided"
    key_set: str = "stepped"  # "rounded": the key set of the paper's body text
    rotary_base: float = 10000.0
    init_std: float = 0.02  # as GPT-2; narrow models train faster with more (docs/paper.md)
    columns: bool = False  # rows of an alignment: a column's place has a meaning

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("n_layer", "n_head", "d_model")
        if not isinstance(self.n_max, int) or self.n_max < 2:
            raise ValueError(
                f"n_max is {self.n_max!r}; it must be an integer of at least 2: a query reads "
                "itself and its farthest key"
            )
        if 2**self.n_layer < self.max_length:
            needed = (self.max_length - 1).bit_length()
            raise ValueError(
                f"n_layer is {self.n_layer}, so the widest scope is {2**self.n_layer}, less than "
                f"max_length {self.max_length}; "
                f"use n_layer >= {needed} or max_length <= {2**self.n_layer}"
            )
        if self.d_model % self.n_head:
            raise ValueError(f"d_model is {self.d_model}, not divisible by n_head {self.n_head}")
        if self.head_size % 2:
            raise ValueError(
                f"d_model {self.d_model} over n_head {self.n_head} gives head size "
                f"{self.head_size}; rotary angles need an even head size"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout!r}; it must lie in [0, 1)")
        for field in ("rotary_base", "init_std"):
            if not getattr(self, field) > 0.0:
                raise ValueError(f"{field} is {getattr(self, field)!r}; it must be positive")
        for field, allowed in (("encoder", ENCODERS), ("decoder", DECODERS), ("key_set", KEY_SETS)):
            if getattr(self, field) not in allowed:
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}; allowed: {', '.join(allowed)}"
                )

    @property
    def fixed_length(self) -> bool:
        return self.columns

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_head
