"""A sensible tokeniser for data that comes without a word about it."""

from collections.abc import Mapping
from itertools import islice

from tracformer.data.sources import FileSource, Source
from tracformer.data.tokenizer_kinds import ALPHABETS

SAMPLE_PIECES = 1000
# Bytes of text, and the BPE vocabulary that it can fill with tokens seen often enough to be learnt.
BPE_SIZES = ((100_000, None), (2_000_000, 1024), (20_000_000, 4096), (500_000_000, 8192))
LARGEST_BPE = 32768


def choose_tokenizer(sources: Mapping[str, Source]) -> str:
    """`dna` or `protein` for FASTA, by its letters; for text `byte` if there is little of it, otherwise a BPE that grows with it."""
    source = sources.get("train") or next(iter(sources.values()))
    if isinstance(source, FileSource) and source.format == "fasta":
        letters = {letter for piece in islice(source.pieces(), SAMPLE_PIECES) for letter in piece.text}
        kind = "dna" if letters <= set(ALPHABETS["dna-aligned"]) else "protein"
        return f"{kind}-aligned" if source.reading.gaps == "keep" else kind
    size = source.size()
    if size is None:  # compressed, or on the hub: what a first stretch of it holds
        size = sum(len(piece.text) for piece in islice(source.pieces(), SAMPLE_PIECES * 10))
    for limit, vocabulary in BPE_SIZES:
        if size < limit:
            return "byte" if vocabulary is None else f"bpe:{vocabulary}"
    return f"bpe:{LARGEST_BPE}"
