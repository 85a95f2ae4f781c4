"""The public API: every name can be imported and is documented, and importing it is cheap."""

import inspect
import subprocess
import sys

import pytest

import tracformer
from tracformer.generation.request_options import InfillOptions, Sampler, flat_options


@pytest.mark.parametrize("name", tracformer.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    documented = inspect.getdoc(getattr(tracformer, name))
    assert documented
    assert "Example" in documented
    assert name in dir(tracformer)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = tracformer.nothing


@pytest.mark.parametrize("module", ["tracformer", "tracformer.generation.request_options"])
def test_importing_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_survive_the_way_over_a_mapping() -> None:
    options = InfillOptions.make(n=3, order="entropy", k=2, temperature=0.5, banned=[1])
    assert set(options.to_dict()) == set(flat_options(InfillOptions))
    assert InfillOptions.make(**options.to_dict()) == options
    assert options.sampler == Sampler(temperature=0.5, banned=(1,))
    with pytest.raises(ValueError, match="unknown option 'temprature'; did you mean 'temperature'"):
        InfillOptions.make(temprature=1.0)
