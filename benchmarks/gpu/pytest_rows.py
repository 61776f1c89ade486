"""A plugin of pytest that writes each test's result to a file at once: `--rows FILE`.

So a run that is ended half-way keeps its results. One JSON object a line: `test`, `outcome` (passed, failed,
skipped, or uncollected: a file that could not be read) and `message`, the first line of what went wrong or the reason.
"""

import json
from pathlib import Path
from typing import IO

import pytest

MAX_MESSAGE = 300


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rows", type=Path, help="a file for the result of each test, one JSON object a line")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--rows")
    # Workers of pytest-xdist report to the process that started them.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RowWriter(path.open("w")), "row-writer")


class RowWriter:
    """Writes to `file`, and closes it in the end."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._uncollected: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passes in its call; it may fail or skip in a fixture too."""
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Each process of pytest-xdist collects all files."""
        if not report.passed and report.nodeid not in self._uncollected:
            self._uncollected.add(report.nodeid)
            self._write(report.nodeid, "uncollected", report)

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, test: str, outcome: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        row = {"test": test, "outcome": outcome, "message": "" if outcome == "passed" else _message(report)}
        print(json.dumps(row), file=self._file, flush=True)


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line that names an assertion or exception, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")[:MAX_MESSAGE]
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return (lines or report.longreprtext.splitlines() or [""])[0][:MAX_MESSAGE]
