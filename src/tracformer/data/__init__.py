"""Data: tokenizers, sources of documents, prepared folders of token shards, and training rows.

The way of a text: `documents` reads it from files that `sources` found, `prepare` tokenizes it with
a `tokenizer` and writes `shards`, holding out validation data as `split` says, and `examples` reads
the shards as rows of tokens in shuffled order.
"""

from tracformer.data.documents import FORMATS, ReadOptions
from tracformer.data.examples import ExampleOrder, Examples, PackedBlocks, Records, open_examples
from tracformer.data.hub_sources import DETOKENIZERS, NAMED, HubSource, named_source
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
from tracformer.data.prepare import is_made_from, prepare, require_tokenizer
from tracformer.data.shards import PreparedData, Split
from tracformer.data.sources import (
    SETS,
    DataSource,
    FileSource,
    TextSource,
    named_sets,
    open_source,
    open_sources,
    parse_validation,
    whole_documents,
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
    "DataSource",
    "ExampleOrder",
    "Examples",
    "FileSource",
    "HubSource",
    "PackedBlocks",
    "PreparedData",
    "ReadOptions",
    "Records",
    "Split",
    "TextSource",
    "Tokenizer",
    "build_tokenizer",
    "byte_tokenizer",
    "char_tokenizer",
    "choose_tokenizer",
    "is_made_from",
    "load_tokenizer",
    "name_of",
    "named_sets",
    "named_source",
    "open_examples",
    "open_source",
    "open_sources",
    "parse_validation",
    "prepare",
    "read_alphabet",
    "require_same_tokenizer",
    "require_tokenizer",
    "train_bpe",
    "whole_documents",
]
