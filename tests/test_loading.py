"""What loading a model reads and imports."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
from pathlib import PurePath

opened = []

def record(event, arguments):
    if event == "open" and isinstance(arguments[0], str):
        opened.append(PurePath(arguments[0]).name)

sys.addaudithook(record)

import tracformer

tracformer.load("stories").infill("Once upon a [[1]].")
print(json.dumps({"modules": sorted(sys.modules), "opened": opened}))
"""


def test_a_tracformer_is_loaded_without_baselines_and_its_configuration_is_read_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    found = json.loads(done.stdout)
    modules = [name for name in found["modules"] if name.startswith("tracformer.baselines.")]
    assert modules == []
    assert not {"transformers", "scipy", "sklearn"} & set(found["modules"])
    assert found["opened"].count("config.json") == 1
