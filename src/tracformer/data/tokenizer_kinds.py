"""The tokenisers that are made here: bytes, characters of an alphabet, and byte-level BPE."""

from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tracformer.data.tokenizer import Tokenizer, reserve

UNALIGNED = {
    "dna": "ACGTN",
    "rna": "ACGUN",
    "nucleotide": "ACGTUNRYSWKMBDHV",  # DNA and RNA, with IUPAC's codes for several bases
    "protein": "ACDEFGHIKLMNPQRSTVWY" + "XBZUO",  # unknown, two ambiguous pairs, selenocysteine and pyrrolysine
}
ALPHABETS = UNALIGNED | {f"{name}-aligned": f"{letters}-" for name, letters in UNALIGNED.items()}
SMALLEST_BPE = 257  # every byte, and end of text
UNKNOWN = "<|unknown|>"  # not in any vocabulary: the library then refuses a foreign character instead of dropping it


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes of UTF-8, 256 is end of text. Any text goes through and comes back."""
    backend = Backend(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(byte_symbols())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return reserve(backend, "byte")


def char_tokenizer(alphabet: Iterable[str]) -> Tokenizer:
    """One id a character, in the order given; a character outside the alphabet is an error, not an unknown token."""
    letters = list(dict.fromkeys(alphabet))
    if not letters:
        raise ValueError("the alphabet is empty; give at least one character, for instance char:ACGT")
    if long := [letter for letter in letters if len(letter) != 1]:
        raise ValueError(f"the alphabet holds {long[0]!r}, which is not one character")
    backend = Backend(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return reserve(backend, "char")


def name_of(tokenizer: Tokenizer) -> str:
    """The name of its alphabet if it has one, else its kind."""
    letters = "".join(tokenizer.tokens()[:-1]) if tokenizer.kind == "char" else ""
    return next((name for name, alphabet in ALPHABETS.items() if alphabet == letters), tokenizer.kind)


def read_alphabet(texts: Iterable[str]) -> str:
    """Every character of the texts, in the order of Unicode."""
    seen = np.zeros(0x110000, bool)
    for text in texts:
        seen[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    return "".join(map(chr, np.flatnonzero(seen)))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE, words cut as in GPT-2. The same texts give the same tokeniser; little text may give fewer tokens than asked."""
    if vocab_size < SMALLEST_BPE:
        raise ValueError(f"a BPE vocabulary of {vocab_size} is too small; it needs at least {SMALLEST_BPE}: 256 bytes and end of text")
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

    Bytes that Latin-1 prints stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
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
