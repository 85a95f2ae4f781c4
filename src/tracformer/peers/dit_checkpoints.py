"""Read the weights that the authors of SEDD and MDLM published, and the checkpoints that their training code writes.

- SEDD: a folder with `config.json` (its whole training tree) and `pytorch_model.bin`; or a training file {model, ema, optimizer, step}.
- MDLM: a folder with `config.json` and `model.safetensors`, names under `backbone.`; or a Lightning file {state_dict, ema, ...}.

Training files hold no configuration that can be read safely: it is taken from `config.json` beside the file, or given. A pickle is opened
only as far as torch can do so without running what it contains.
"""

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tracformer.model.storage import CONFIG_FILE, WEIGHTS_FILE, load_document
from tracformer.peers.diffusion import DiffusionConfig, DiffusionModel
from tracformer.peers.dit import ROTARY_BASE
from tracformer.peers.mdlm import MDLM, MDLMConfig
from tracformer.peers.pickled import read_pickle
from tracformer.peers.sedd import SEDD, SEDDConfig

PICKLE_FILE = "pytorch_model.bin"
FREQUENCIES = "rotary_emb.inv_freq"  # a buffer of theirs, computed here
PREFIX = "backbone."

Say = Callable[[str], None]
M = TypeVar("M", bound=DiffusionModel)
C = TypeVar("C", bound=DiffusionConfig)


def load_sedd(
    path: str | PathLike[str],
    *,
    config: SEDDConfig | None = None,
    averaged: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    say: Say = lambda text: None,
) -> SEDD:
    """SEDD from a published folder or a training file. Averaged (EMA) weights are taken where there are any, unless `averaged` is False;
    `say` is told which.
    """
    config = config or _checked(_sedd_config, Path(path))
    return _fill(SEDD, config, Path(path), "model", "", averaged, dtype, device, say)


def load_mdlm(
    path: str | PathLike[str],
    *,
    config: MDLMConfig | None = None,
    averaged: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    say: Say = lambda text: None,
) -> MDLM:
    """MDLM from a published folder or a Lightning file; see `load_sedd`."""
    config = config or _checked(_mdlm_config, Path(path))
    if config.backbone != "dit":
        raise ValueError(f"config has backbone {config.backbone!r}; published weights are those of 'dit'")
    return _fill(MDLM, config, Path(path), "state_dict", PREFIX, averaged, dtype, device, say)


def reader_of(document: Mapping[str, Any]) -> Callable[..., DiffusionModel] | None:
    """Which of the two reads the published folder with this `config.json`; None if it is neither's."""
    readers: dict[str, Callable[..., DiffusionModel]] = {"SEDD's": load_sedd, "MDLM's": load_mdlm}
    return readers.get(_kind(document))


# ---- configurations


def _document(path: Path) -> tuple[dict[str, Any], Path]:
    if not path.exists():
        raise FileNotFoundError(f"there is no {path}")
    folder = path if path.is_dir() else path.parent
    if path.is_file() and not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{path} holds weights without a configuration; put its {CONFIG_FILE} beside it, or pass config=")
    return load_document(folder), folder / CONFIG_FILE


def _checked(read: Callable[[Mapping[str, Any], Path], C], path: Path) -> C:
    """What `read` makes of the `config.json` at or beside the path; complaints about a value say where it stands."""
    document, file = _document(path)
    try:
        return read(document, file)
    except ValueError as error:
        raise error if str(file) in str(error) else ValueError(f"{file}: {error}") from error


def _kind(document: Mapping[str, Any]) -> str:
    if isinstance(document.get("graph"), Mapping):
        return "SEDD's"
    if "hidden_dim" in document and "n_blocks" in document:
        return "MDLM's"
    return f"of type {document.get('model_type')!r}"


def _sedd_config(document: Mapping[str, Any], path: Path) -> SEDDConfig:
    if _kind(document) != "SEDD's":
        raise ValueError(f"{path} is {_kind(document)}; expected SEDD's, with `graph`, `noise`, `model` and `tokens`")
    for key, wanted in (("graph.type", "absorb"), ("noise.type", "loglinear"), ("model.scale_by_sigma", True)):
        if (found := _get(document, key, path)) != wanted:
            raise ValueError(f"{path}: {key} is {found!r}; only {wanted!r} is supported")
    return SEDDConfig(
        vocab_size=_get(document, "tokens", path),
        max_length=_get(document, "model.length", path),
        n_layer=_get(document, "model.n_blocks", path),
        n_head=_get(document, "model.n_heads", path),
        d_model=_get(document, "model.hidden_size", path),
        d_condition=_get(document, "model.cond_dim", path),
        dropout=_get(document, "model.dropout", path),
    )


