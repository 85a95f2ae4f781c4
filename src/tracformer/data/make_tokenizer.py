"""Make, choose or load a tokenizer.

The tokenisers that are made here: bytes, characters of an alphabet, and byte-level BPE.

A tokeniser from a short string: a kind to build, a folder, a file, or an id of the Hugging Face
hub.

A sensible tokeniser for data that comes without a word about it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, takewhile
from os import PathLike
from pathlib import Path

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tracformer.data.sources import FileSource, Source
from tracformer.data.tokenizer import (
    FOREIGN,
    KIND_KEY,
    TOKENIZER_FILE,
    Tokenizer,
    read_config,
    reserve,
)
from tracformer.files import optional_package

UNALIGNED = {
    "dna": "ACGTN",
    "rna": "ACGUN",
    "nucleotide": "ACGTUNRYSWKMBDHV",  # DNA and RNA, with IUPAC's codes for several bases
    "protein": "ACDEFGHIKLMNPQRSTVWY"
    + "XBZUO",  # unknown, two ambiguous pairs, selenocysteine and pyrrolysine
}
ALPHABETS = UNALIGNED | {f"{name}-aligned": f"{letters}-" for name, letters in UNALIGNED.items()}
SMALLEST_BPE = 257  # every byte, and end of text
# not in any vocabulary: the library then refuses a foreign character instead of dropping it
UNKNOWN = "<|unknown|>"


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 is end of text.

    Any text goes through and comes back.
    """
    backend = Backend(
        models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return reserve(backend, "byte")


def char_tokenizer(alphabet: Iterable[str]) -> Tokenizer:
    """One id a character, in the order given; a character outside the alphabet is an error, not an
    unknown token.
    """
    letters = list(dict.fromkeys(alphabet))
    if not letters:
        raise ValueError(
            "the alphabet is empty; give at least one character, for instance char:ACGT"
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
    """The name of its alphabet if it has one, else its kind."""
    letters = "".join(tokenizer.tokens()[:-1]) if tokenizer.kind == "char" else ""
    return next(
        (name for name, alphabet in ALPHABETS.items() if alphabet == letters), tokenizer.kind
    )


def read_alphabet(texts: Iterable[str]) -> str:
    """Every character of the texts, in the order of Unicode."""
    seen = np.zeros(0x110000, bool)
    for text in texts:
        seen[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    return "".join(map(chr, np.flatnonzero(seen)))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE, words cut as in GPT-2.

    The same texts give the same tokeniser; little text may give fewer tokens than asked.
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
        vocab_size=vocab_size - 1,  # end of text comes behind
        initial_alphabet=byte_symbols(),
        special_tokens=[],
        show_progress=False,
    )
    backend.train_from_iterator(_in_batches(texts), trainer)
    return reserve(backend, "bpe")


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Bytes that Latin-1 prints stand for themselves, the others for the characters from U+0100 on, in
    order.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _in_batches(texts: Iterable[str], size: int = 256) -> Iterator[list[str]]:
    """Lists, because the library counts the words of a list on all cores."""
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
# characters that BPE learns from: more changes the merges little and fills memory with words
BPE_SAMPLE = 200_000_000


def build_tokenizer(spec: str | PathLike[str], texts: Texts | None = None) -> Tokenizer:
    """`byte`, `dna`, `protein`, `char:ACGT`; `char` and `bpe:4096` learn from texts; anything else
    is a folder, a file or a hub id.
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
                f"tokeniser is {name!r}; a BPE tokeniser names its vocabulary's size, for instance "
                "bpe:4096"
            )
        return train_bpe(_first(_needed(texts, name)(), BPE_SAMPLE), int(argument))
    return load_tokenizer(spec)


def load_tokenizer(where: str | PathLike[str]) -> Tokenizer:
    """A folder that tracformer wrote, any folder or `tokenizer.json` of Hugging Face, or a hub id
    such as `gpt2`.
    """
    path = Path(where)
    if path.is_file():
        return _with_name(path, lambda: _from_json(path, path.parent))
    if path.is_dir():
        if (path / TOKENIZER_FILE).is_file():
            return _with_name(path, lambda: _from_json(path / TOKENIZER_FILE, path))
        if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
            return _with_name(path, lambda: _from_merges(path))
        if not (path / "tokenizer_config.json").is_file():
            raise FileNotFoundError(
                f"{path} holds no tokeniser: there is no {TOKENIZER_FILE} in it"
            )
        return _from_transformers(str(path))
    if not HUB_ID.fullmatch(str(where)):
        raise FileNotFoundError(
            f"tokeniser is {str(where)!r}: no such file or folder; to build one, give one of: "
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
        raise ValueError(f"not a tokeniser of the `tokenizers` library: {error}") from error
    return reserve(backend, FOREIGN, _end_of_text(config, backend))


def _from_merges(folder: Path) -> Tokenizer:
    """GPT-2's own layout, `vocab.json` and `merges.txt`.

    Read here: transformers 5 makes an empty tokeniser of the two file names.
    """
    backend = Backend(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    config = read_config(folder)
    eot = _end_of_text(config, backend)
    if eot is not None:
        backend.add_special_tokens([eot])
    return reserve(backend, FOREIGN, eot)


def _from_transformers(name: str) -> Tokenizer:
    transformers = optional_package(
        "transformers", f"reading the tokeniser {name!r} of the Hugging Face hub", "hub"
    )
    try:
        found = transformers.AutoTokenizer.from_pretrained(name)
    # many kinds: no network, no such id, a file missing, a package missing
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(
            f"tokeniser is {name!r}: not a kind ({', '.join(KINDS)}), no file or folder here, and "
            f"the Hugging Face hub gave none: {first}"
        ) from error
    if not getattr(found, "is_fast", False):
        raise ValueError(
            f"tokeniser {name!r} has no fast version, which is the one that can be saved as "
            f"{TOKENIZER_FILE}; use another"
        )
    backend = Backend.from_str(found.backend_tokenizer.to_str())
    return _with_name(name, lambda: reserve(backend, FOREIGN, found.eos_token or found.sep_token))


def _end_of_text(config: dict[str, object], backend: Backend) -> str | None:
    """The token that its makers put behind a document, if they name one."""
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
        raise ValueError(
            f"tokeniser is {name!r}, which is learnt from text, and there is no text here; name a "
            "finished tokeniser"
        )
    return texts


def _first(texts: Iterable[str], characters: int) -> Iterable[str]:
    total = 0

    def wanted(text: str) -> bool:
        nonlocal total
        total += len(text)
        return total - len(text) < characters

    return takewhile(wanted, texts)


SAMPLE_PIECES = 1000
NUCLEOTIDES = ("dna", "rna", "nucleotide")  # the smallest alphabet first
# about a quarter of a protein's residues are written with these letters
BASES, MOSTLY = "ACGTUN", 0.95
# Bytes of text, and the BPE vocabulary that it can fill with tokens seen often enough to be learnt.
BPE_SIZES = ((100_000, None), (2_000_000, 1024), (20_000_000, 4096), (500_000_000, 8192))
LARGEST_BPE = 32768


def choose_tokenizer(sources: Mapping[str, Source]) -> str:
    """An alphabet for FASTA, by its letters; for text `byte` if there is little of it, otherwise a
    BPE that grows with it.
    """
    source = sources.get("train") or next(iter(sources.values()))
    if isinstance(source, FileSource) and source.format == "fasta":
        kind = _nucleotides(source, sources) if _mostly_bases(source) else "protein"
        return f"{kind}-aligned" if source.reading.gaps == "keep" else kind
    size = source.size()
    if size is None:  # compressed, or on the hub: what a first stretch of it holds
        size = sum(len(piece.text) for piece in islice(source.pieces(), SAMPLE_PIECES * 10))
    for limit, vocabulary in BPE_SIZES:
        if size < limit:
            return "byte" if vocabulary is None else f"bpe:{vocabulary}"
    return f"bpe:{LARGEST_BPE}"


def _mostly_bases(source: Source) -> bool:
    texts = [piece.text.replace("-", "") for piece in islice(source.pieces(), SAMPLE_PIECES)]
    return sum(text.count(base) for text in texts for base in BASES) >= MOSTLY * sum(
        map(len, texts)
    )


def _nucleotides(source: FileSource, sources: Mapping[str, Source]) -> str:
    """The smallest alphabet with every letter of every split: one rare code would
    stop the tokeniser later.
    """
    found = set(
        read_alphabet(piece.text for each in sources.values() for piece in each.pieces())
    ) - {"-"}
    if chosen := next((name for name in NUCLEOTIDES if found <= set(UNALIGNED[name])), None):
        return chosen
    others = ", ".join(repr(letter) for letter in sorted(found - set(UNALIGNED["nucleotide"])))
    raise ValueError(
        f"{source.files[0]} is nearly all nucleotides, and has letters that stand for none: "
        f"{others}. Is it a protein? "
        "Name its alphabet as the tokeniser (protein, or char for the letters as they are), or "
        "clean the file"
    )
