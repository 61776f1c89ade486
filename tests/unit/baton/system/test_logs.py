import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from baton.config import LoggingConfig
from baton.system.logs import PACKAGES, write_logs
from baton.system.repeat_limit import MAX_PER_WINDOW


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, PACKAGES)]
    handlers, levels = list(root.handlers), [logger.level for logger in loggers]
    for handler in handlers:  # or they would be closed
        root.removeHandler(handler)
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def written(stream: io.StringIO) -> str:
    for handler in logging.getLogger().handlers:
        handler.flush()
    return stream.getvalue()


def lines_of(config: LoggingConfig, **process: str) -> tuple[io.StringIO, logging.Logger]:
    stream = io.StringIO()
    write_logs(config, stream, **process)
    return stream, logging.getLogger("gateway.requests")


def test_json_lines_have_the_process_and_what_the_record_adds() -> None:
    stream, logger = lines_of(LoggingConfig(level="info", format="json"), component="worker", worker="w0")
    logger.info("request %s:\nends", "r1", extra={"request_id": "r1", "total_s": 0.5})
    (line,) = written(stream).splitlines()
    record = json.loads(line)
    assert record.pop("time").endswith("+00:00")
    assert record == {
        "level": "info",
        "logger": "gateway.requests",
        "message": "request r1:\nends",
        "component": "worker",
        "worker": "w0",
        "request_id": "r1",
        "total_s": 0.5,
    }


def test_an_exception_stays_on_its_json_line() -> None:
    stream, logger = lines_of(LoggingConfig(format="json"))
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    (line,) = written(stream).splitlines()
    assert json.loads(line)["exception"].endswith("ValueError: broken")


def test_text_lines_say_which_worker_they_are_of() -> None:
    stream, logger = lines_of(LoggingConfig(), worker="100%s", rank="1")
    logger.warning("slow")
    assert written(stream).endswith(" 100%s rank 1 WARNING slow\n")


def test_debug_is_for_our_own_packages_alone() -> None:
    """At DEBUG, libraries may log the data that they carry."""
    stream, logger = lines_of(LoggingConfig(level="debug"))
    logging.getLogger("some_library").info("a prompt")
    logger.debug("ours")
    assert "ours" in written(stream)
    assert "a prompt" not in written(stream)


def test_less_than_the_level_is_not_written() -> None:
    stream, logger = lines_of(LoggingConfig(level="error"))
    logger.warning("slow")
    logging.getLogger("some_library").error("bad")
    assert "slow" not in written(stream)
    assert "bad" in written(stream)


def test_fields_that_a_library_adds_to_every_record_are_left_out() -> None:
    """For example, Ray adds fields once it is imported."""
    former = logging.getLogRecordFactory()

    def adding(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = former(*arguments, **named)
        record.package = "ray"
        return record

    stream, logger = lines_of(LoggingConfig(format="json"))
    logging.setLogRecordFactory(adding)
    try:
        logger.warning("slow", extra={"request_id": "r1"})
    finally:
        logging.setLogRecordFactory(former)
    record = json.loads(written(stream))
    assert record["request_id"] == "r1"
    assert "package" not in record


@pytest.mark.parametrize("name", ["asyncio", "uvicorn.error", "gateway.requests", "worker.core"])
def test_an_error_without_end_is_written_a_few_times_and_counted_whichever_library_it_is_of(
    name: str,
) -> None:
    """The gateway's log once grew by 219 MB in 100 s, by one line of asyncio's."""
    stream, ours = lines_of(LoggingConfig(level="info"))
    for number in range(10_000):
        logging.getLogger(name).error("socket.accept() out of system resource\nsocket: %d", number)
        ours.info("request %d", number)
    for handler in logging.getLogger().handlers:
        handler.close()
    lines = stream.getvalue().splitlines()
    assert sum(line.endswith("out of system resource") for line in lines) == MAX_PER_WINDOW + 1
    assert sum(" INFO " in line for line in lines) == 10_000
    assert "suppressed 9,970 repetitions" in lines[-1]
