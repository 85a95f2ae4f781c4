"""Configuration of the documentation site: `make docs`.

Beside Sphinx's settings there are four hooks:

- links from a page to a file of the repository outside docs/ become the file's name, after a check
  that it exists, since the site does not hold these files;
- the drawing of layers, which GitHub draws by Mermaid, becomes a list from top to bottom, since the
  site loads no scripts from elsewhere;
- the directive `command-line` prints the help of every command, from its parser;
- backticks in docstrings are Markdown's: one on each side is enough for code.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from sphinx.util import logging

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "src"))
import tracformer  # noqa: E402

project = "Tracformer"
author = "The Tracformer contributors"
project_copyright = f"2026, {author}"
version = release = tracformer.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
exclude_patterns = ["_build", "pictures/README.md"]
html_theme = "furo"
html_title = f"Tracformer {release}"
html_static_path = ["pictures", "site.css"]
html_css_files = ["site.css"]
html_theme_options = {"sidebar_hide_name": False}
pygments_style = "friendly"
pygments_dark_style = "monokai"
highlight_language = "text"
myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them; the description need not repeat them
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
nitpicky = False

logger = logging.getLogger(__name__)
OUTSIDE = re.compile(r"\[([^\]\n]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
DRAWING = re.compile(r"```mermaid\n(.*?)^```", re.M | re.S)
SINGLE = re.compile(r"(?<![`\\:])`([^`\n]+)`(?!`)(\w?)")


def name_outside_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace links to files outside docs/ by their names; warn if a file is missing."""

    def name(match: re.Match[str]) -> str:
        target = ((DOCS / page).parent / match[2]).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        if not target.exists():
            logger.warning("%s: %s does not exist", page, match[2])
        path = os.path.relpath(target, DOCS.parent)
        return f"{match[1]} (`{path}`)" if match[1].strip("`") not in path else f"`{path}`"

    source[0] = OUTSIDE.sub(name, source[0])


def layers_as_text(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace a Mermaid drawing by one line for each of its layers, the highest first."""

    def text(match: re.Match[str]) -> str:
        layers = match[1].split("subgraph")[1:]
        lines = [", ".join(re.findall(r'\w+\["(\w[^"]*)"\]', layer)) for layer in layers]
        return "\n".join(["```text", *reversed(lines), "```"])

    source[0] = DRAWING.sub(text, source[0])


def code_in_docstrings(
    app: Sphinx, what: str, name: str, obj: Any, opts: Any, lines: list[str]
) -> None:
    """Turn Markdown's `code` into reStructuredText's ``code``."""
    lines[:] = [
        SINGLE.sub(lambda m: f"``{m[1]}``" + (f"\\ {m[2]}" if m[2] else ""), s) for s in lines
    ]


class CommandLine(Directive):
    """The help of every command, each in a section of its own."""

    def run(self) -> list[nodes.Node]:
        """Return one section for each command."""
        os.environ["COLUMNS"] = "100"
        from tracformer.cli import COMMANDS, parser_of

        found: list[nodes.Node] = []
        for name, (_, summary) in COMMANDS.items():
            section = nodes.section(ids=[nodes.make_id(name)], names=[name])
            section += nodes.title(text=f"tracformer {name}")
            section += nodes.paragraph(text=f"{summary[0].upper()}{summary[1:]}.")
            text = parser_of(name).format_help()
            section += nodes.literal_block(text, text, language="text")
            found.append(section)
        return found


def setup(app: Sphinx) -> None:
    """Connect the hooks."""
    app.connect("source-read", name_outside_files)
    app.connect("source-read", layers_as_text)
    app.connect("autodoc-process-docstring", code_in_docstrings, priority=400)
    app.add_directive("command-line", CommandLine)
