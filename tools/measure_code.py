"""Measure the package: size, widths, names used twice, direction of imports.

    python tools/measure_code.py            # a table
    python tools/measure_code.py --json     # the same as JSON

`problems()` lists what must not be there: an import against the order of the layers, an import
cycle between folders, a class name or a file name used twice. The tests call it.
"""

import argparse
import ast
import io
import json
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tracformer"
WIDTH, LONGEST, SHORTEST = 100, 520, 60

# Imports point upwards in this list only; modules of one line may import each other's folders
# freely as long as there is no cycle. A module belongs to the longest prefix that is listed.
LAYERS = (
    ("rng", "options", "files", "devices", "bundled", "geometry", "progress", "renames"),
    ("contexts", "native", "attention"),
    ("model",),
    ("baselines",),
    ("data",),
    ("distributed", "loading", "generation", "training"),
    ("evaluation",),
    ("reproduce", "report", "bench"),
    ("server", "client", "hf"),
    ("cli", "__main__", ""),
)


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name without the package's own."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def layer_of(module: str) -> int:
    folder = module.split(".")[0]
    return next(number for number, names in enumerate(LAYERS) if folder in names)


def imports_of(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the package's modules that a module imports when it is imported itself."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tracformer":
            base = (node.module or "").removeprefix("tracformer").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in known else base)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "tracformer"]
            found.update(name.removeprefix("tracformer").lstrip(".") for name in names)
    return found - {module}


def import_problems() -> list[str]:
    """Return imports against the order of the layers, and cycles between folders."""
    known, problems = modules(), []
    edges: dict[str, set[str]] = defaultdict(set)
    for module, path in known.items():
        for target in imports_of(module, path, known):
            if target and layer_of(target) > layer_of(module):
                problems.append(
                    f"{module or '__init__'} imports {target}, which is a layer above it"
                )
            here, there = module.split(".")[0], target.split(".")[0]
            if here != there:
                edges[here].add(there)
    return problems + [
        f"import cycle between folders: {' -> '.join(cycle)}" for cycle in cycles(edges)
    ]


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the cycles of a graph, each once, from its smallest name."""
    found: list[list[str]] = []

    def walk(path: list[str]) -> None:
        for target in sorted(edges.get(path[-1], ())):
            if target == path[0]:
                found.append([*path, target])
            elif target > path[0] and target not in path:
                walk([*path, target])

    for start in sorted(edges):
        walk([start])
    return found


def name_problems() -> list[str]:
    """Return class names and file names that are used twice.

    A verb of the CLI may be named as its subject.
    """
    classes, stems = defaultdict(list), defaultdict(list)
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(module)
        if path.stem != "__init__" and not module.startswith("cli."):
            stems[path.stem].append(module)
    problems = [
        f"class {name} in {' and '.join(where)}"
        for name, where in classes.items()
        if len(where) > 1
    ]
    return problems + [
        f"file {name} as {' and '.join(where)}" for name, where in stems.items() if len(where) > 1
    ]


def problems() -> list[str]:
    return [*import_problems(), *name_problems()]


def measure() -> dict[str, Any]:
    """Return the figures of the package and of its tests."""
    paths = list(modules().values())
    texts = [path.read_text() for path in paths]
    lengths = [text.count("\n") for text in texts]
    tests = list((ROOT / "tests").rglob("*.py"))
    return {
        "source files": len(paths),
        "lines": sum(lengths),
        "tokens": sum(count_tokens(text) for text in texts),
        "statements": sum(
            isinstance(node, ast.stmt) for text in texts for node in ast.walk(ast.parse(text))
        ),
        "longest file": max(lengths),
        f"files over {LONGEST} lines": sum(length > LONGEST for length in lengths),
        f"files under {SHORTEST} lines, without __init__": sum(
            length < SHORTEST and path.stem != "__init__"
            for path, length in zip(paths, lengths, strict=True)
        ),
        f"lines wider than {WIDTH} columns": sum(
            len(line) > WIDTH for text in texts for line in text.splitlines()
        ),
        "imports against the layers or in cycles": len(import_problems()),
        "class or file names used twice": len(name_problems()),
        "test files": len(tests),
        "test lines": sum(path.read_text().count("\n") for path in tests),
    }


def count_tokens(text: str) -> int:
    """Count Python tokens without comments, docstrings' contents counting as one, and layout."""
    layout = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    return sum(
        token.type not in layout for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    figures = measure()
    if parser.parse_args().json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:<50} {value:>9,}")
    for problem in problems():
        print(f"  {problem}")


if __name__ == "__main__":
    main()
