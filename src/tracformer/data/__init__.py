"""Data: tokenizers, sources of documents, prepared folders of token shards, and training rows.

The way of a text: `documents` reads it from files that `sources` found, `prepare` tokenizes it with
a `tokenizer` and writes `shards`, holding out validation data as `split` says, and `examples` reads
the shards as rows of tokens in shuffled order.

Names are imported on first use: reading a tokenizer does not import what prepares data.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracformer.data.documents import FORMATS, ReadOptions
    from tracformer.data.examples import (
        ExampleOrder,
        Examples,
        PackedBlocks,
        Records,
        open_examples,
    )
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
    from tracformer.data.prepare import is_made_from, require_tokenizer
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
    from tracformer.data.tokenizer import (
        EOT,
        MASK,
        AlphabetError,
        Tokenizer,
        require_same_tokenizer,
    )

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
    "read_alphabet",
    "require_same_tokenizer",
    "require_tokenizer",
    "train_bpe",
    "whole_documents",
]

_HOMES = {
    "ALPHABETS": "make_tokenizer",
    "AlphabetError": "tokenizer",
    "DETOKENIZERS": "hub_sources",
    "DataSource": "sources",
    "EOT": "tokenizer",
    "ExampleOrder": "examples",
    "Examples": "examples",
    "FORMATS": "documents",
    "FileSource": "sources",
    "HubSource": "hub_sources",
    "KINDS": "make_tokenizer",
    "MASK": "tokenizer",
    "NAMED": "hub_sources",
    "PackedBlocks": "examples",
    "PreparedData": "shards",
    "ReadOptions": "documents",
    "Records": "examples",
    "SETS": "sources",
    "Split": "shards",
    "TextSource": "sources",
    "Tokenizer": "tokenizer",
    "build_tokenizer": "make_tokenizer",
    "byte_tokenizer": "make_tokenizer",
    "char_tokenizer": "make_tokenizer",
    "choose_tokenizer": "make_tokenizer",
    "is_made_from": "prepare",
    "load_tokenizer": "make_tokenizer",
    "name_of": "make_tokenizer",
    "named_sets": "sources",
    "named_source": "hub_sources",
    "open_examples": "examples",
    "open_source": "sources",
    "open_sources": "sources",
    "parse_validation": "sources",
    "read_alphabet": "make_tokenizer",
    "require_same_tokenizer": "tokenizer",
    "require_tokenizer": "prepare",
    "train_bpe": "make_tokenizer",
    "whole_documents": "sources",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
