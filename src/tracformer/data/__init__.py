"""Data: tokenisers, sources of documents, prepared folders of token shards, and the order in which they are read."""

from tracformer.data.choice import choose_tokenizer
from tracformer.data.detokenize import DETOKENIZERS
from tracformer.data.formats import FORMATS, Reading
from tracformer.data.hub import NAMED, HubSource, named_source
from tracformer.data.loader import PreparedData, Split
from tracformer.data.order import ExampleOrder
from tracformer.data.shards import is_made_from, prepare, require_tokenizer
from tracformer.data.sources import SETS, FileSource, Source, TextSource, documents, named_sets, open_source, open_sources, parse_validation
from tracformer.data.tokenizer import EOT, MASK, AlphabetError, Tokenizer, require_same_tokenizer
from tracformer.data.tokenizer_kinds import ALPHABETS, byte_tokenizer, char_tokenizer, name_of, read_alphabet, train_bpe
from tracformer.data.tokenizer_load import KINDS, build_tokenizer, load_tokenizer
from tracformer.data.views import Examples, PackedBlocks, Records, examples

__all__ = [
    "ALPHABETS",
    "DETOKENIZERS",
    "EOT",
    "FORMATS",
    "KINDS",
    "MASK",
    "NAMED",
    "SETS",
    "AlphabetError",
    "ExampleOrder",
    "Examples",
    "FileSource",
    "HubSource",
    "PackedBlocks",
    "PreparedData",
    "Reading",
    "Records",
    "Source",
    "Split",
    "TextSource",
    "Tokenizer",
    "build_tokenizer",
    "byte_tokenizer",
    "char_tokenizer",
    "choose_tokenizer",
    "documents",
    "examples",
    "is_made_from",
    "load_tokenizer",
    "name_of",
    "named_sets",
    "named_source",
    "open_source",
    "open_sources",
    "parse_validation",
    "prepare",
    "read_alphabet",
    "require_same_tokenizer",
    "require_tokenizer",
    "train_bpe",
]
