"""Step charts: what stands where, and the pictures that terminals show."""

import random
from itertools import pairwise
from pathlib import Path

import pytest
from rich.text import Text

from baton.clock import VirtualClock
from baton.request import FinishReason
from cli.trace_chart.columns import StepRange
from cli.trace_chart.steps import Chart, Piece, PieceKind, make_chart
from cli.trace_chart.text import text_of, time_text, time_unit
from tests.factories.scheduling import FakeRunner, make_request, make_scheduler
from tests.factories.traces import CHUNKED, HANDED_OVER, PREEMPTED, make_header, make_step, make_trace
from worker.step_trace import StepTrace, Trace, read_trace
from worker.step_trace_writer import open_step_trace


def lines_of(chart: Chart, width: int = 100) -> list[str]:
    return [line.rstrip() for line in text_of(chart, width).plain.splitlines()]


def assert_picture(chart: Chart, picture: str, width: int = 100) -> None:
    assert lines_of(chart, width) == picture.strip("\n").splitlines()


def pieces_of(chart: Chart, request_id: str, panel: int = 0) -> list[Piece]:
    return [piece for row in chart.panels[panel].rows if row.request_id == request_id for piece in row.pieces]


def test_a_prompt_is_split_and_another_request_waits_for_a_step() -> None:
    picture = """
w0  decode worker, 100 tokens a step, 50 blocks of 16
                 step   1    2    3    4    5
request  prompt    ms  0.0  10.0 20.0 30.0 40.0
one          60        [60]  1    1   ■ stop
two          70        [40] [30]  1    1   ■ length
three         9        ···· [9 ]  1    1   ■ aborted

tokens of 100          100█ 40▄   3▁   2▁   0
free blocks             40   40   38   40   50
queue                   1

[n] prompt tokens   1 output token   ··· in the queue
"""
    assert_picture(make_chart([CHUNKED]), picture)


def test_preemption_swap_and_prefix_hits() -> None:
    picture = """
w0  decode worker, 100 tokens a step, 50 blocks of 16
the trace has no end: the worker still runs, or was killed
                 step   1    2    3   4-13  14   15    16    17    18
request  prompt    ms  0.0  10.0 20.0 30.0 130  140   150   160   170
old          48        [48]  1    1   1x10  1  ■ length
young        30        [30]  1   ✗············ ↻31^1   1    ✗·· ↻16+[17]
new          35                                      32+[3]  1     1

tokens of 100          78▇   2▁   1▁   1▁   1▁   1▁    4▁    1▁   18▂
free blocks             40   40   0    0    40   40    40    40    9
queue                             1    1    1                1
blocks swapped                    -2             +2

[n] prompt tokens   1 output token   xn n equal steps   n+ from the prefix cache
n^ back from host memory   ··· in the queue   ✗ preempted   ↻ resumed
"""
    assert_picture(make_chart([PREEMPTED], fold_above=12), picture)


def test_two_workers_share_one_axis_of_time() -> None:
    picture = """
p0  prefill worker, 100 tokens a step, 50 blocks of 16
                 step   1              2
request  prompt    ms  0.0            100
aaaa        150        [    100     ] [  50  ] → handed over

tokens of 100          100█           50▄
free blocks             40             40

d0  decode worker, 100 tokens a step, 50 blocks of 16
the last line is incomplete: the worker was killed, or is writing it
                 step        1   2-6      7-13  14  15
request  prompt    ms       15.0 55.0     105  175 195
bbbb         40             [40]   1x5    1x7   1   1  ■ error
aaaa        150             ~~~~~~~~~~~~~~~~~~  1   1  ■ stop

tokens of 100               40▄   1▁       1▁   2▁  2▁
free blocks                  40   40       40   40  40

[n] prompt tokens   1 output token   xn n equal steps   ~~~ waits for KV from another worker
"""
    assert_picture(make_chart(HANDED_OVER, fold_above=8), picture)


