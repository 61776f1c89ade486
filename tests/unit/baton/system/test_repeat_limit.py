"""RepeatLimit in virtual time: what is repeated without end is written a few times a minute, and then counted."""

import logging

from baton.system.repeat_limit import MAX_KINDS, MAX_PER_WINDOW, WINDOW_S, RepeatLimit


def record(
    words: str = "cannot accept: %s", *values: object, name: str = "asyncio", level: int = logging.ERROR
) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, words, values, None)


def lines(limit: RepeatLimit, now: float) -> list[str]:
    return [summary.getMessage() for summary in limit.summaries(now)]


def test_a_line_without_end_is_written_a_few_times_a_minute_and_then_counted() -> None:
    limit = RepeatLimit()
    written = [
        limit.admits(record("cannot accept: %s", number), now=number * 0.001) for number in range(12_000)
    ]
    assert written == [True] * MAX_PER_WINDOW + [False] * (12_000 - MAX_PER_WINDOW)
    assert lines(limit, WINDOW_S - 0.001) == []
    (summary,) = limit.summaries(WINDOW_S)
    assert summary.getMessage() == "suppressed 11,970 repetitions in 60 s: cannot accept: %s"
    assert (summary.name, summary.levelno) == ("asyncio", logging.ERROR)
    assert lines(limit, WINDOW_S) == [], "it comes once"
    assert limit.admits(record("cannot accept: %s", 12_000), WINDOW_S)


def test_a_new_minute_begins_with_the_first_line_after_it() -> None:
    limit = RepeatLimit()
    for minute in range(3):
        now = minute * WINDOW_S
        assert [limit.admits(record(), now) for _ in range(MAX_PER_WINDOW + 1)] == [True] * MAX_PER_WINDOW + [
            False
        ]
    assert [words.split(":")[0] for words in lines(limit, 3 * WINDOW_S)] == [
        "suppressed 1 repetitions in 60 s"
    ] * 3


def test_few_lines_are_all_written_and_not_summarized() -> None:
    limit = RepeatLimit()
    assert all(limit.admits(record(), now=float(number)) for number in range(MAX_PER_WINDOW))
    assert lines(limit, 1000.0) == []
    assert limit.next_end is None


def test_less_than_a_warning_is_never_left_out() -> None:
    limit = RepeatLimit()
    info = record("request %s", level=logging.INFO, name="gateway.telemetry.access_log")
    assert all(limit.admits(info, 0.0) for _ in range(10_000))
    assert limit.next_end is None


def test_a_kind_is_a_logger_a_level_and_the_words_without_numbers() -> None:
    limit = RepeatLimit()
    for number in range(MAX_PER_WINDOW):  # asyncio puts its values in by itself
        assert limit.admits(record(f"Fatal error on 0x7f{number:x}, fd={number}\nprotocol: {number!r}"), 0.0)
    assert not limit.admits(record("Fatal error on 0x1, fd=9\nsomething else"), 0.0)
    assert limit.admits(record("another error"), 0.0)
    assert limit.admits(record("Fatal error on 0x1, fd=9", name="uvicorn.error"), 0.0)
    assert limit.admits(record("Fatal error on 0x1, fd=9", level=logging.WARNING), 0.0)


def test_kinds_without_end_take_no_memory_without_end_and_lose_no_count() -> None:
    limit = RepeatLimit()
    for _ in range(MAX_PER_WINDOW + 5):
        limit.admits(record("first"), 0.0)
    for number in range(MAX_KINDS):
        limit.admits(record("x" * (number % 200), name=f"logger.{number}"), 1.0)
    assert lines(limit, 1.0) == ["suppressed 5 repetitions in 1 s: first"]
    assert len(limit._windows) == MAX_KINDS


def test_suppressed_lines_are_reported_at_the_end() -> None:
    limit = RepeatLimit()
    for _ in range(MAX_PER_WINDOW + 2):
        limit.admits(record("first"), 0.0)
    assert [summary.getMessage() for summary in limit.close(3.0)] == [
        "suppressed 2 repetitions in 3 s: first"
    ]
    assert limit.close(3.0) == []
