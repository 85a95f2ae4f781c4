"""Options that the tasks on text have in common.

`tracformer eval` makes its flags from them. The module imports neither torch nor numpy, so that
`tracformer eval --help` is fast.
"""

from dataclasses import dataclass

from tracformer.options import option

ROWS = ("packed", "documents")


@dataclass(frozen=True)
class TextTaskOptions:
    """Which text is read, how it is cut into windows, and the seed of contexts and noise."""

    data: str = option(
        "",
        "folder of `tracformer prepare`, text files, a named data set, or hf:OWNER/NAME",
        metavar="WHERE",
        raw=True,
    )
    split: str = option("validation", "split of prepared or named data; files are read whole")
    length: int = option(
        128, "tokens of each sequence (default: the task's)", low=1, metavar="TOKENS"
    )
    sequences: int = option(
        1000,
        "number of sequences, spread evenly over the text; 0 takes all (default: the task's)",
        low=0,
        metavar="N",
    )
    rows: str = option(
        "packed",
        "packed cuts the running text; documents takes the beginning of each long enough document",
        choices=ROWS,
    )
    documents: str = option(
        "separator", "what ends a document in text files, as in `tracformer prepare`"
    )
    detokenize: str | None = option(
        None, "undo the tokenization of wikitext, ptb, lambada or 1bw", metavar="SET"
    )
    seed: int = option(0, "random seed of contexts and noise", metavar="N")
    count_eos: bool = option(
        False, "count end-of-text tokens as targets; otherwise they are always given"
    )


@dataclass(frozen=True)
class NoiseOptions:
    """How often noise is drawn where a model answers with a bound."""

    draws: int | None = option(
        None,
        "draws of noise for each sequence, if the model's answer is a bound (default: the model's)",
        low=1,
        metavar="N",
    )
