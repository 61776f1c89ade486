"""How a process writes its log: lines for people, or a JSON object a line for programs; knows nobody who reads it.

Whoever logs gives what a program may look for as `extra`: it becomes keys of the object. They are `request_id` for a
client's request, `engine_request_id` for one attempt at it, which begins with the former, and whatever else
docs/observability.md lists.
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
from baton.system.repeat_limit import RepeatLimit

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
"""Ours. Others may tell at DEBUG what they carry, and that is what users wrote."""


class JsonFormatter(logging.Formatter):
    """An object a line: time (UTC, ISO 8601), level, logger, message, what names the process, what the record adds, and
    `exception` if there is one. What JSON does not know is written as text."""

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
    """From now on the whole process logs so, to `stream` (None: stderr), on a thread of its own; what was set up before
    is replaced. A warning or error that is repeated without end, whichever library's, is written a few times a minute.

    `process` names it on every line: `component` is what it is, `fleet` and `worker` which one, `rank` which part.
    """
    writer = LogWriter(stream or sys.stderr, limit=RepeatLimit())
    writer.setFormatter(JsonFormatter(process) if config.format == "json" else _for_people(process))
    level = logging.getLevelNamesMapping()[config.level.upper()]
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[writer], force=True)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(level)


@lru_cache(1)
def _usual_keys(factory: Callable[..., logging.LogRecord]) -> frozenset[str]:
    """What every record has, whoever logs it; libraries that put in a factory of their own, as Ray does, add to it."""
    plain = factory("", logging.INFO, "", 0, "", (), None)
    return frozenset({*plain.__dict__, "message", "asctime", "taskName"})


def _for_people(process: dict[str, str]) -> logging.Formatter:
    """Workers share a screen with others, so each line says whose it is."""
    keys = [key for key in ("worker", "rank") if key in process]
    names = [process[key] if key == "worker" else f"{key} {process[key]}" for key in keys]
    if not names:
        return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    return logging.Formatter(f"%(asctime)s {' '.join(names).replace('%', '%%')} %(levelname)s %(message)s")
