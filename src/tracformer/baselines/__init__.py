"""The systems by name: Tracformer, the baselines of the paper, later rivals and our own models.

Each system is a configuration and a model class, imported on first use. To add one, register it
here or call `register` from another package; training, generation, evaluation and the command line
find it by the `model_type` of its configuration.
"""

import importlib
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracformer.model.base import ConditionalModel
    from tracformer.model.config import ModelConfig


@dataclass(frozen=True)
class Family:
    name: str  # the `model_type` of its configuration
    module: str
    model: str  # the class in that module
    objective: str  # what it is trained with unless the user says otherwise
    summary: str
    schema: int = 1  # raised when figures of the same weights change; results are made again

    @property
    def model_class(self) -> "type[ConditionalModel]":
        kind: type[ConditionalModel] = getattr(importlib.import_module(self.module), self.model)
        return kind

    @property
    def config_class(self) -> "type[ModelConfig]":
        return self.model_class.config_class


_families: dict[str, Family] = {}


def register(family: Family) -> None:
    _families[family.name] = family


def family_names() -> tuple[str, ...]:
    return tuple(_families)


def find_family(name: str) -> Family:
    if name not in _families:
        raise ValueError(f"there is no system {name!r}; available: {', '.join(_families)}")
    return _families[name]


def schema_of(name: str) -> int:
    """Return the schema number of a family; 1 for a model that is not registered."""
    return _families[name].schema if name in _families else 1


def load_model(folder: str | PathLike[str], **options: Any) -> "ConditionalModel":
    """The model of a folder, of whichever system its `config.json` names, ours or published by
    others; see `from_pretrained`.
    """
    from tracformer.baselines import published
    from tracformer.model import storage

    document = storage.load_document(folder)
    if (read := published.reader_of(document)) is not None:
        return read(folder, **options)
    name = document.get("model_type")
    if not isinstance(name, str) or name not in _families:
        raise ValueError(
            f"{folder} describes a model of type {name!r}; known: {', '.join(_families)}"
        )
    return find_family(name).model_class.from_pretrained(folder, **options)


register(
    Family(
        "tracformer",
        "tracformer.model",
        "Tracformer",
        "all-modes",
        "multi-scope encoder pair, cross-attention-only decoder",
    )
)
register(
    Family(
        "bart",
        "tracformer.baselines.bart",
        "Bart",
        "car",
        "bidirectional encoder, left-to-right decoder",
    )
)
register(Family("bert", "tracformer.baselines.bert", "Bert", "ac", "bidirectional encoder"))
register(
    Family(
        "bert-bidir",
        "tracformer.baselines.bert",
        "BertBidir",
        "ac",
        "causal and reverse-causal encoder, joined by an MLP",
    )
)
register(
    Family(
        "bart-modern",
        "tracformer.baselines.modern",
        "BartModern",
        "car",
        "BART with norms before the branches and rotary positions",
    )
)
register(
    Family(
        "bert-modern",
        "tracformer.baselines.modern",
        "BertModern",
        "ac",
        "BERT with norms before the branches and rotary positions",
    )
)
register(
    Family(
        "bert-bidir-modern",
        "tracformer.baselines.modern",
        "BertBidirModern",
        "ac",
        "BERT-bidir that reads its features at t-1 and t+1",
    )
)
register(
    Family(
        "ac-gpt",
        "tracformer.baselines.given_first",
        "AcGpt",
        "car",
        "causal transformer, given tokens first, then the whole text",
    )
)
register(
    Family(
        "as-arm",
        "tracformer.baselines.as_arm",
        "AsArm",
        "car",
        "two-stream attention, given tokens first, then targets in any order",
    )
)
register(
    Family(
        "sigma-gpt",
        "tracformer.baselines.sigma_gpt",
        "SigmaGpt",
        "car",
        "causal transformer over shuffled text with two positions a token",
    )
)
register(
    Family(
        "compact",
        "tracformer.baselines.given_first",
        "Compact",
        "all-modes",
        "given tokens first, then only the hidden ones; neighbours first",
    )
)
register(
    Family(
        "aligned",
        "tracformer.baselines.aligned",
        "Aligned",
        "all-modes",
        "two-sided encoder and causal decoder that meet at each position",
    )
)
register(Family("gpt2", "tracformer.baselines.gpt2", "GPT2", "ar", "left to right"))
register(
    Family(
        "gpt2-fim",
        "tracformer.baselines.gpt2",
        "GPT2Fim",
        "fim",
        "left to right over reordered text: fills in the middle",
    )
)
register(
    Family(
        "sedd",
        "tracformer.baselines.sedd",
        "SEDD",
        "denoise",
        "masked diffusion by score entropy, on a DiT",
    )
)
register(
    Family(
        "mdlm",
        "tracformer.baselines.mdlm",
        "MDLM",
        "denoise",
        "masked diffusion by cross-entropy, on a DiT or a Tracformer",
    )
)
register(
    Family(
        "d3pm",
        "tracformer.baselines.sedd",
        "D3PM",
        "denoise",
        "masked diffusion in discrete time, on a DiT",
    )
)
register(
    Family(
        "plaid",
        "tracformer.baselines.plaid",
        "Plaid",
        "denoise",
        "Gaussian diffusion on token embeddings, on a DiT",
    )
)
register(
    Family(
        "frequencies",
        "tracformer.baselines.frequencies",
        "Frequencies",
        "ac",
        "frequencies of single tokens, whatever is given",
    )
)
