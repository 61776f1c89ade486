"""How a process writes its log: lines for people, or one JSON object per line for programs.

Fields that a program may search for are passed as `extra` and become keys of the object. These are `request_id` for a
client's request, `engine_request_id` for one attempt at it (which begins with the `request_id`), and the keys in
docs/observability.md.
"""

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import TextIO

from baton.config import LoggingConfig
from baton.system.log_writer import LogWriter

PACKAGES = (
    "baton",
    "cli",
    "cluster",
    "decode_worker",
    "engine",
    "gateway",
    "kv_transfer",
    "prefill_worker",
    "scheduler",
    "worker",
)
"""Baton's own loggers. Other libraries never log at DEBUG: they might log text that users wrote."""


class JsonFormatter(logging.Formatter):
    """Writes one JSON object per line.

    Its keys are time (UTC, ISO 8601), level, logger, message, the names of the process, the record's extra
    fields, and `exception` if there is one. Values that JSON cannot represent are written as text.
    """

    def __init__(self, process: dict[str, str]) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
        }
        usual = _usual_keys(logging.getLogRecordFactory())
        line |= {key: value for key, value in record.__dict__.items() if key not in usual}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def write_logs(config: LoggingConfig, stream: TextIO | None = None, **process: str) -> None:
    """Sets up logging for the whole process, on a thread of its own; replaces any earlier set-up.

    Lines go to `stream` (None: stderr). If any library repeats a warning or error without end, only a few of
    the lines are written each minute. `process` names the process on every line: its kind (`component`), its
    `fleet` and `worker`, and its `rank`.
    """
    writer = LogWriter(stream or sys.stderr)
    writer.setFormatter(JsonFormatter(process) if config.format == "json" else _for_people(process))
    level = logging.getLevelNamesMapping()[config.level.upper()]
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[writer], force=True)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)


@lru_cache(1)
def _usual_keys(factory: Callable[..., logging.LogRecord]) -> frozenset[str]:
    """Attributes that every record has; libraries with a record factory of their own, such as Ray, add some."""
    plain = factory("", logging.INFO, "", 0, "", (), None)
    return frozenset({*plain.__dict__, "message", "asctime", "taskName"})


def _for_people(process: dict[str, str]) -> logging.Formatter:
    """The format of lines for people. Each line names its process, since workers share a screen with other
    processes."""
    keys = [key for key in ("worker", "rank") if key in process]
    names = [process[key] if key == "worker" else f"{key} {process[key]}" for key in keys]
    if not names:
        return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    return logging.Formatter(f"%(asctime)s {' '.join(names).replace('%', '%%')} %(levelname)s %(message)s")
