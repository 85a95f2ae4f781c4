"""Trace one fill: print the files and classes of the package that it passes, and its steps.

    python tools/trace_fill.py
    python tools/trace_fill.py 'Once upon a [[2-4]] there was a cat.'
    python tools/trace_fill.py 'Once upon a [[3]] there was a cat.' best

Only the call of `LanguageModel.infill` is traced, not loading the model. The steps are those of
docs/architecture.md. With quality `raw`, the default here, each but the last three is done once;
those are done once for each token. `best` compares several candidates.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import tracformer

PACKAGE = Path(tracformer.__file__).parent
STEPS = {
    "generation/template.py": ("parse", "tokenize", "to_batch"),
    "generation/infill.py": ("InfillRequest.make", "resolve_options", "InfillRun.run"),
    "model/base.py": ("check_batch",),
    "generation/fill_request.py": ("FillRequest.__init__", "FillRequest.result", "Row.reveal"),
    "generation/scheduler.py": ("Scheduler._admit", "Scheduler.step"),
    "model/cache.py": ("Cache.logits",),
}


def trace(text: str, quality: str) -> tuple[Counter[str], set[str], Counter[str]]:
    """Return the calls by file, the classes whose methods were called, and the calls by function.

    Args:
        text: Text with blanks.
        quality: `best`, `fast` or `raw`.
    """
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    classes: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            files[name := path.relative_to(PACKAGE).as_posix()] += 1
            functions[f"{name}: {frame.f_code.co_qualname}"] += 1
            outer, _, method = frame.f_code.co_qualname.rpartition(".")
            if method and outer and "<" not in outer:
                classes.add(outer)

    lm = tracformer.load("stories")
    lm.infill("One day [[1]].")  # modules are imported and caches are filled here
    sys.setprofile(profile)
    try:
        lm.infill(text, quality=quality)
    finally:
        sys.setprofile(None)
    return files, classes, functions


def main() -> None:
    """Print the trace."""
    text, quality = [*sys.argv[1:], *("Once upon a [[3]] there was.", "raw")[len(sys.argv) - 1 :]]
    files, classes, functions = trace(text, quality)
    for name, calls in sorted(files.items()):
        print(f"{calls:6}  {name}")
    print("\nsteps:")
    for file, names in STEPS.items():
        for name in names:
            print(f"{functions[f'{file}: {name}']:6}  {file}: {name}")
    print(f"\n{len(files)} files, {len(classes)} classes: {', '.join(sorted(classes))}")


if __name__ == "__main__":
    main()
