"""Rows of the one table that `make gpu-check` prints at its end. Knows no part and no device."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.json_file import save_json

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One result of a check or a measurement."""

    part: str
    name: str
    value: str
    """The value as text for people."""
    note: str = ""
    is_failed: bool = False
    """The result is wrong. Slow results do not fail: readers judge speed by the figures."""
    is_skipped: bool = False
    """The test was left out, although this machine should be able to run it. `--strict` counts it as
    failed."""
    figures: Figures = field(default_factory=dict)
    """The value as numbers, with units in the names."""


def line(row: Row, widths: tuple[int, int, int] = (10, 46, 30)) -> str:
    """The row as one aligned line of text."""
    mark = "FAIL" if row.is_failed else "SKIP" if row.is_skipped else ""
    cells = [text.ljust(width) for text, width in zip((row.part, row.name, row.value), widths, strict=True)]
    return f"{mark:5}{'  '.join(cells)}  {row.note}".rstrip()


def table(rows: Sequence[Row]) -> str:
    """All rows as lines below each other."""
    part, name, value = (
        max((len(getattr(row, column)) for row in rows), default=0) for column in ("part", "name", "value")
    )
    return "\n".join(line(row, (part, name, value)) for row in rows)


def save(path: Path, environment: Figures, rows: Sequence[Row]) -> None:
    """Saves these rows. They replace the rows of their parts in the file; the rows of other parts stay.

    Each part keeps the environment in which it was measured. So a file may contain several runs.
    """
    parts: Figures = json.loads(path.read_text())["parts"] if path.exists() else {}
    for name in dict.fromkeys(row.part for row in rows):
        parts[name] = {"environment": environment, "rows": [_plain(row) for row in rows if row.part == name]}
    save_json(path, {"parts": parts})


def _plain(row: Row) -> Figures:
    values = asdict(row)
    del values["part"]
    return values