def _mdlm_config(document: Mapping[str, Any], path: Path) -> MDLMConfig:
    if _kind(document) != "MDLM's":
        raise ValueError(f"{path} is {_kind(document)}; expected MDLM's, with `hidden_dim`, `n_blocks` and others")
    rows = _get(document, "vocab_size", path)
    if not isinstance(rows, int) or rows < 2:
        raise ValueError(f"vocab_size is {rows!r}; it must be an integer, that of the tokens and the mask")
    return MDLMConfig(
        vocab_size=rows - 1,
        max_length=_get(document, "model_length", path),
        n_layer=_get(document, "n_blocks", path),
        n_head=_get(document, "n_heads", path),
        d_model=_get(document, "hidden_dim", path),
        d_condition=_get(document, "cond_dim", path),
        dropout=_get(document, "dropout", path),
        time_conditioning=_get(document, "time_conditioning", path),
    )


def _get(document: Mapping[str, Any], key: str, path: Path) -> Any:
    value: Any = document
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(f"{path} has no {key}")
        value = value[part]
    return value


# ---- weights


def _fill(
    kind: type[M],
    config: DiffusionConfig,
    path: Path,
    weights_key: str,
    prefix: str,
    averaged: bool,
    dtype: torch.dtype,
    device: str | torch.device,
    say: Say,
) -> M:
    with torch.device("meta"):
        model = kind(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.backbone.state_dict().items()}
    file, document = _read(path)
    found = document.get(weights_key, document)
    if not isinstance(found, Mapping) or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in found.items()):
        raise ValueError(f"{file} holds neither named tensors nor named tensors under {weights_key!r}; keys: {_some(document)}")
    weights = _renamed(file, found, prefix)
    frequencies = weights.pop(FREQUENCIES, None)
    if frequencies is not None:
        _check_frequencies(file, frequencies, config.d_model // config.n_head)
    _check_names(file, weights, expected)
    if isinstance(document.get("ema"), Mapping):
        if averaged:
            weights = _averages(file, document["ema"], weights)
        say(f"{file.name}: {'averaged (EMA)' if averaged else 'raw'} weights")
    model.backbone.load_state_dict({name: tensor.to(device, dtype) for name, tensor in weights.items()}, assign=True)
    return model.eval()


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    if path.is_dir():
        candidates = [path / name for name in (WEIGHTS_FILE, PICKLE_FILE) if (path / name).is_file()]
        if not candidates:
            raise FileNotFoundError(f"{path} holds no weights: neither {WEIGHTS_FILE} nor {PICKLE_FILE} is in it")
        path = candidates[0]
    if path.suffix == ".safetensors":
        try:
            return path, load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    document = read_pickle(path)
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a {type(document).__name__}; expected a dictionary of tensors")
    return path, document


def _renamed(file: Path, found: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Names without their prefix, in the file's order."""
    foreign = [name for name in found if not name.startswith(prefix) or (not prefix and name.startswith(PREFIX))]
    if foreign:
        expected = f"names under {prefix!r}, as MDLM writes them" if prefix else f"names without {PREFIX!r}, as SEDD writes them"
        raise ValueError(f"{file} is of another family: expected {expected}; found {_some(foreign)}")
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def _check_frequencies(file: Path, found: Tensor, head_size: int) -> None:
    expected = ROTARY_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if found.shape != expected.shape or not torch.allclose(found.double(), expected, rtol=1e-2, atol=0.0):
        raise ValueError(f"{file}: {FREQUENCIES} is not that of base {ROTARY_BASE:g} and head size {head_size}; is n_heads right?")


def _check_names(file: Path, found: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    table = "vocab_embed.embedding"
    if table in found and found[table].shape[1:] == expected[table][1:] and len(found[table]) != expected[table][0]:
        raise ValueError(
            f"{file} has {len(found[table])} rows in {table}; the configuration calls for {expected[table][0]}: "
            f"{expected[table][0] - 1} tokens and the mask"
        )
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensor.shape)} where the configuration calls for {expected[name]}"
        for name, tensor in found.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    if problems:
        raise ValueError(f"{file} does not match its configuration: {_some(problems, '; ')}")


def _averages(file: Path, ema: Mapping[str, Any], raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Averaged weights are an unnamed list in the order of the parameters, which is the order of the raw weights."""
    listed = ema.get("shadow_params")
    shapes = [getattr(tensor, "shape", None) for tensor in listed] if isinstance(listed, list) else None
    if listed is None or shapes != [tensor.shape for tensor in raw.values()]:
        raise ValueError(f"{file}: ema.shadow_params does not match the raw weights one by one; pass averaged=False to take the raw ones")
    return dict(zip(raw, listed, strict=True))


def _some(names: Any, join: str = ", ") -> str:
    listed = [str(name) for name in names]
    return join.join(listed[:5]) + (f"{join}and {len(listed) - 5} more" if len(listed) > 5 else "")