def test_columns_that_do_not_fit_continue_below() -> None:
    picture = """
w0  decode worker, 100 tokens a step, 50 blocks of 16
                 step   1    2    3
request  prompt    ms  0.0  10.0 20.0
one          60        [60]  1    1   ■ stop
two          70        [40] [30]  1
three         9        ···· [9 ]  1

tokens of 100          100█ 40▄   3▁
free blocks             40   40   38
queue                   1

w0  decode worker, 100 tokens a step, 50 blocks of 16
                 step   4    5
request  prompt    ms  30.0 40.0
two          70         1   ■ length
three         9         1   ■ aborted

tokens of 100           2▁   0
free blocks             40   50

[n] prompt tokens   1 output token
··· in the queue
"""
    assert_picture(make_chart([CHUNKED]), picture, width=46)


def test_a_token_that_was_computed_in_vain() -> None:
    """With asynchronous scheduling step 3 was planned before step 2 said that the request had ended."""
    steps = [
        make_step(1, {"a": (5, 0)}, num_prompt_tokens={"a": 5}, planned_s=0.0, done_s=0.01),
        make_step(2, {"a": (1, 5)}, planned_s=0.001, done_s=0.02, ended={"a": FinishReason.STOP}),
        make_step(3, {"a": (1, 6)}, planned_s=0.011, done_s=0.03),
    ]
    chart = make_chart([make_trace(steps)])
    assert [piece.is_in_vain for piece in pieces_of(chart, "a")] == [False, False, True]
    assert [round(column.begin_s, 3) for column in chart.columns] == [0.0, 0.01, 0.02], (
        "when the device began"
    )
    assert chart.panels[0].rows[0].end == (3, FinishReason.STOP)
    assert "a             5        [5]  1   (1)  ■ stop" in lines_of(chart)


def test_a_victim_whose_token_under_way_ends_it_waits_no_more() -> None:
    """The plan of step 3 preempted the request before step 2 showed that the request had ended."""
    steps = [
        make_step(1, {"a": (5, 0)}, num_prompt_tokens={"a": 5}, planned_s=0.0, done_s=0.01),
        make_step(2, {"a": (1, 5)}, planned_s=0.001, done_s=0.02, ended={"a": FinishReason.STOP}),
        make_step(3, {"b": (7, 0)}, planned_s=0.011, done_s=0.03, preempted=("a",), waiting=("a",)),
    ]
    (row, _) = make_chart([make_trace(steps)]).panels[0].rows
    assert (row.preempted, row.end) == ((), (2, FinishReason.STOP))
    assert [piece.kind for piece in row.pieces] == [PieceKind.PREFILL, PieceKind.DECODE]


def test_a_device_that_fails_ends_those_that_wait_too() -> None:
    steps = [
        make_step(1, {"a": (5, 0)}, num_prompt_tokens={"a": 5}, waiting=("b",), loading=("c",)),
        make_step(
            2, {"a": (1, 5)}, waiting=("b",), loading=("c",), ended=dict.fromkeys("abc", FinishReason.ERROR)
        ),
    ]
    assert [row.end for row in make_chart([make_trace(steps)]).panels[0].rows] == [
        (2, FinishReason.ERROR)
    ] * 3


def test_an_id_that_comes_back_is_another_request() -> None:
    steps = [
        make_step(1, {"a": (5, 0)}, num_prompt_tokens={"a": 5}, ended={"a": FinishReason.LENGTH}),
        make_step(2, {"a": (7, 0)}, num_prompt_tokens={"a": 7}),
    ]
    rows = make_chart([make_trace(steps)]).panels[0].rows
    assert [(row.label, row.num_prompt_tokens, len(row.pieces)) for row in rows] == [
        ("a", 5, 1),
        ("a'", 7, 1),
    ]


def test_what_is_prompt_and_what_is_output() -> None:
    steps = [
        make_step(1, {"a": (9, 0)}, num_prompt_tokens={"a": 10}),
        make_step(2, {"a": (1, 9)}),
        make_step(3, {"a": (1, 10)}),
        make_step(4, {"a": (4, 8)}, resumed=("a",), preempted=("a",), num_cached_tokens={"a": 8}),
        make_step(5, {"unknown": (1, 77)}),
    ]
    chart = make_chart([make_trace(steps)])
    kinds = [piece.kind for piece in pieces_of(chart, "a")]
    assert kinds == [PieceKind.PREFILL, PieceKind.PREFILL, PieceKind.DECODE, PieceKind.PREFILL]
    assert [piece.kind for piece in pieces_of(chart, "unknown")] == [PieceKind.DECODE]
    assert "a            10        [9] [1 ]  1   ✗↻8+[4]" in lines_of(chart)


