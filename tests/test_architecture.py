"""Imports point one way: lower layers know nothing of those above them."""

from tests.scripts import script

measure_code = script("tools/measure_code.py")


def test_imports_follow_the_layers_and_make_no_cycles() -> None:
    assert measure_code.import_problems() == []


def test_cycles_are_found() -> None:
    assert measure_code.cycles({"a": {"b"}, "b": {"c"}, "c": {"a", "b"}}) == [
        ["a", "b", "c", "a"],
        ["b", "c", "b"],
    ]
