"""Read the weights that the authors of SEDD and MDLM published, and their training checkpoints.

| written by | weights | configuration |
|---|---|---|
| SEDD, published | `pytorch_model.bin` | `config.json`: the whole training tree |
| SEDD, training | {model, ema, optimizer, step} | `.hydra/config.yaml` of the run |
| MDLM, published | `model.safetensors`, names under `backbone.` | `config.json` |
| MDLM, training | Lightning file {state_dict, ema, hyper_parameters, ...} | in the file itself |

MDLM's code also trains SEDD (`parameterization: sedd`), and writes it in its own layout.

**The mask.** With a tokenizer without a mask token, such as GPT-2's, MDLM's code adds one row
after the vocabulary, as this library does: the rows are loaded unchanged. With a tokenizer that
has a mask token, such as BERT's, that token's row is the mask. Then `vocab_size` is the
tokenizer's, all ids keep their meaning, the mask's rows are appended, and the mask's own
id gets probability zero, as it has in the original.

Published GPT-2 weights are read in `gpt2.py`; files with pickles through `pickle_reader.py`.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tracformer.baselines.diffusion import DiffusionConfig, DiffusionModel
from tracformer.baselines.dit import ROTARY_BASE
from tracformer.baselines.mdlm import MDLM, MDLMConfig
from tracformer.baselines.pickle_reader import (
    PICKLE_FILE,
    StoredTensor,
    lookup,
    read_checkpoint,
)
from tracformer.baselines.sedd import SEDD, SEDDConfig
from tracformer.model.storage import CONFIG_FILE, WEIGHTS_FILE, compare, load_document, on_meta

LOGGER = logging.getLogger(__name__)
HYDRA_FILE = ".hydra/config.yaml"  # in a run's folder; its weights are in `checkpoints/`
PREFIX = "backbone."
FREQUENCIES = "rotary_emb.inv_freq"  # a buffer in their files; here it is computed
TABLE = "vocab_embed.embedding"
HEAD_BIAS = "output_layer.linear.bias"
TOKEN_ROWS = (TABLE, "output_layer.linear.weight", HEAD_BIAS)  # one row for each token
IMPOSSIBLE = -3e4  # logit of a token with probability zero; float16 can hold it

Weights = Mapping[str, Tensor | StoredTensor]
M = TypeVar("M", bound=DiffusionModel)


class Vocabulary(NamedTuple):
    """The number of tokens of a tokenizer, and the id of its mask token if it has one."""

    size: int
    mask: int | None  # the id of its mask token


GPT2 = Vocabulary(50257, None)
BERT = Vocabulary(30522, 103)
TOKENIZERS = {
    "gpt2": GPT2,
    "openai-community/gpt2": GPT2,
    "bert-base-uncased": BERT,
    "google-bert/bert-base-uncased": BERT,
    "text8": Vocabulary(35, 4),  # of MDLM's own code
}  # by their names in MDLM's configuration


class CheckpointLayout(NamedTuple):
    """How a training code writes a system: names of tensors, keys of its configuration."""

    family: str
    prefix: str  # of tensor names
    rows: tuple[str, int] | None  # key of the vocabulary's size, and the number of rows beyond it
    keys: Mapping[str, str]  # from our fields to their keys
    required: Mapping[str, Any]  # the only values that our network computes


SHAPE = {
    "max_length": ("model.length", "model_length"),
    "n_layer": ("model.n_blocks", "n_blocks"),
    "n_head": ("model.n_heads", "n_heads"),
    "d_model": ("model.hidden_size", "hidden_dim"),
    "d_condition": ("model.cond_dim", "cond_dim"),
    "dropout": ("model.dropout", "dropout"),
}  # in a training tree, and in MDLM's published configuration
TREE = {field: keys[0] for field, keys in SHAPE.items()}
FLAT = {field: keys[1] for field, keys in SHAPE.items()}
TIME = {"time_conditioning": "time_conditioning"}
ABSORBING = {"graph.type": "absorb", "noise.type": "loglinear", "model.scale_by_sigma": True}
DIT = {"backbone": "dit", "noise.type": "loglinear"}
SEDD_OWN = CheckpointLayout("SEDD", "", ("tokens", 1), TREE, ABSORBING)
SEDD_BY_MDLM = CheckpointLayout("SEDD", PREFIX, None, TREE, {**DIT, "time_conditioning": True})
MDLM_TRAINED = CheckpointLayout("MDLM", PREFIX, None, {**TREE, **TIME}, DIT)
MDLM_PUBLISHED = CheckpointLayout("MDLM", PREFIX, ("vocab_size", 0), {**FLAT, **TIME}, {})


def load_sedd(
    path: str | PathLike[str],
    *,
    config: SEDDConfig | None = None,
    mask_token_id: int | None = None,
    ema: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    report: Callable[[str], None] = LOGGER.info,
    document: Mapping[str, Any] | None = None,
) -> SEDD:
    """Return the SEDD of a published folder or a training file, of SEDD's own code or of MDLM's.

    Args:
        path: Folder with `config.json` and weights, or a file of weights.
        config: Configuration to use instead of the one that is found at `path`.
        mask_token_id: Row of the mask, where the checkpoint does not say which it is.
        ema: Load the EMA weights where the file has them. False: the raw weights.
        dtype: Type of the loaded weights.
        device: Device of the loaded weights.
        report: Called with one line that says which weights were loaded.
        document: Content of the folder's `config.json`, if the caller has read it already.

    Raises:
        FileNotFoundError: There is no such file or folder, or it holds no weights.
        ValueError: The file is damaged, of another family, or does not match its configuration.
    """
    checkpoint = _Checkpoint(Path(path), "SEDD", config, document)
    return _load(SEDD, checkpoint, mask_token_id, ema, dtype, device, report)


def load_mdlm(
    path: str | PathLike[str],
    *,
    config: MDLMConfig | None = None,
    mask_token_id: int | None = None,
    ema: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    report: Callable[[str], None] = LOGGER.info,
    document: Mapping[str, Any] | None = None,
) -> MDLM:
    """Return the MDLM of a published folder or a Lightning file; see `load_sedd`."""
    if config is not None and config.backbone != "dit":
        raise ValueError(f"config has backbone {config.backbone!r}; these weights are of 'dit'")
    checkpoint = _Checkpoint(Path(path), "MDLM", config, document)
    return _load(MDLM, checkpoint, mask_token_id, ema, dtype, device, report)


def reader_of(document: Mapping[str, Any]) -> Callable[..., DiffusionModel] | None:
    """Return the function that reads a folder with this `config.json`, or None.

    It is None for a folder of this library, and for one of another system.
    """
    layout = _layout(document)
    return None if layout is None else load_sedd if layout.family == "SEDD" else load_mdlm


def _load(
    kind: type[M],
    checkpoint: "_Checkpoint",
    mask_token_id: int | None,
    ema: bool,
    dtype: torch.dtype,
    device: str | torch.device,
    report: Callable[[str], None],
) -> M:
    """Return a model with the weights of a checkpoint, in eval mode."""
    file, rows = checkpoint.file, checkpoint.rows
    mask, vocab_size = checkpoint.find_mask(mask_token_id)
    config = checkpoint.given or checkpoint.read_config(kind.config_class, vocab_size)
    blocks = {name.split(".")[1] for name in checkpoint.weights if name.startswith("blocks.")}
    if len(blocks) != config.n_layer:
        raise ValueError(f"{file} has {len(blocks)} blocks; expected {config.n_layer}")
    with on_meta():
        model = kind(config)
    shapes = {name: tuple(value.shape) for name, value in model.backbone.state_dict().items()}
    shapes |= {name: (rows, *shapes[name][1:]) for name in TOKEN_ROWS}
    weights = checkpoint.weights
    if (frequencies := weights.pop(FREQUENCIES, None)) is not None:
        _check_frequencies(file, frequencies, config.d_model // config.n_head)
    compare(file, {name: tuple(value.shape) for name, value in weights.items()}, shapes)
    averages = lookup(checkpoint.document, "ema")
    if averages is not None and ema:
        weights = _ema_weights(file, lookup(averages, "shadow_params"), weights)
    raw = "raw weights (the file has no EMA weights)" if averages is None else "raw weights"
    report(f"{file}: loaded {'EMA weights' if averages is not None and ema else raw}")
    tensors = {name: _loaded(value) for name, value in weights.items()}
    if vocab_size == rows:
        tensors = _with_mask_last(tensors, mask, kind is SEDD)
    tensors = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    model.backbone.load_state_dict(tensors, assign=True)
    return model.eval()


class _Checkpoint:
    """A file of weights and its configuration.

    Args:
        path: A folder, or a file of weights.
        family: "SEDD" or "MDLM", which it must hold.
        config: Configuration to use instead of the one found at `path`.
        settings: Content of the folder's `config.json`, if it was read already.
    """

    def __init__(
        self,
        path: Path,
        family: str,
        config: DiffusionConfig | None,
        settings: Mapping[str, Any] | None,
    ) -> None:
        self.file, self.document = _read(path)
        self.settings = settings
        self.given = config
        self.hyper = lookup(self.document, "hyper_parameters")  # of Lightning
        self.inside = lookup(self.hyper, "config") or self.hyper
        self.tree, self.where = self._find_tree()
        self.layout = self._find_layout(family)
        self.weights = self._named_weights()
        table = self.weights.get(TABLE)
        if table is None or len(table.shape) != 2:
            found = _some(self.weights)
            raise ValueError(f"{self.file}: expected a matrix {TABLE}; found only {found}")
        self.rows: int = table.shape[0]

    def _find_tree(self) -> tuple[Any, str]:
        """Return the configuration and where it was found: beside the file, in it, or in its run.

        If the caller gives a configuration, only the one in the file is read, if there is one.
        """
        folder, inside = self.file.parent, self.inside
        if self.given is None and (folder / CONFIG_FILE).is_file():
            settings = load_document(folder) if self.settings is None else self.settings
            return settings, str(folder / CONFIG_FILE)
        if inside or self.given is not None:
            return inside, f"{self.file}: hyper_parameters"
        for path in (folder / HYDRA_FILE, folder.parent / HYDRA_FILE):
            if path.is_file():
                try:
                    return yaml.safe_load(path.read_text(encoding="utf-8")), str(path)
                except (yaml.YAMLError, UnicodeDecodeError) as error:
                    raise ValueError(f"{path} is not valid YAML: {error}") from error
        advice = f"put its {CONFIG_FILE} beside it, or pass config="
        raise ValueError(f"{self.file} holds weights without a configuration; {advice}")

    def _find_layout(self, family: str) -> CheckpointLayout:
        """Return the layout of the file; it must be of `family`."""
        layout, inside = _layout(self.tree), _layout(self.inside)
        if inside is not None and inside.family != family:
            found = f"hyper_parameters are {inside.family}'s"
            raise ValueError(f"{self.file}: {found}; expected {family}'s")
        named = lookup(self.tree, "parameterization")
        if layout is None and self.given is not None and named is None:
            prefixed = any(str(name).startswith(PREFIX) for name in self._raw())
            return MDLM_TRAINED if family == "MDLM" else SEDD_BY_MDLM if prefixed else SEDD_OWN
        if layout is None or layout.family != family:
            other = f"parameterization={named!r}, model_type={lookup(self.tree, 'model_type')!r}"
            found = f"of another system ({other})" if layout is None else f"{layout.family}'s"
            raise ValueError(f"{self.where} is {found}; expected {family}'s")
        return layout

    def _raw(self) -> dict[Any, Any]:
        """Return the dictionary of raw weights."""
        parts = (self.document.get(key) for key in ("state_dict", "model"))
        return next((part for part in parts if isinstance(part, dict)), self.document)

    def _named_weights(self) -> dict[str, Tensor | StoredTensor]:
        """Return the raw weights without their prefix, in the file's order."""
        found, prefix = self._raw(), self.layout.prefix
        strange = [
            f"{name} is {value!r:.100}"
            for name, value in found.items()
            if not isinstance(name, str) or not isinstance(value, Tensor | StoredTensor)
        ]
        if strange:
            raise ValueError(f"{self.file}: expected tensors by name; {_some(strange, '; ')}")
        foreign = [name for name in found if name.startswith(PREFIX) != bool(prefix)]
        if foreign:
            wanted = f"names {'under' if prefix else 'without'} {PREFIX!r}"
            raise ValueError(f"{self.file}: expected {wanted}; found {_some(foreign)}")
        return {name.removeprefix(prefix): value for name, value in found.items()}

    def read_config(self, kind: Callable[..., Any], size: int) -> DiffusionConfig:
        """Return the configuration that the settings describe; `size` is the vocabulary's."""
        for key, wanted in self.layout.required.items():
            if (found := self._get(key)) != wanted:
                raise ValueError(f"{self.where}: {key} is {found!r}; only {wanted!r} is supported")
        key = "training.change_of_variables"  # then the network reads t, not sigma(t)
        if lookup(self.tree, "time_conditioning") and lookup(self.tree, *key.split(".")):
            raise ValueError(f"{self.where}: {key} is True; only False is supported")
        values = {field: self._get(key) for field, key in self.layout.keys.items()}
        try:
            config: DiffusionConfig = kind(vocab_size=size, **values)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error
        return config

    def _get(self, key: str) -> Any:
        """Return a setting by its path of keys, which must be there."""
        if (value := lookup(self.tree, *key.split("."))) is None:
            raise ValueError(f"{self.where} has no {key}")
        return value

    # ---- the mask

    def find_mask(self, given: int | None) -> tuple[int, int]:
        """Return the mask's row, and the number of tokens: all rows if it is one of the tokens.

        Every source that says something about the mask must say the same.
        """
        rows, config = self.rows, self.given
        name = lookup(self.tree, "data", "tokenizer_name_or_path")
        tokenizer = lookup(self.hyper, "tokenizer")
        vocabulary = _vocabulary(tokenizer) or TOKENIZERS.get(str(name))
        own = vocabulary is not None and vocabulary.mask is not None
        found: dict[str, Any] = {}
        if vocabulary is not None:
            described = f"{vocabulary.size} tokens, mask token {vocabulary.mask}"
            self._require_rows(f"its tokenizer ({described})", vocabulary.size + (not own))
            found["its tokenizer"] = vocabulary.mask if own else rows - 1
        if config is not None:
            self._require_rows("config", config.vocab_size + 1, config.vocab_size)
        elif self.layout.rows is not None:
            key, extra = self.layout.rows
            if type(size := self._get(key)) is not int or size < 1:
                raise ValueError(f"{self.where}: {key} is {size!r}; it must be a positive integer")
            self._require_rows(f"{key} of {self.where}", size + extra)
        for key in ("mask_index", "mask_token_id"):
            if (value := lookup(self.tree, key)) is not None:
                found[f"{key} of {self.where}"] = value
        if self.layout is SEDD_OWN or (config is not None and config.vocab_size == rows - 1):
            found["the size of its vocabulary"] = rows - 1
        if given is not None:
            found["the argument mask_token_id"] = given
        if not found and name is None and tokenizer is None and rows == GPT2.size + 1:
            found["the size of GPT-2's vocabulary"] = rows - 1  # as published, with nothing else
        if not found:
            raise ValueError(
                f"{self.file} does not say which of its {rows} rows is the mask. Pass "
                f"mask_token_id=, or add mask_token_id to its {CONFIG_FILE}: the id of the "
                f"tokenizer's mask token, or {rows - 1} if the tokenizer has none"
            )
        valid = all(type(mask) is int and 0 <= mask < rows for mask in found.values())
        if not valid or len(set(found.values())) > 1:
            listed = "; ".join(f"{source} gives {mask!r}" for source, mask in found.items())
            expected = f"expected one row in 0..{rows - 1}"
            raise ValueError(f"{self.file}: the row of the mask is ambiguous, {expected}: {listed}")
        mask = next(iter(found.values()))
        own = own or mask < rows - 1 or (config is not None and config.vocab_size == rows)
        return mask, rows if own else rows - 1

    def _require_rows(self, source: str, *sizes: int) -> None:
        """Raise a ValueError unless the table of embeddings has one of these numbers of rows."""
        if self.rows not in sizes:
            found = f"{self.file} has {self.rows} rows in {TABLE}"
            raise ValueError(f"{found}; {source} calls for {sizes[0]}, the mask included")