def test_only_long_runs_are_folded_and_only_if_there_are_too_many_columns() -> None:
    chart = make_chart([PREEMPTED], fold_above=18)
    assert [len(column.steps) for column in chart.columns] == [1] * 18
    chart = make_chart([PREEMPTED], fold_above=17)
    assert [len(column.steps) for column in chart.columns] == [1, 1, 1, 10, 1, 1, 1, 1, 1]
    (folded,) = [piece for piece in pieces_of(chart, "old") if piece.num_steps > 1]
    assert (folded.first, folded.num_steps, folded.num_tokens) == (3, 10, 1)


@pytest.mark.parametrize(
    "news",
    [
        {"ended": {"b": FinishReason.ABORT}},
        {"preempted": ("b",)},
        {"waiting": ("b",)},
        {"loading": ("b",)},
        {"num_waiting": 1},
        {"num_swapped_out": 1},
        {"done_s": None},
        {"scheduled": {"a": (2, 12)}},
        {"resumed": ("a",)},
    ],
)
def test_a_step_with_an_event_is_never_folded(news: dict[str, object]) -> None:
    values = {"scheduled": {"a": (1, 12)}} | news
    steps = [make_step(n, {"a": (1, n)}) for n in range(1, 13)]
    steps[6] = make_step(7, **values)  # type: ignore[arg-type]
    chart = make_chart([make_trace(steps)], fold_above=1)
    assert [len(column.steps) for column in chart.columns if column.steps[0].step <= 7] == [6, 1]


def test_a_range_of_steps_counts_the_first_workers_and_shows_what_others_did_meanwhile() -> None:
    prefill, decode = HANDED_OVER

    def numbers(traces: tuple[Trace, ...], steps: StepRange) -> list[list[int]]:
        chart = make_chart(traces, steps)
        return [[c.steps[0].step for c in chart.columns if c.owner == owner] for owner in range(len(traces))]

    assert numbers((prefill, decode), StepRange(2, None)) == [[2], list(range(7, 16))]
    assert numbers((prefill, decode), StepRange(None, 1)) == [[1], list(range(1, 7))]
    assert numbers((decode, prefill), StepRange(14, 14)) == [[14], []]
    assert numbers((decode,), StepRange(3, 5)) == [[3, 4, 5]]
    assert numbers((decode, prefill), StepRange(99, None)) == [[], []]


def test_in_a_range_requests_keep_what_was_known_of_them_before() -> None:
    chart = make_chart([CHUNKED], StepRange(3, 4))
    assert [(row.request_id, row.num_prompt_tokens) for row in chart.panels[0].rows] == [
        ("one", 60),
        ("two", 70),
        ("three", 9),
    ]
    assert [row.end for row in chart.panels[0].rows] == [
        (1, FinishReason.STOP),
        (2, FinishReason.LENGTH),
        None,
    ]


def test_only_some_requests() -> None:
    chart = make_chart([CHUNKED], requests=("o", "thr"))
    assert [row.request_id for row in chart.panels[0].rows] == ["one", "three"]
    assert "tokens of 100          100█ 40▄   3▁   2▁   0" in lines_of(chart), "as if all were drawn"


def test_columns_that_are_too_many_are_counted() -> None:
    chart = make_chart([CHUNKED], max_columns=3)
    assert (len(chart.columns), chart.num_left_out) == (3, 2)
    assert lines_of(chart)[-1] == "2 later steps are left out"
    folded = make_chart([PREEMPTED], fold_above=1, max_columns=2)
    assert lines_of(folded)[-1] == "16 later steps are left out"


