"""A sensible tokeniser for data that comes without a word about it."""

from collections.abc import Mapping
from itertools import islice

from tracformer.data.sources import FileSource, Source
from tracformer.data.tokenizer_kinds import UNALIGNED, read_alphabet

SAMPLE_PIECES = 1000
NUCLEOTIDES = ("dna", "rna", "nucleotide")  # the smallest alphabet first
BASES, MOSTLY = "ACGTUN", 0.95  # about a quarter of a protein's residues are written with these letters
# Bytes of text, and the BPE vocabulary that it can fill with tokens seen often enough to be learnt.
BPE_SIZES = ((100_000, None), (2_000_000, 1024), (20_000_000, 4096), (500_000_000, 8192))
LARGEST_BPE = 32768


def choose_tokenizer(sources: Mapping[str, Source]) -> str:
    """An alphabet for FASTA, by its letters; for text `byte` if there is little of it, otherwise a BPE that grows with it."""
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
    return sum(text.count(base) for text in texts for base in BASES) >= MOSTLY * sum(map(len, texts))


def _nucleotides(source: FileSource, sources: Mapping[str, Source]) -> str:
    """The smallest alphabet with every letter of every split: one rare code would stop the tokeniser later."""
    found = set(read_alphabet(piece.text for each in sources.values() for piece in each.pieces())) - {"-"}
    if chosen := next((name for name in NUCLEOTIDES if found <= set(UNALIGNED[name])), None):
        return chosen
    others = ", ".join(repr(letter) for letter in sorted(found - set(UNALIGNED["nucleotide"])))
    raise ValueError(
        f"{source.files[0]} is nearly all nucleotides, and has letters that stand for none: {others}. Is it a protein? "
        "Name its alphabet as the tokeniser (protein, or char for the letters as they are), or clean the file"
    )
