"""Record the figures of new families and tasks, and of those whose schema was raised.

    python -m tests.golden.record

Figures that changed under the same schema are refused.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from tests.golden import figures
from tests.golden.figures import Figures


def main() -> int:
    """Return 0, or 1 if figures changed whose schema did not; these stay as they were recorded."""
    if not figures.model_folder(figures.TEXTS).is_dir():
        sizes = {"vocab_size": figures.tokenizer().vocab_size, "max_length": 32, "n_layer": 5}
        figures.write_model("tracformer", figures.model_folder(figures.TEXTS), **sizes)
    recorded, now, refused = figures.read_record(), {"families": {}, "tasks": {}}, 0
    for kind, name in figures.subjects():
        before = recorded[kind].get(name)
        if kind == "families":
            _require_folder(name, before)
        with tempfile.TemporaryDirectory() as folder:
            found = figures.compute(kind, name, Path(folder))
        now[kind][name], problem = decide(kind, name, found, before)
        if problem is not None:
            refused += 1
            print(problem, file=sys.stderr)
        elif now[kind][name] is not before:
            print(f"recorded: {kind} {name}")
    write(now)
    return 1 if refused else 0


def decide(
    kind: str,
    name: str,
    found: Figures,
    before: Figures | None,
) -> tuple[Figures, str | None]:
    """Return the figures to keep, and why the found ones are refused if they are."""
    if before is None or found.schemas != before.schemas:
        return found, None
    return before, figures.problem_of(kind, name, found, before)


def write(record: dict[str, dict[str, Figures]]) -> None:
    document = {}
    for kind, entries in record.items():
        document[kind] = {name: dataclasses.asdict(entries[name]) for name in sorted(entries)}
    figures.RECORD.write_text(json.dumps(document, indent=1) + "\n")


def _require_folder(name: str, before: Figures | None) -> None:
    """Write a family's folder if there is none, or if it no longer loads under a raised schema."""
    folder = figures.model_folder(name)
    raised = before is not None and before.schemas != {"family": figures.schema_of(name)}
    if folder.is_dir() and raised:
        try:
            figures.load_model(folder)
            return
        except ValueError as error:
            print(f"written anew: {error}")
    elif folder.is_dir():
        return
    figures.write_model(name, folder)


if __name__ == "__main__":
    sys.exit(main())