@pytest.mark.parametrize(
    ("request_ids", "labels"),
    [
        (["a", "bb"], ["a", "bb"]),
        (["0123456789", "0123999999"], ["…6789", "…9999"]),
        (["0123456789", "0124999999"], ["0123", "0124"]),
        (["cmpl-0001-aaaa", "cmpl-0001-bbbb"], ["…aaaa", "…bbbb"]),
        (["request-1", "request-1-again"], ["…st-1", "…gain"]),
        (["same-prefix-x-same-suffix", "same-prefix-y-same-suffix"], ["same-prefix-x", "same-prefix-y"]),
        (["\x1b[31mred\n"], ["?[31mred?"[:4]]),
    ],
)
def test_ids_are_shortened_as_far_as_they_stay_apart(request_ids: list[str], labels: list[str]) -> None:
    step = make_step(1, dict.fromkeys(request_ids, (1, 0)))
    rows = make_chart([make_trace([step])]).panels[0].rows
    assert [row.label for row in rows] == labels


def test_times_are_short() -> None:
    chart = make_chart([CHUNKED])
    assert [time_text(s, time_unit(chart.columns)) for s in (0.0, 0.0123, 0.0999, 0.09996, 1.5)] == [
        "0.0",
        "12.3",
        "99.9",
        "100",
        "1500",
    ]
    late = make_chart([make_trace([make_step(1, planned_s=3600.0, done_s=None)])])
    assert time_text(3600.0, time_unit(late.columns)) == "3600"


def test_a_trace_without_steps_is_no_error() -> None:
    assert lines_of(make_chart([make_trace([])])) == ["no steps"]


def run_at_random(seed: int, folder: Path) -> Trace:
    """A real scheduler short of blocks, with requests that come and are aborted at any time."""
    rng, clock = random.Random(seed), VirtualClock()
    scheduler = make_scheduler(num_blocks=24, max_num_batched_tokens=64, max_num_seqs=6)
    runner = FakeRunner()
    writer = open_step_trace(str(folder), make_header("r", incarnation=str(seed)), clock, 2**20)
    assert writer is not None
    num_to_come = 12
    while scheduler.has_requests() or num_to_come:
        if num_to_come and rng.random() < 0.4:
            num_to_come -= 1
            scheduler.add_request(
                make_request(
                    rng.randrange(1, 120), request_id=f"{seed}-{num_to_come}", max_tokens=rng.randrange(1, 60)
                )
            )
        plan = scheduler.schedule()
        writer.planned(plan, scheduler)
        clock.advance(rng.random() / 10)
        output = runner.execute(plan)
        writer.done(plan.step, output.sampled_token_ids, scheduler.update_from_output(plan, output))
    writer.close()
    return read_trace(folder / f"r-{seed}.jsonl")


@pytest.mark.parametrize("seed", range(8))
def test_no_token_is_lost_and_no_line_too_long_whatever_happened(seed: int, tmp_path: Path) -> None:
    trace = run_at_random(seed, tmp_path)
    planned: dict[str, int] = {}
    for step in trace.steps:
        for request_id, share in step.scheduled.items():
            planned[request_id] = planned.get(request_id, 0) + share.num_tokens
    for fold_above in (1, 10_000):
        chart = make_chart([trace], fold_above=fold_above, max_columns=10_000)
        drawn = {
            row.request_id: sum(piece.num_tokens * piece.num_steps for piece in row.pieces)
            for row in chart.panels[0].rows
        }
        assert drawn == planned
        assert_rows_are_disjoint(chart)
        for width in (60, 133):
            text = text_of(chart, width)
            assert max(map(len, text.plain.splitlines())) <= width
            assert_every_step_stands_once(text, trace.steps, width)


def assert_rows_are_disjoint(chart: Chart) -> None:
    for row in chart.panels[0].rows:
        for before, after in pairwise(row.pieces):
            assert before.last < after.first
        assert row.end is None or all(piece.last < row.end[0] for piece in row.pieces)


def assert_every_step_stands_once(text: Text, steps: tuple[StepTrace, ...], width: int) -> None:
    axes = [
        line.split("step", 1)[1].split()
        for line in text.plain.splitlines()
        if line.strip().startswith("step ")
    ]
    numbers: list[int] = []
    for label in (label for axis in axes for label in axis):
        first, _, last = label.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    assert numbers == [step.step for step in steps], f"at a width of {width}"
