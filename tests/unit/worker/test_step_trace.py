"""The file of a worker's steps: what is written comes back, and what is not whole is refused or said."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import TraceError
from baton.request import FinishReason
from tests.factories.traces import make_header, make_step
from worker.step_trace import (
    StepTrace,
    Trace,
    TraceEnd,
    encode_end,
    encode_header,
    encode_step,
    read_trace,
)

HEADER = make_header("p0", began_unix_s=1_700_000_000.25)
FIRST = make_step(
    1,
    {"a": (60, 0), "b": (16, 48)},
    num_prompt_tokens={"a": 60, "b": 64},
    num_cached_tokens={"b": 48},
    preempted=("c",),
    ended={"d": FinishReason.ABORT},
    loading=("e",),
    waiting=("c", "f"),
    num_swapped_out=3,
)
SECOND = make_step(2, {"a": (1, 60)}, resumed=("c",), ended={"a": FinishReason.HANDED_OVER}, num_swapped_in=3)
WHOLE = encode_header(HEADER) + encode_step(FIRST) + encode_step(SECOND) + encode_end(TraceEnd.CLOSED)


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "p0.jsonl"
    path.write_bytes(data)
    return path


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, WHOLE)) == Trace(HEADER, (FIRST, SECOND), TraceEnd.CLOSED)


def test_lines_are_for_people_too() -> None:
    step = make_step(7, {"a": (1, 60)}, num_free_blocks=0)
    assert encode_step(step) == b'{"step":7,"planned_s":0.06,"done_s":0.07,"scheduled":{"a":[1,60,0]}}\n'
    assert b"\n" not in WHOLE.splitlines()[1]


def test_a_step_without_a_result_comes_back_without_one(tmp_path: Path) -> None:
    step = StepTrace(step=1, planned_s=0.0)
    (read,) = read_trace(write(tmp_path, encode_header(HEADER) + encode_step(step))).steps
    assert read == step
    assert read.done_s is None


@pytest.mark.parametrize(
    ("last_word", "end"),
    [
        (encode_end(TraceEnd.CLOSED), TraceEnd.CLOSED),
        (encode_end(TraceEnd.FULL), TraceEnd.FULL),
        (b"", TraceEnd.OPEN),
    ],
)
def test_how_it_ended_is_known(tmp_path: Path, last_word: bytes, end: TraceEnd) -> None:
    path = write(tmp_path, encode_header(HEADER) + encode_step(FIRST) + last_word)
    assert read_trace(path) == Trace(HEADER, (FIRST,), end)


def test_a_line_that_was_cut_anywhere_is_left_out_and_said(tmp_path: Path) -> None:
    begin = len(encode_header(HEADER) + encode_step(FIRST))
    for size in range(begin + 1, begin + len(encode_step(SECOND))):
        trace = read_trace(write(tmp_path, WHOLE[:size]))
        assert (trace.steps, trace.end) == ((FIRST,), TraceEnd.CUT)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"step":2}', r"p0\.jsonl:3: not a step: planned_s: Field required"),
        (b'{"step":2,"planned_s":1.0,"colour":1}', r":3: not a step: colour: Unexpected"),
        (b'{"step":"2","planned_s":1.0}', r":3: not a step: step: Input should be a valid integer"),
        (
            b'{"step":2,"planned_s":1.0,"scheduled":{"a":[1]}}',
            r":3: not a step: scheduled\.a\.1: Field required",
        ),
        (
            b'{"step":2,"planned_s":1.0,"ended":{"a":"tired"}}',
            r":3: not a step: ended\.a: Input should be 'stop'",
        ),
        (b'{"step":1,"planned_s":1.0}', r":3: step 1 comes after step 1"),
        (b'{"end":"closed"}', r":3: not a step"),
        (b"", r":3: not a step: Invalid JSON"),
        (b"\xff\x00", r":3: not a step: Invalid JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = write(tmp_path, encode_header(HEADER) + encode_step(FIRST) + line + b"\n" + encode_step(SECOND))
    with pytest.raises(TraceError, match=complaint):
        read_trace(path)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "the file is empty"),
        (b"\n", ":1: not a step trace"),
        (b"# notes\n", ":1: not a step trace"),
        (encode_step(FIRST), r":1: not a step trace \(.*worker: Field required.*; pass a file that"),
        (encode_header(HEADER)[:20], ":1: not a step trace"),
        (
            encode_header(replace(HEADER, num_blocks=0)),
            r":1: not a step trace \(num_blocks: .*greater than 0",
        ),
        (
            encode_header(make_header(baton_trace=9)),
            ":1: this trace has version 9, but this command reads version 1",
        ),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        read_trace(write(tmp_path, data))


def test_a_missing_file_is_the_systems_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nowhere.jsonl")
