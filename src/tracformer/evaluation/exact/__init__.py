"""Sources whose every conditional is known, and the benchmark that holds models against them."""

from tracformer.evaluation.exact.benchmark import Exact
from tracformer.evaluation.exact.catalogue import VERSION, describe_source, draw_sequences, find_source, source_names
from tracformer.evaluation.exact.models import TruthModel, UniformModel
from tracformer.evaluation.exact.patterns import PATTERNS
from tracformer.evaluation.exact.sources import Source, log_joint

__all__ = [
    "PATTERNS",
    "VERSION",
    "Exact",
    "Source",
    "TruthModel",
    "UniformModel",
    "describe_source",
    "draw_sequences",
    "find_source",
    "log_joint",
    "source_names",
]
