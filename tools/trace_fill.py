"""Trace one fill: print the files, classes and functions of the package that it passes.

    python tools/trace_fill.py
    python tools/trace_fill.py 'Once upon a [[2-4]] there was a cat.'

Only the call of `LanguageModel.infill` is traced, not loading the model.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import tracformer

PACKAGE = Path(tracformer.__file__).parent


def trace(text: str) -> tuple[Counter[str], set[str]]:
    """Return the number of calls by file, and the names of the classes whose methods were called.

    Args:
        text: Text with blanks.
    """
    files: Counter[str] = Counter()
    classes: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            files[str(path.relative_to(PACKAGE))] += 1
            outer, _, method = frame.f_code.co_qualname.rpartition(".")
            if method and outer and "<" not in outer:
                classes.add(outer)

    lm = tracformer.load("stories")
    lm.infill("One day [[1]].")  # modules are imported and caches are filled here
    sys.setprofile(profile)
    try:
        lm.infill(text)
    finally:
        sys.setprofile(None)
    return files, classes


def main() -> None:
    """Print the trace."""
    files, classes = trace(sys.argv[1] if len(sys.argv) > 1 else "Once upon a [[3]] there was.")
    for name, calls in sorted(files.items()):
        print(f"{calls:6}  {name}")
    print(f"{len(files)} files, {len(classes)} classes: {', '.join(sorted(classes))}")


if __name__ == "__main__":
    main()
