"""Data: tokenisers, sources of documents, prepared folders of token shards, and the order in which
they are read.

Text that the package writes itself, with rules that can be checked.
"""

from tracformer.data.detokenize import DETOKENIZERS
from tracformer.data.make_tokenizer import (
    ALPHABETS,
    KINDS,
    build_tokenizer,
    byte_tokenizer,
    char_tokenizer,
    choose_tokenizer,
    load_tokenizer,
    name_of,
    read_alphabet,
    train_bpe,
)
from tracformer.data.preparation import is_made_from, prepare, require_tokenizer
from tracformer.data.readers import FORMATS, Reading
from tracformer.data.rows import ExampleOrder, Examples, PackedBlocks, Records, examples
from tracformer.data.shards import PreparedData, Split
from tracformer.data.sources import (
    NAMED,
    SETS,
    FileSource,
    HubSource,
    Source,
    TextSource,
    documents,
    named_sets,
    named_source,
    open_source,
    open_sources,
    parse_validation,
)
from tracformer.data.tokenizer import EOT, MASK, AlphabetError, Tokenizer, require_same_tokenizer

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
