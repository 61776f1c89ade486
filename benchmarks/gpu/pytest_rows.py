"""A pytest plugin that writes each test's result to a file at once: `--rows FILE`.

So a run that is ended early keeps its results. Each line is a JSON object with `test`, `outcome` and
`message`. `outcome` is passed, failed, skipped, or uncollected (pytest could not read the file). `message` is
the first line of the error, or the reason of a skip.
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
    # Worker processes of pytest-xdist report their results to the process that started them.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RowWriter(path.open("w")), "row-writer")


class RowWriter:
    """Writes results to `file`, and closes it at the end."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._uncollected: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the result. A test passes in its call phase, but it may also fail or skip in a fixture."""
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Writes a failed collection once: each process of pytest-xdist collects all files."""
        if not report.passed and report.nodeid not in self._uncollected:
            self._uncollected.add(report.nodeid)
            self._write(report.nodeid, "uncollected", report)

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, test: str, outcome: str, report: pytest.TestReport | pytest.CollectReport) -> None:
        row = {"test": test, "outcome": outcome, "message": "" if outcome == "passed" else _message(report)}
        print(json.dumps(row), file=self._file, flush=True)


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line that names the assertion or exception, or the reason of the skip."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")[:MAX_MESSAGE]
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return (lines or report.longreprtext.splitlines() or [""])[0][:MAX_MESSAGE]
