"""Show the counts of long tests, such as numbers of requests, at the end of a test run."""

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the property `counts` of every test that recorded it."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "counts" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {value}")
