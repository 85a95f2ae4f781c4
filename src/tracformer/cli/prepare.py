"""Turn text, JSONL, Parquet, FASTA or a hub data set into token shards.

    tracformer prepare my.txt --out data/my
    tracformer prepare my.txt --validation held-out.txt --out data/my
    tracformer prepare 'books/*.jsonl.gz' --field body --tokenizer bpe:8192 --out data/books
    tracformer prepare 's3://bucket/corpus/*.parquet' --tokenizer bpe:32768 --out data/corpus
    tracformer prepare family.fasta --tokenizer protein --gaps remove --out data/family
    tracformer prepare PF00014.fasta --identity 0.6 --out data/kunitz
    tracformer prepare wikitext103 --tokenizer openai-community/gpt2 --out data/wikitext103
    tracformer prepare wikitext2 wikipedia-2006 --tokenizer bpe:4096 --out data/both
    tracformer prepare ptb --from FOLDER --out data/ptb
    tracformer prepare hf:owner/name --out data/name
    tracformer prepare exact:hmm-16,sequences=20000 --out data/hmm-16

Several sources are trained on together, with the validation split of the first. Files may be
compressed (.gz, .bz2, .xz, .zst), and at any address that `fsspec` reads (s3, gs, https, hf), if
the package for it is installed. The output folder holds memory-mapped shards, an index, the
tokenizer and a manifest with the SHA-256 of each file. It appears when it is finished; after a
kill, the same command continues where the run stopped.
"""

import argparse
import json
from typing import TYPE_CHECKING, Any

from tracformer.workers import cores

if TYPE_CHECKING:
    from tracformer.data import PreparedData

DRAWN = "exact:"  # sources of the exact benchmark


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `tracformer prepare`."""
    parser.add_argument(
        "source",
        nargs="+",
        help=(
            "files, folders, globs or addresses; names of data sets; hf:OWNER/NAME; or exact:SOURCE"
        ),
    )
    parser.add_argument("--out", required=True, help="output folder; it must not exist")
    parser.add_argument(
        "--tokenizer",
        default="auto",
        help=(
            "auto, byte, char, char:LETTERS, dna, rna, nucleotide or protein (or these with "
            "-aligned), bpe:SIZE, a folder or a hub id (default: auto)"
        ),
    )
    parser.add_argument(
        "--validation",
        metavar="FRACTION|FILE",
        default="0.05",
        help=(
            "fraction to hold out if the data has no validation split; or the file, folder or glob "
            "of that split (default: 0.05)"
        ),
    )
    parser.add_argument(
        "--identity",
        type=float,
        metavar="SHARE",
        help=(
            "aligned FASTA: hold out records that share at most this fraction of residues with any "
            "training record, for validation and as many for test"
        ),
    )
    parser.add_argument(
        "--distinct",
        action="store_true",
        help="with --identity: keep only the first of equal sequences",
    )
    parser.add_argument(
        "--from",
        dest="folder",
        metavar="FOLDER",
        help="read the files of named data sets from this folder instead of downloading them",
    )
    parser.add_argument(
        "--format", help="text, jsonl, parquet, fasta or alignment (default: from the file name)"
    )
    parser.add_argument(
        "--field", help="JSONL and Parquet: field that holds the text (default: text)"
    )
    parser.add_argument("--documents", help="text: what ends a document")
    parser.add_argument(
        "--gaps",
        help="FASTA and alignments: keep or remove gaps (default: keep if the tokenizer has them)",
    )
    parser.add_argument(
        "--detokenize", help="undo a corpus's tokenization: wikitext, ptb, lambada or 1bw"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing output folder"
    )
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help=(
            "leave out records that cannot be read or tokenized, and report them; without it, the "
            "first of them stops the run, which --skip-bad then continues"
        ),
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that tokenize; the files are the same for any number (default: all cores)",
    )
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run `tracformer prepare`."""
    from tracformer.data import name_of, open_sources, parse_validation
    from tracformer.data.prepare import prepare

    names = ("format", "field", "documents", "gaps", "detokenize")
    options: dict[str, Any] = {
        name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
    }
    where = arguments.source[0] if len(arguments.source) == 1 else arguments.source
    fraction, held_out = parse_validation(arguments.validation)
    common = {
        "overwrite": arguments.overwrite,
        "quiet": arguments.json,
        "workers": cores() if arguments.workers is None else arguments.workers,
    }
    if isinstance(where, str) and where.startswith(DRAWN):
        given = options or held_out or arguments.folder or arguments.identity is not None
        if given or arguments.skip_bad or arguments.tokenizer != "auto":
            raise ValueError(
                f"{where!r} is generated, with its own tokenizer and validation split; options "
                "about files cannot be used with it"
            )
        from tracformer.evaluation.exact_sources import parse_exact

        drawn = parse_exact(where)
        data = prepare(arguments.out, drawn.splits(), drawn.tokenizer, **common)
    else:
        sources = open_sources(where, validation=held_out, folder=arguments.folder, **options)
        data = prepare(
            arguments.out,
            sources,
            arguments.tokenizer,
            validation=fraction,
            identity=arguments.identity,
            distinct=arguments.distinct,
            skip_bad=arguments.skip_bad,
            **common,
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
        left_out = data.manifest.left_out
        found = {"tokenizer": tokenizer, "splits": counts, "left_out": left_out}
        found |= {"family": rule} if (rule := _family(data)) else {}
        print(json.dumps({"folder": str(data.folder), **found}))
        return 0
    print(f"{data.folder}: tokenizer {name_of(data.tokenizer)}, {tokenizer['vocab_size']} tokens")
    for name, count in counts.items():
        print(f"  {name}: " + ", ".join(f"{value:,} {unit}" for unit, value in count.items()))
    if rule := _family(data):
        copies = "left out" if rule["distinct"] else "kept (--distinct leaves them out)"
        print(f"  {rule['records']:,} records, {rule['copies']:,} copies of another {copies}")
        if rule["other_letters"]:
            counted = ", ".join(f"{letter} {n:,}" for letter, n in rule["other_letters"].items())
            print(f"  letters other than the 20 amino acids, read as they are: {counted}")
    if data.manifest.left_out:
        print(f"  {data.manifest.left_out:,} records left out")
    return 0


def _family(data: "PreparedData") -> dict[str, Any]:
    """Return what was found in the alignment of a family; empty for other data."""
    rule: dict[str, Any] = data.manifest.carving.get("train", {})
    return rule if "records" in rule else {}
