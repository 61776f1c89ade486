"""Columns of a step chart: the steps of one or several workers ordered by time, with equal neighbours folded.

A column begins when any worker begins to compute a step. So simultaneous events on two workers share a
column, and a long step of one worker spans several short steps of the other worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.step_trace import Share, StepTrace, Trace

MIN_FOLD = 4
"""A shorter run of equal steps is not folded."""


@dataclass(frozen=True, slots=True)
class Column:
    """One step of one worker, or several equal steps in a row. Times are seconds since the earliest trace began."""

    owner: int
    """Index of the trace."""
    steps: tuple[StepTrace, ...]
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepRange:
    """A range of step numbers, both ends included; None leaves an end open."""

    first: int | None = None
    last: int | None = None


EVERYTHING = StepRange()


def columns_of(traces: Sequence[Trace], steps: StepRange, fold_above: int) -> list[Column]:
    """Columns ordered by time.

    `steps` selects steps of the first trace; the other traces contribute their steps of the same period. If
    there were more columns than `fold_above`, equal steps are folded.
    """
    columns = [
        column for owner, trace in enumerate(traces) for column in _single(owner, trace, _zero(traces))
    ]
    columns = _within(steps, sorted(columns, key=lambda column: (column.begin_s, column.owner)))
    return columns if len(columns) <= fold_above else _fold(columns, traces)


def prompt_lengths(trace: Trace) -> dict[str, int]:
    """Prompt lengths of all requests that the worker computed, by request id."""
    return {
        request_id: num_tokens
        for step in trace.steps
        for request_id, num_tokens in step.num_prompt_tokens.items()
    }


def is_decode(share: Share, num_drafts: int, num_prompt_tokens: int | None) -> bool:
    """Whether a request decodes in this step. Then, apart from drafts, it computes one token, which is not in its
    prompt.

    If the prompt's length is unknown, a single token counts as output.
    """
    return share.num_tokens - num_drafts == 1 and share.num_computed_tokens >= (num_prompt_tokens or 0)


def _zero(traces: Sequence[Trace]) -> float:
    return min(trace.header.began_unix_s for trace in traces)


def _single(owner: int, trace: Trace, zero_unix_s: float) -> list[Column]:
    """One column for each step.

    With asynchronous scheduling, a step is planned while the previous step computes. So it begins when the
    previous step ends.
    """
    columns = []
    offset_s, previous_end_s = trace.header.began_unix_s - zero_unix_s, 0.0
    for step in trace.steps:
        begin_s = max(step.planned_s, previous_end_s)
        end_s = max(begin_s, begin_s if step.done_s is None else step.done_s)
        columns.append(Column(owner, (step,), begin_s + offset_s, end_s + offset_s))
        previous_end_s = end_s
    return columns


def _within(steps: StepRange, columns: list[Column]) -> list[Column]:
    """The columns from the beginning of the first selected step to the end of the last."""
    first, last = steps.first, steps.last
    if first is None and last is None:
        return columns
    wanted = [
        column
        for column in columns
        if column.owner == 0
        and (first is None or column.steps[0].step >= first)
        and (last is None or column.steps[0].step <= last)
    ]
    if not wanted:
        return []
    begin_s = wanted[0].begin_s if first is not None else 0.0
    end_s = wanted[-1].end_s if last is not None else columns[-1].end_s
    others = [c for c in columns if c.owner != 0 and begin_s <= c.begin_s <= end_s]
    return sorted(wanted + others, key=lambda column: (column.begin_s, column.owner))


def _fold(columns: list[Column], traces: Sequence[Trace]) -> list[Column]:
    prompts = [prompt_lengths(trace) for trace in traces]
    folded: list[Column] = []
    run: list[Column] = []
    for column in columns:
        if run and _appearance(column, prompts) != _appearance(run[0], prompts):
            folded += _merge(run)
            run = []
        run.append(column)
    return folded + _merge(run)


def _appearance(column: Column, prompts: Sequence[dict[str, int]]) -> tuple[object, ...]:
    """What the picture shows of a step. A step that must not be folded gets a value that equals no other."""
    step = column.steps[0]
    is_alone = (
        step.num_prompt_tokens
        or step.resumed
        or step.preempted
        or step.ended
        or step.done_s is None
        or not step.scheduled
    )
    if is_alone or step.num_swapped_in or step.num_swapped_out:
        return (column.owner, step.step)
    cells = tuple(
        (
            request_id,
            share.num_tokens,
            share.num_sampled if request_id in step.num_drafts else None,
            is_decode(share, step.num_drafts.get(request_id, 0), prompts[column.owner].get(request_id)),
        )
        for request_id, share in step.scheduled.items()
    )
    return (column.owner, cells, step.loading, step.waiting, step.num_waiting)


def _merge(run: list[Column]) -> list[Column]:
    if len(run) < MIN_FOLD:
        return run
    steps = tuple(step for column in run for step in column.steps)
    return [Column(run[0].owner, steps, run[0].begin_s, run[-1].end_s)]