def _layout(tree: Any) -> CheckpointLayout | None:
    """Return the layout that a configuration belongs to, or None."""
    if lookup(tree, "graph", "type") is not None:
        return SEDD_OWN
    if lookup(tree, "model", "hidden_size") is not None:
        trained = {"sedd": SEDD_BY_MDLM, "subs": MDLM_TRAINED}
        return trained.get(str(lookup(tree, "parameterization")))
    flat = lookup(tree, "hidden_dim") is not None and lookup(tree, "n_blocks") is not None
    return MDLM_PUBLISHED if flat else None


def _vocabulary(tokenizer: Any) -> Vocabulary | None:
    """Return what a pickled tokenizer of `transformers` says, or None if it cannot be read."""
    ids = _token_ids(tokenizer) if isinstance(tokenizer, dict) else None
    special = lookup(tokenizer, "_special_tokens_map")  # since transformers 4.46
    if ids is None or not (isinstance(special, dict) or "_mask_token" in tokenizer):
        return None
    token = lookup(special, "mask_token") if special else lookup(tokenizer, "_mask_token")
    text = token.get("content") if isinstance(token, dict) else token  # an AddedToken, or a string
    if text is None:
        return Vocabulary(len(ids), None)
    return Vocabulary(len(ids), ids[text]) if isinstance(text, str) and text in ids else None


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the vocabulary: the largest table of integers, or that in a fast tokenizer's JSON."""
    tables = [lookup(value) for value in tokenizer.values()]
    raw = lookup(tokenizer, "_tokenizer")
    if isinstance(raw, bytes):
        try:
            vocab = json.loads(raw)["model"]["vocab"]
            pairs = isinstance(vocab, list)  # of a piece and its score
            tables = [{pair[0]: i for i, pair in enumerate(vocab)} if pairs else vocab]
        except (ValueError, LookupError, TypeError, RecursionError):
            return None
    tables = [table for table in tables if isinstance(table, dict)]
    tables = [table for table in tables if all(type(i) is int for i in table.values())]
    return max(tables, key=len, default=None)


