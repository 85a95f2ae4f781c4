"""Measure the package: sizes, widths, names used twice, direction of imports, docstrings.

    python tools/measure_code.py             print a table
    python tools/measure_code.py --json      print it as JSON
    python tools/measure_code.py --layers    write the drawing into docs/architecture.md

`problems` lists what must not be there: an import against the order of the layers, an import cycle
between folders, a class name or file name used twice, an exported name without a complete
docstring. Tests call the functions of this file.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import io
import json
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "tracformer"
PAGE = ROOT / "docs" / "architecture.md"
WIDTH, LONGEST, SHORTEST = 100, 520, 60

# A module imports only modules of its own layer and of layers above it in this list. Folders of one
# layer may import each other as long as there is no cycle.
LAYERS = (
    (
        "rng",
        "splitmix",
        "options",
        "files",
        "devices",
        "geometry",
        "spans",
        "plugins",
        "progress",
        "renames",
        "workers",
    ),
    ("contexts", "native", "attention"),
    ("model",),
    ("baselines",),
    ("data",),
    ("loading", "generation", "proteins", "training"),
    ("evaluation",),
    ("reproduce", "report", "bench"),
    ("server", "client", "hf", "publish"),
    ("cli", "__main__", ""),
)


# Modules and folders that came with capabilities added after the layout was decided: at most 130
# source files, not counting those of later capabilities. A merged file leaves this list.
LATER = (
    # systems to compare with, and causal language models with adapters
    *("baselines.aligned", "baselines.as_arm", "baselines.given_first", "baselines.modern"),
    *("baselines.row_cache", "baselines.sigma_gpt", "model.blocks", "evaluation.flops"),
    *("baselines.causal_lm", "baselines.causal_networks", "baselines.causal_training"),
    # protein families
    *("proteins", "cli.proteins", "data.alignment"),
    # default quality of fills
    *("generation.generation_config", "generation.ranking", "bench.fill_latency"),
    # files with names that have changed since
    "renames",
    # training within a number of minutes
    *("training.clock", "training.plan", "training.summary"),
    # systems and tasks of other packages
    "plugins",
    # large inputs: several processes, batch jobs, formats of files, limits of connections
    *("workers", "splitmix", "data.input_files", "data.token_batches"),
    *("generation.batch_job", "generation.job_rows", "server.connections"),
    # publishing to the Hugging Face hub, completion in shells, claims of a study
    *("cli.export", "cli.completion", "model.modeling_tracformer", "report.claims"),
)


def is_later(module: str) -> bool:
    """Return whether a module belongs to a capability of `LATER`."""
    return any(module == name or module.startswith(f"{name}.") for name in LATER)


def modules() -> dict[str, Path]:
    """Return the path of every module, by its dotted name without "tracformer."."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the parsed code of a module."""
    return ast.parse(path.read_text())


def layer_of(module: str) -> int:
    """Return the number of the layer that a module belongs to."""
    folder = module.split(".")[0]
    return next(number for number, names in enumerate(LAYERS) if folder in names)


