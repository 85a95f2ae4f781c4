"""Run the Python and the commands of a page or notebook, and write the outputs that it shows.

    python tools/run_pages.py README.md docs/tutorials/*.md examples/quickstart.ipynb
    python tools/run_pages.py --check README.md                 exit with 1 if a page would change

Blocks run from top to bottom in one namespace and one temporary folder. A `text` block right behind
a `python` or `sh` block holds its output. A block behind a line `<!-- not run: reason -->` is left
out. Of `sh` blocks, lines that begin with `tracformer` run, in this process. A `python` block whose
first line is a comment with a file name, such as `# my.py`, is written to that file instead.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"(?P<note><!-- not run: [^>]+ -->\n+)?```(?P<kind>python|sh)\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.M | re.S,
)

FILE = re.compile(r"# (\w+\.py)\n")


class Ran(NamedTuple):
    """A page as it is and as it should be."""

    text: str
    expected: str


def commands(code: str) -> list[list[str]]:
    """Return the words of the `tracformer` commands of a `sh` block."""
    lines = code.replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in found if words and words[0] == "tracformer"]


def run_page(path: Path) -> Ran:
    """Run a page's blocks, and return its text with the outputs that they print."""
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    here, before = Path.cwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            expected = BLOCK.sub(lambda block: _run_block(block, text, path, namespace), text)
        finally:
            os.chdir(here)
            os.environ.clear()
            os.environ.update(before)  # without the files that commands included
    return Ran(text, expected)


def run_notebook(path: Path) -> Ran:
    """Run a notebook's cells without Jupyter, and return its text with what they print."""
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    namespace: dict[str, object] = {}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile("".join(cell["source"]), f"{path} cell {number}", "exec"), namespace)
        printed = output.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        stream = {"name": "stdout", "output_type": "stream", "text": printed}
        cell["outputs"] = [stream] if printed else []
    return Ran(text, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def _run_block(block: re.Match[str], text: str, path: Path, namespace: dict[str, object]) -> str:
    if block["note"]:
        return block[0]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        if named := FILE.match(block["code"]):
            Path(named[1]).write_text(block["code"])
        elif block["kind"] == "python":
            # so that errors name lines of the page
            lines = "\n" * text.count("\n", 0, block.start("code"))
            exec(compile(lines + block["code"], str(path), "exec"), namespace)
        else:
            from tracformer.cli import main as tracformer

            for words in commands(block["code"]):
                if code := tracformer(words):
                    raise SystemExit(f"{path}: tracformer {' '.join(words)} ended with {code}")
    if block["output"] is None:
        return block[0]
    start, stop = (at - block.start() for at in block.span("output"))
    return block[0][:start] + output.getvalue() + block[0][stop:]


def main() -> int:
    """Run the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    changed = 0
    for path in arguments.pages:
        page = (run_notebook if path.suffix == ".ipynb" else run_page)(path.resolve())
        if page.text != page.expected:
            changed += 1
            print(f"{path}: outputs {'differ' if arguments.check else 'written'}", file=sys.stderr)
            if not arguments.check:
                path.write_text(page.expected, encoding="utf-8")
    return int(arguments.check and changed > 0)


if __name__ == "__main__":
    sys.exit(main())
