"""The order of tests, and the counts of long ones, such as numbers of requests, at the end."""

import gc
from typing import Any

import pytest

gc.disable()  # until everything is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of training first: they are the longest, and workers should end together."""
    items.sort(key=lambda item: "tests/training/" not in item.nodeid)


def pytest_collection_finish() -> None:
    """Exempt imported modules from garbage collection: going through them takes a tenth of the time."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the property `counts` of every test that recorded it."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "counts" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")
