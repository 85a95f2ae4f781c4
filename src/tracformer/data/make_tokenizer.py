"""Make, load or choose a tokenizer.

byte_tokenizer, char_tokenizer   one id per byte, or per character of an alphabet
train_bpe                        learn a byte-level BPE from texts
load_tokenizer                   read a folder, a file or an id of the Hugging Face hub
build_tokenizer                  any of these from a short text such as "bpe:4096" or "gpt2"
choose_tokenizer                 choose such a text for data
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, takewhile
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tracformer.data.tokenizer import (
    FOREIGN,
    KIND_KEY,
    TOKENIZER_FILE,
    Tokenizer,
    read_config,
    reserve,
)
from tracformer.files import optional_package

if TYPE_CHECKING:
    from tracformer.data.sources import DataSource, FileSource

UNALIGNED = {
    "dna": "ACGTN",
    "rna": "ACGUN",
    "nucleotide": "ACGTUNRYSWKMBDHV",  # DNA and RNA, with IUPAC's codes for several bases
    "protein": "ACDEFGHIKLMNPQRSTVWY"
    + "XBZUO",  # unknown, two ambiguous pairs, selenocysteine and pyrrolysine
}
ALPHABETS = UNALIGNED | {f"{name}-aligned": f"{letters}-" for name, letters in UNALIGNED.items()}
SMALLEST_BPE = 257  # every byte, and end of text
# In no vocabulary, so the library refuses an unknown character instead of dropping it.
UNKNOWN = "<|unknown|>"


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of bytes: ids 0..255 are the bytes of UTF-8, 256 is end of text."""
    backend = Backend(
        models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return reserve(backend, "byte")


def char_tokenizer(alphabet: Iterable[str]) -> Tokenizer:
    """Return a tokenizer with one id per character, in the order given.

    Encoding a character outside the alphabet raises `AlphabetError`; there is no unknown token.

    Args:
        alphabet: The characters; repeated ones count once.
    """
    letters = list(dict.fromkeys(alphabet))
    if not letters:
        raise ValueError(
            "the alphabet is empty; give at least one character, for example char:ACGT"
        )
    if long := [letter for letter in letters if len(letter) != 1]:
        raise ValueError(f"the alphabet holds {long[0]!r}, which is not one character")
    backend = Backend(
        models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return reserve(backend, "char")


def name_of(tokenizer: Tokenizer) -> str:
    """Return the name of the tokenizer's alphabet if it has a known one, else its kind."""
    letters = "".join(tokenizer.tokens()[:-1]) if tokenizer.kind == "char" else ""
    return next(
        (name for name, alphabet in ALPHABETS.items() if alphabet == letters), tokenizer.kind
    )


def read_alphabet(texts: Iterable[str]) -> str:
    """Return every character of the texts, in the order of Unicode."""
    seen = np.zeros(0x110000, bool)
    for text in texts:
        seen[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    return "".join(map(chr, np.flatnonzero(seen)))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE that divides text into words as GPT-2 does.

    The same texts give the same tokenizer. Little text may give fewer tokens than `vocab_size`.

    Args:
        texts: Texts to learn from.
        vocab_size: Number of tokens, at least 257: 256 bytes and end of text.
    """
    if vocab_size < SMALLEST_BPE:
        raise ValueError(
            f"a BPE vocabulary of {vocab_size} is too small; it needs at least {SMALLEST_BPE}: 256 "
            "bytes and end of text"
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # `reserve` adds end of text
        initial_alphabet=byte_symbols(),
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(_in_batches(texts), trainer)
    return reserve(backend, "bpe")


def byte_symbols() -> list[str]:
    """Return the printable character that each byte is written as in byte-level vocabularies.

    A byte that is printable in Latin-1 is written as itself; the others are written as the
    characters from U+0100 on, in order.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _in_batches(texts: Iterable[str], size: int = 256) -> Iterator[list[str]]:
    # in lists, because the library counts the words of a list on all cores
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


Texts = Callable[[], Iterable[str]]
KINDS = ("byte", "char", "char:LETTERS", *ALPHABETS, "bpe:SIZE")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Characters that BPE learns from. More would hardly change the merges, and would need much memory.
BPE_SAMPLE = 200_000_000


def build_tokenizer(spec: str | PathLike[str], texts: Texts | None = None) -> Tokenizer:
    """Return the tokenizer that a short text means.

    Args:
        spec: `byte`; an alphabet such as `dna` or `protein`; `char:ACGT`; `char` or `bpe:4096`,
            which learn from `texts`; or a folder, a file or an id of the Hugging Face hub.
        texts: Function that returns the texts to learn from.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: The tokenizer cannot be built or read.
    """
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
            raise ValueError(
                f"tokenizer is {name!r}; a BPE tokenizer needs the size of its vocabulary, for "
                "example bpe:4096"
            )
        return train_bpe(_first(_needed(texts, name)(), BPE_SAMPLE), int(argument))
    return load_tokenizer(spec)


def load_tokenizer(where: str | PathLike[str]) -> Tokenizer:
    """Read a tokenizer.

    Args:
        where: A folder that tracformer wrote, a folder or `tokenizer.json` of Hugging Face, GPT-2's
            `vocab.json` and `merges.txt` in a folder, or an id of the hub such as `gpt2`.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: It is not a tokenizer that can be used.
    """
    path = Path(where)
    if path.is_file():
        return _with_name(path, lambda: _from_json(path, path.parent))
    if path.is_dir():
        if (path / TOKENIZER_FILE).is_file():
            return _with_name(path, lambda: _from_json(path / TOKENIZER_FILE, path))
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return _with_name(path, lambda: _from_merges(path))
        config = read_config(path)
        if not config or KIND_KEY in config:
            raise FileNotFoundError(
                f"{path} has no tokenizer: there is no {TOKENIZER_FILE} in it; copy the one that "
                "the model was trained with into the folder"
            )
        return _from_transformers(str(path), local=True)
    # A mistyped path also looks like an id of the hub.
    in_folder = len(path.parts) > 1 and path.parent.is_dir()
    if in_folder or str(where).startswith(".") or not HUB_ID.fullmatch(str(where)):
        raise FileNotFoundError(
            f"tokenizer is {str(where)!r}: no such file or folder; to build one, use one of: "
            f"{', '.join(KINDS)}"
        )
    return _from_transformers(str(where))


def _from_json(file: Path, folder: Path) -> Tokenizer:
    config = read_config(folder)
    if KIND_KEY in config and file.name == TOKENIZER_FILE:
        return Tokenizer.load(folder)
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"not a tokenizer of the `tokenizers` library: {error}") from error
    return reserve(backend, FOREIGN, _end_of_text(config, backend))


def _from_merges(folder: Path) -> Tokenizer:
    # GPT-2's own files. Read here, because transformers 5 makes an empty tokenizer from them.
    backend = Backend(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    config = read_config(folder)
    eot = _end_of_text(config, backend)
    if eot is not None:
        backend.add_special_tokens([eot])
    return reserve(backend, FOREIGN, eot)


def _from_transformers(name: str, local: bool = False) -> Tokenizer:
    transformers = optional_package(
        "transformers", f"reading the tokenizer {name!r} of the Hugging Face hub", "hub"
    )
    try:
        found = transformers.AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, local_files_only=local
        )
    # many kinds of error: no network, no such id, a missing file, a missing package
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if local:
            raise ValueError(
                f"{name} has no {TOKENIZER_FILE}, and transformers cannot read its other tokenizer "
                f"files: {first}"
            ) from error
        raise ValueError(
            f"tokenizer is {name!r}: not one of {', '.join(KINDS)}, not a file or folder, and it "
            f"could not be read from the Hugging Face hub: {first}"
        ) from error
    if not getattr(found, "is_fast", False):
        raise ValueError(
            f"tokenizer {name!r} has no fast version, and only a fast one can be saved as "
            f"{TOKENIZER_FILE}; use another"
        )
    backend = Backend.from_str(found.backend_tokenizer.to_str())
    return _with_name(name, lambda: reserve(backend, FOREIGN, found.eos_token or found.sep_token))


def _end_of_text(config: dict[str, object], backend: Backend) -> str | None:
    """Return the token that ends a document, if the tokenizer has one."""
    named = [config.get("eos_token"), config.get("sep_token")]
    named = [token.get("content") if isinstance(token, dict) else token for token in named]
    usual = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]"]
    return next(
        (
            token
            for token in [*named, *usual]
            if isinstance(token, str) and backend.token_to_id(token) is not None
        ),
        None,
    )


def _with_name(where: object, read: Callable[[], Tokenizer]) -> Tokenizer:
    """Add the tokenizer's place to errors, and refuse an empty vocabulary."""
    try:
        tokenizer = read()
    except ValueError as error:
        raise ValueError(f"{where} cannot be used as a tokenizer: {error}") from error
    if tokenizer.vocab_size < 2:
        raise ValueError(f"{where} cannot be used as a tokenizer: its vocabulary is empty")
    return tokenizer


def _needed(texts: Texts | None, name: str) -> Texts:
    if texts is None:
        raise ValueError(
            f"tokenizer is {name!r}, which is learned from text, and there is no text here; give a "
            "finished tokenizer"
        )
    return texts


def _first(texts: Iterable[str], characters: int) -> Iterable[str]:
    """Yield texts until they have this many characters."""
    total = 0

    def wanted(text: str) -> bool:
        nonlocal total
        total += len(text)
        return total - len(text) < characters

    return takewhile(wanted, texts)


SAMPLE_PIECES = 1000
NUCLEOTIDES = ("dna", "rna", "nucleotide")  # the smallest alphabet first
# A source with at least this share of these letters is DNA or RNA; of a protein's residues, about
# a quarter are.
BASES, MOSTLY = "ACGTUN", 0.95
# Sequences long enough to tell; and the share of each kind from which a file is mixed by mistake.
CLEAR, MIXED = 30, 0.05
# Sizes of text in bytes, and the BPE vocabulary for less text than that: its tokens should occur
# often enough to be learned.
BPE_SIZES = ((100_000, None), (2_000_000, 1024), (20_000_000, 4096), (500_000_000, 8192))
LARGEST_BPE = 32768


def choose_tokenizer(sources: "Mapping[str, DataSource]") -> str:
    """Return a tokenizer for data, in the form that `build_tokenizer` takes.

    For FASTA files it is an alphabet, chosen by the letters. For text it is `byte` if there is
    little text, else a BPE whose vocabulary grows with the size of the text.

    Args:
        sources: One source per split.
    """
    from tracformer.data.sources import FileSource  # not needed to read a tokenizer

    source = sources.get("train") or next(iter(sources.values()))
    if isinstance(source, FileSource) and source.format in ("fasta", "alignment"):
        kind = _nucleotides(source, sources) if _mostly_bases(source) else "protein"
        return f"{kind}-aligned" if source.options.gaps == "keep" else kind
    size = source.size()
    if size is None:  # compressed, or on the hub: count what comes first
        size = sum(len(piece.text) for piece in islice(source.pieces(), SAMPLE_PIECES * 10))
    for limit, vocabulary in BPE_SIZES:
        if size < limit:
            return "byte" if vocabulary is None else f"bpe:{vocabulary}"
    return f"bpe:{LARGEST_BPE}"


def _mostly_bases(source: "FileSource") -> bool:
    texts = [piece.text.replace("-", "") for piece in islice(source.pieces(), SAMPLE_PIECES)]
    # short sequences may be of either kind
    clear = [text for text in texts if len(text) >= CLEAR]
    bases = sum(sum(map(text.count, BASES)) >= MOSTLY * len(text) for text in clear)
    if MIXED * len(clear) < bases < (1 - MIXED) * len(clear):
        raise ValueError(
            f"{source.files[0]} has both nucleotide and protein sequences ({bases} and "
            f"{len(clear) - bases} of the first {len(texts)}); put them in two files, or give "
            "the alphabet as the tokenizer (protein, or char for the letters as they are)"
        )
    return sum(text.count(base) for text in texts for base in BASES) >= MOSTLY * sum(
        map(len, texts)
    )


def _nucleotides(source: "FileSource", sources: "Mapping[str, DataSource]") -> str:
    # every letter of every split counts: a rare one would stop the tokenizer later
    found = set(
        read_alphabet(piece.text for each in sources.values() for piece in each.pieces())
    ) - {"-"}
    if chosen := next((name for name in NUCLEOTIDES if found <= set(UNALIGNED[name])), None):
        return chosen
    others = ", ".join(repr(letter) for letter in sorted(found - set(UNALIGNED["nucleotide"])))
    raise ValueError(
        f"{source.files[0]} is mostly nucleotides, but has letters that are no nucleotide codes: "
        f"{others}. Is it a protein? Give its alphabet as the tokenizer (protein, or char for the "
        "letters as they are), or clean the file"
    )
