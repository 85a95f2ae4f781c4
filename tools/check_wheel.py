"""Check that a wheel has everything that an installed package needs, and nothing else.

python tools/check_wheel.py dist
"""

import argparse
import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
IGNORED = {"__pycache__"}


def problems(wheel: Path) -> list[str]:
    """Return what is missing from a wheel, or in it without being in the source tree."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "tracformer").rglob("*")
        if path.is_file() and not IGNORED & set(path.parts)
    }
    return [f"{name} is missing" for name in sorted(wanted - held)] + [
        f"{name} is not in the source tree" for name in sorted(held - wanted)
    ]


def main() -> int:
    """Check the wheels of a folder; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    wheels = sorted(parser.parse_args().folder.glob("*.whl"))
    if not wheels:
        print("no wheel found; run `python -m build`", file=sys.stderr)
        return 2
    found = [f"{wheel.name}: {problem}" for wheel in wheels for problem in problems(wheel)]
    for problem in found:
        print(problem, file=sys.stderr)
    for wheel in wheels:
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