def imports_of(module: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports at its top level."""
    found = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tracformer":
            base = (node.module or "").removeprefix("tracformer").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in known else base)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "tracformer"]
            found.update(name.removeprefix("tracformer").lstrip(".") for name in names)
    return found - {module}


def folder_imports() -> dict[str, set[str]]:
    """Return for each folder or top-level module which others it imports."""
    known = modules()
    edges: dict[str, set[str]] = defaultdict(set)
    for module, path in known.items():
        here = module.split(".")[0]
        targets = {target.split(".")[0] for target in imports_of(module, path, known)}
        edges[here] |= targets - {here}
    return edges


def import_problems() -> list[str]:
    """Return imports against the order of the layers, and cycles between folders."""
    known = modules()
    found = [
        f"{module or '__init__'} imports {target}, which belongs to a higher layer"
        for module, path in known.items()
        for target in sorted(imports_of(module, path, known))
        if target and layer_of(target) > layer_of(module)
    ]
    loops = [" -> ".join(cycle) for cycle in cycles(folder_imports())]
    return found + [f"import cycle between folders: {loop}" for loop in loops]


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return each cycle of a graph once, starting at its smallest name."""
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


def drawing() -> str:
    """Return a Mermaid drawing of the layers and of the imports between their folders.

    Imports of the lowest layer are left out, and so are those that follow from others.
    """
    lowest = set(LAYERS[0])
    edges = {
        here: {there for there in targets if there and there not in lowest}
        for here, targets in folder_imports().items()
        if here and here not in lowest
    }
    present = {module.split(".")[0] for module in modules()}
    lines = ["```mermaid", "flowchart BT"]
    for number, names in enumerate(LAYERS):
        shown = [name for name in names if name in present and name]
        lines.append(f'    subgraph layer{number}[" "]')
        if number == 0:
            lines.append(f'        base["{", ".join(sorted(shown))}"]')
        else:
            lines += [f'        {name.strip("_")}["{name}"]' for name in shown]
        lines.append("    end")
    lines.append("    layer1 --> layer0")
    for here in sorted(edges):
        for there in sorted(edges[here]):
            others = (reachable(edges, other) for other in edges[here] - {there})
            if not any(there in found for found in others):
                lines.append(f"    {here.strip('_')} --> {there.strip('_')}")
    return "\n".join([*lines, "```"])


def reachable(edges: dict[str, set[str]], start: str) -> set[str]:
    """Return the nodes that can be reached from a node of a graph without cycles."""
    found = set(edges.get(start, ()))
    return found.union(*(reachable(edges, node) for node in found))


def page_with_drawing(page: str) -> str:
    """Return the text of docs/architecture.md with the drawing as the imports are now."""
    pattern = r"(<!-- layers[^>]*-->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda found: f"{found[1]}{drawing()}\n{found[2]}", page, flags=re.S)


def name_problems() -> list[str]:
    """Return class names and file names that are used twice.

    A file of the command line may be named as its subject.
    """
    classes, stems = defaultdict(list), defaultdict(list)
    for module, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(module)
        if path.stem != "__init__" and not module.startswith("cli."):
            stems[path.stem].append(module)
    return [
        f"{what} {name} in {' and '.join(where)}"
        for what, names in (("class", classes), ("file", stems))
        for name, where in names.items()
        if len(where) > 1
    ]


def docstring_problems() -> list[str]:
    """Return what the docstrings of the exported names lack: Args, Returns, an example."""
    package, found = importlib.import_module("tracformer"), []
    for name in package.__all__:
        thing = getattr(package, name)
        text = inspect.getdoc(thing) or ""
        lacking = [] if text else ["docstring"]
        signature = inspect.signature(thing.__init__ if inspect.isclass(thing) else thing)
        arguments = set(signature.parameters) - {"self"} - set(option_help(thing))
        if arguments and "Args:" not in text:
            lacking.append("Args")
        returns = "Returns:" in text or text.startswith(("Return", "Yield"))
        nothing = inspect.isclass(thing) or signature.return_annotation in (None, "None")
        if not nothing and not returns:
            lacking.append("Returns")
        if ">>>" not in text and "Example" not in text:
            lacking.append("an example")
        if lacking:
            found.append(f"tracformer.{name} lacks {', '.join(lacking)}")
    return found


def option_help(thing: Any) -> dict[str, str]:
    """Return the help of the fields of a class that are options: it documents them."""
    options = importlib.import_module("tracformer.options")
    if not (inspect.isclass(thing) and dataclasses.is_dataclass(thing)):
        return {}
    return {name: info.help for name, info in options.option_fields(thing).items()}


def problems() -> list[str]:
    """Return everything that must not be there."""
    known = modules()
    gone = [f"LATER lists {name}, which does not exist" for name in LATER if name not in known]
    return [*import_problems(), *name_problems(), *docstring_problems(), *gone]


def measure() -> dict[str, Any]:
    """Return the figures of the package and of its tests."""
    paths = list(modules().values())
    texts = [path.read_text() for path in paths]
    lengths = [text.count("\n") for text in texts]
    tests = list((ROOT / "tests").rglob("*.py"))
    return {
        "source files": len(paths),
        "source files without later capabilities": sum(not is_later(name) for name in modules()),
        "lines": sum(lengths),
        "tokens": sum(count_tokens(text) for text in texts),
        "statements": sum(
            isinstance(node, ast.stmt) for path in paths for node in ast.walk(tree_of(path))
        ),
        "longest file": max(lengths),
        f"files over {LONGEST} lines": sum(length > LONGEST for length in lengths),
        f"files under {SHORTEST} lines, without __init__": sum(
            length < SHORTEST and path.stem != "__init__"
            for path, length in zip(paths, lengths, strict=True)
        ),
        f"lines wider than {WIDTH} columns": sum(
            len(re.sub(r"\s*# (type:|noqa).*", "", line)) > WIDTH
            for text in texts
            for line in text.splitlines()
        ),
        "imports against the layers or in cycles": len(import_problems()),
        "class or file names used twice": len(name_problems()),
        "exported names with incomplete docstrings": len(docstring_problems()),
        "test files": len(tests),
        "test lines": sum(path.read_text().count("\n") for path in tests),
    }


def count_tokens(text: str) -> int:
    """Return the number of Python tokens, without comments and layout; a docstring is one."""
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
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--layers", action="store_true", help="write the drawing into docs/architecture.md"
    )
    arguments = parser.parse_args()
    if arguments.layers:
        PAGE.write_text(page_with_drawing(PAGE.read_text()))
        return
    figures = measure()
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:<50} {value:>9,}")
    for problem in problems():
        print(f"  {problem}")


if __name__ == "__main__":
    main()