# ---- weights


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file of weights and what it holds."""
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    if path.is_dir():
        files = [path / name for name in (WEIGHTS_FILE, PICKLE_FILE) if (path / name).is_file()]
        if not files:
            names = f"neither {WEIGHTS_FILE} nor {PICKLE_FILE} is in it"
            raise FileNotFoundError(f"{path} holds no weights: {names}")
        path = files[0]
    if path.suffix == ".safetensors":
        try:
            return path, load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    document = read_checkpoint(path)
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds {document!r:.100}; expected a dictionary of tensors")
    return path, document


def _check_frequencies(file: Path, found: Tensor | StoredTensor, head_size: int) -> None:
    """Raise a ValueError unless the rotary frequencies are those of `ROTARY_BASE`."""
    expected = ROTARY_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    alike = tuple(found.shape) == tuple(expected.shape)
    if not alike or not torch.allclose(_loaded(found).double(), expected, rtol=1e-2, atol=0.0):
        wanted = f"expected those of base {ROTARY_BASE:g} and head size {head_size}"
        raise ValueError(f"{file}: {FREQUENCIES} differ, {wanted}; is n_heads right?")


def _ema_weights(file: Path, averages: Any, raw: Weights) -> dict[str, Tensor | StoredTensor]:
    """Return the averaged weights by name.

    They are stored as a list in the order of the parameters, which is that of the raw weights.
    """
    listed = averages if isinstance(averages, list) else []
    alike = [tuple(value.shape) for value in raw.values()] == [
        tuple(value.shape) if isinstance(value, Tensor | StoredTensor) else None for value in listed
    ]
    if not alike:
        wanted = f"{len(raw)} tensors with the shapes of the raw weights"
        found = f"{len(listed)} that do not match; pass ema=False to load the raw weights"
        raise ValueError(f"{file}: expected ema.shadow_params to be {wanted}; found {found}")
    return dict(zip(raw, listed, strict=True))


def _with_mask_last(tensors: dict[str, Tensor], mask: int, scores: bool) -> dict[str, Tensor]:
    """Copy the mask's rows to the end, and give its own id probability zero."""
    rows = {name: torch.cat((tensors[name], tensors[name][mask, None])) for name in TOKEN_ROWS}
    bias = rows[HEAD_BIAS] = rows[HEAD_BIAS].double()
    if scores:  # SEDD subtracts the logarithm of the number of tokens, which is one more now
        bias += math.log((len(bias) - 1) / (len(bias) - 2))
    bias[mask] = IMPOSSIBLE
    return tensors | rows


def _loaded(value: Tensor | StoredTensor) -> Tensor:
    """Return a tensor, read from the file if it is still there."""
    return value.load() if isinstance(value, StoredTensor) else value


def _some(names: Any, join: str = ", ") -> str:
    """Return the first five names, and the number of the others."""
    listed = [str(name) for name in names]
    return join.join(listed[:5]) + (f"{join}and {len(listed) - 5} more" if len(listed) > 5 else "")
