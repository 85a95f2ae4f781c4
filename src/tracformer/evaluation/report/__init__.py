"""Results as one page that needs no network, with pictures, CSV and LaTeX beside it."""

from tracformer.evaluation.report.write import write_report

__all__ = ["write_report"]
