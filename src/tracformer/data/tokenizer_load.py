"""A tokeniser from a short string: a kind to build, a folder, a file, or an id of the Hugging Face hub."""

import re
from collections.abc import Callable, Iterable
from itertools import takewhile
from os import PathLike
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tracformer.data.tokenizer import FOREIGN, KIND_KEY, TOKENIZER_FILE, Tokenizer, read_config, reserve
from tracformer.data.tokenizer_kinds import ALPHABETS, byte_tokenizer, char_tokenizer, read_alphabet, train_bpe
from tracformer.files import optional_package

Texts = Callable[[], Iterable[str]]
KINDS = ("byte", "char", "char:LETTERS", *ALPHABETS, "bpe:SIZE")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
BPE_SAMPLE = 200_000_000  # characters that BPE learns from: more changes the merges little and fills memory with words


def build_tokenizer(spec: str | PathLike[str], texts: Texts | None = None) -> Tokenizer:
    """`byte`, `dna`, `protein`, `char:ACGT`; `char` and `bpe:4096` learn from texts; anything else is a folder, a file or a hub id."""
    name = str(spec)
    kind, _, argument = name.partition(":")
    if name == "byte":
        return byte_tokenizer()
    if name in ALPHABETS:
        return char_tokenizer(ALPHABETS[name])
    if kind == "char" and argument:
        return char_tokenizer(argument)
    if name == "char":
        return char_tokenizer(read_alphabet(_needed(texts, name)()))
    if kind == "bpe":
        if not argument.isdecimal():
            raise ValueError(f"tokeniser is {name!r}; a BPE tokeniser names its vocabulary's size, for instance bpe:4096")
        return train_bpe(_first(_needed(texts, name)(), BPE_SAMPLE), int(argument))
    return load_tokenizer(spec)


def load_tokenizer(where: str | PathLike[str]) -> Tokenizer:
    """A folder that tracformer wrote, any folder or `tokenizer.json` of Hugging Face, or a hub id such as `gpt2`."""
    path = Path(where)
    if path.is_file():
        return _with_name(path, lambda: _from_json(path, path.parent))
    if path.is_dir():
        if (path / TOKENIZER_FILE).is_file():
            return _with_name(path, lambda: _from_json(path / TOKENIZER_FILE, path))
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return _with_name(path, lambda: _from_merges(path))
        if not (path / "tokenizer_config.json").is_file():
            raise FileNotFoundError(f"{path} holds no tokeniser: there is no {TOKENIZER_FILE} in it")
        return _from_transformers(str(path))
    if not HUB_ID.fullmatch(str(where)):
        raise FileNotFoundError(f"tokeniser is {str(where)!r}: no such file or folder; to build one, give one of: {', '.join(KINDS)}")
    return _from_transformers(str(where))


def _from_json(file: Path, folder: Path) -> Tokenizer:
    config = read_config(folder)
    if KIND_KEY in config and file.name == TOKENIZER_FILE:
        return Tokenizer.load(folder)
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"not a tokeniser of the `tokenizers` library: {error}") from error
    return reserve(backend, FOREIGN, _end_of_text(config, backend))


def _from_merges(folder: Path) -> Tokenizer:
    """GPT-2's own layout, `vocab.json` and `merges.txt`. Read here: transformers 5 makes an empty tokeniser of the two file names."""
    backend = Backend(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    config = read_config(folder)
    eot = _end_of_text(config, backend)
    if eot is not None:
        backend.add_special_tokens([eot])
    return reserve(backend, FOREIGN, eot)


def _from_transformers(name: str) -> Tokenizer:
    transformers = optional_package("transformers", f"reading the tokeniser {name!r} of the Hugging Face hub", "hub")
    try:
        found = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # many kinds: no network, no such id, a file missing, a package missing
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"tokeniser is {name!r}: not a kind ({', '.join(KINDS)}), no file or folder here, and the Hugging Face hub gave none: {first}"
        ) from error
    if not getattr(found, "is_fast", False):
        raise ValueError(f"tokeniser {name!r} has no fast version, which is the one that can be saved as {TOKENIZER_FILE}; use another")
    backend = Backend.from_str(found.backend_tokenizer.to_str())
    return _with_name(name, lambda: reserve(backend, FOREIGN, found.eos_token or found.sep_token))


def _end_of_text(config: dict[str, object], backend: Backend) -> str | None:
    """The token that its makers put behind a document, if they name one."""
    named = [config.get("eos_token"), config.get("sep_token")]
    named = [token.get("content") if isinstance(token, dict) else token for token in named]
    usual = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"]
    return next((token for token in [*named, *usual] if isinstance(token, str) and backend.token_to_id(token) is not None), None)


def _with_name(where: object, read: Callable[[], Tokenizer]) -> Tokenizer:
    """Complaints about a tokeniser say which, and an empty one is a complaint."""
    try:
        tokenizer = read()
    except ValueError as error:
        raise ValueError(f"{where} cannot be used as a tokeniser: {error}") from error
    if tokenizer.vocab_size < 2:
        raise ValueError(f"{where} cannot be used as a tokeniser: its vocabulary is empty")
    return tokenizer


def _needed(texts: Texts | None, name: str) -> Texts:
    if texts is None:
        raise ValueError(f"tokeniser is {name!r}, which is learnt from text, and there is no text here; name a finished tokeniser")
    return texts


def _first(texts: Iterable[str], characters: int) -> Iterable[str]:
    total = 0

    def wanted(text: str) -> bool:
        nonlocal total
        total += len(text)
        return total - len(text) < characters

    return takewhile(wanted, texts)
