"""Turn text files, JSONL, FASTA, or a hub data set into token shards.

    tracformer prepare my.txt --out data/my
    tracformer prepare my.txt --validation held.txt --out data/my
    tracformer prepare 'books/*.jsonl.gz' --field body --tokenizer bpe:8192 --out data/books
    tracformer prepare family.fasta --tokenizer protein --gaps remove --out data/family
    # no held-out domain resembles a training one
    tracformer prepare PF00014.fasta --identity 0.6 --out data/kunitz
    tracformer prepare wikitext103 --tokenizer openai-community/gpt2 --out data/wikitext103
    # trained on together, the first one's validation
    tracformer prepare wikitext2 wikipedia-2006 --tokenizer bpe:4096 --out data/both
    # files of named sets that lie in a folder, no download
    tracformer prepare ptb --from FOLDER --out data/ptb
    tracformer prepare hf:owner/name --out data/name
    # a source of the exact benchmark
    tracformer prepare exact:hmm-16,sequences=20000 --out data/hmm-16

The folder holds memory-mapped shards, an index, the tokeniser and a manifest with the SHA-256 of
each file.
"""

import argparse
import json
from typing import Any

DRAWN = "exact:"  # sources of the exact benchmark


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="+",
        help="files, folders or globs; or names of data sets; or hf:OWNER/NAME; or exact:SOURCE",
    )
    parser.add_argument("--out", required=True, help="the folder to write; it must not exist")
    parser.add_argument(
        "--tokenizer",
        default="auto",
        help=(
            "auto, byte, char, char:LETTERS, dna, rna, nucleotide or protein (or these with "
            "-aligned), bpe:SIZE, a folder or a hub id"
        ),
    )
    parser.add_argument(
        "--validation",
        metavar="FRACTION | FILE",
        default="0.05",
        help=(
            "the fraction to hold back where there is no such split; or the file, folder or glob "
            "that is this split (default: 0.05)"
        ),
    )
    parser.add_argument(
        "--identity",
        type=float,
        metavar="SHARE",
        help=(
            "aligned FASTA: what is held back, for validation and as much again for test, shares "
            "at most so much with any training record"
        ),
    )
    parser.add_argument(
        "--from",
        dest="folder",
        metavar="FOLDER",
        help="a folder with the files of named data sets, instead of a download",
    )
    parser.add_argument(
        "--format", help="text, jsonl, fasta or alignment (default: by the file's ending)"
    )
    parser.add_argument("--field", help="JSONL: the field that holds the text")
    parser.add_argument("--documents", help="text: what ends a document")
    parser.add_argument(
        "--gaps", help="FASTA: keep or remove gaps (default: kept where the tokeniser has them)"
    )
    parser.add_argument(
        "--detokenize", help="undo a corpus's tokenisation: wikitext, ptb, lambada or 1bw"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def run(arguments: argparse.Namespace) -> int:
    from tracformer.data import name_of, open_sources, parse_validation, prepare

    names = ("format", "field", "documents", "gaps", "detokenize")
    options: dict[str, Any] = {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
    where = arguments.source[0] if len(arguments.source) == 1 else arguments.source
    fraction, held = parse_validation(arguments.validation)
    if isinstance(where, str) and where.startswith(DRAWN):
        if (
            options
            or held
            or arguments.folder
            or arguments.tokenizer != "auto"
            or arguments.identity is not None
        ):
            raise ValueError(
                f"{where!r} is drawn, not read: it has its own alphabet and validation, and takes "
                "no option of files"
            )
        from tracformer.evaluation.exact import parse_exact

        drawn = parse_exact(where)
        data = prepare(
            arguments.out,
            drawn.splits(),
            drawn.tokenizer,
            overwrite=arguments.overwrite,
            quiet=arguments.json,
        )
    else:
        sources = open_sources(where, validation=held, folder=arguments.folder, **options)
        data = prepare(
            arguments.out,
            sources,
            arguments.tokenizer,
            validation=fraction,
            identity=arguments.identity,
            overwrite=arguments.overwrite,
            quiet=arguments.json,
        )
    counts = {
        name: {"documents": split.documents, "tokens": split.tokens, "bytes": split.bytes}
        for name, split in data.manifest.splits.items()
    }
    tokenizer = {
        "kind": data.tokenizer.kind,
        "vocab_size": data.tokenizer.vocab_size,
        "fingerprint": data.tokenizer.fingerprint,
    }
    if arguments.json:
        print(json.dumps({"folder": str(data.folder), "tokenizer": tokenizer, "splits": counts}))
        return 0
    print(f"{data.folder}: tokeniser {name_of(data.tokenizer)}, {tokenizer['vocab_size']} tokens")
    for name, count in counts.items():
        print(
            f"  {name}: {count['documents']:,} documents, {count['tokens']:,} tokens, "
            f"{count['bytes']:,} bytes"
        )
    return 0
