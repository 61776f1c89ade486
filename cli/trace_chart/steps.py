"""A step chart: the layout of the traces of one or several workers; knows no terminal.

Each worker has a panel. A panel has one row for each request, in the order of arrival, and one column for
each step. Pieces lie in rows and span columns. All panels share their columns (cli/trace_chart/columns.py).
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from baton.request import FinishReason
from cli.trace_chart.columns import EVERYTHING, Column, StepRange, columns_of, is_decode
from worker.step_trace import StepTrace, Trace, TraceEnd, TraceHeader

_MIN_LABEL = 4
_MAX_WHOLE_LABEL = 8
"""Ids up to this length are not shortened."""


class PieceKind(Enum):
    """What a request did in a piece."""

    PREFILL = auto()
    """The step computed tokens of the prompt, or tokens that a preemption had lost; see `is_decode`."""
    DECODE = auto()
    LOADING = auto()
    """The request waited for KV from another worker."""
    WAITING = auto()
    """The request was in the queue."""

    @property
    def is_computed(self) -> bool:
        return self in (PieceKind.PREFILL, PieceKind.DECODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One activity of a request, from the beginning of column `first` to the end of column `last`."""

    kind: PieceKind
    first: int
    last: int
    num_steps: int = 1
    """How many equal steps this piece stands for."""
    num_tokens: int = 0
    """Tokens computed in each step."""
    num_sampled: int | None = None
    """With drafts: how many of the `num_tokens` tokens were output; the others were wrong. None without drafts."""
    num_cached_tokens: int = 0
    """Tokens found in the prefix cache at the beginning of this piece."""
    num_swapped_in_tokens: int = 0
    """Tokens copied back from host memory at the beginning of this piece."""
    is_resumed: bool = False
    is_in_vain: bool = False
    """The request had already ended, but the scheduler did not know this when it planned the step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request on one worker."""

    request_id: str
    label: str
    num_prompt_tokens: int | None
    pieces: tuple[Piece, ...]
    preempted: tuple[int, ...]
    """Columns in which the request lost its blocks."""
    end: tuple[int, FinishReason] | None
    """The request's end: the column at whose beginning it is drawn, and the reason. The column may be one past the last
    column. None if the request does not end."""


@dataclass(frozen=True, slots=True)
class Panel:
    """The part of the chart that belongs to one worker."""

    name: str
    header: TraceHeader
    end: TraceEnd
    rows: tuple[Row, ...]
    steps: tuple[tuple[int, StepTrace], ...]
    """For each of the worker's own columns: its index, and its last step, whose numbers are drawn below the column."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A whole picture.

    All names in it are printable, even if the trace files contain control characters. Headers are
    unchanged.
    """

    columns: tuple[Column, ...]
    num_left_out: int
    """How many later steps did not fit."""
    panels: tuple[Panel, ...]


def make_chart(
    traces: Sequence[Trace],
    steps: StepRange = EVERYTHING,
    requests: Collection[str] = (),
    fold_above: int = 40,
    max_columns: int = 200,
) -> Chart:
    """Lays out the chart of these traces.

    `requests` are prefixes of ids; without prefixes, all requests are drawn. If there were more columns than
    `fold_above`, equal steps are folded. At most `max_columns` columns are drawn.
    """
    found = columns_of(traces, steps, fold_above)
    columns = tuple(found[:max_columns])
    plots = [_Plot(owner, trace, columns) for owner, trace in enumerate(traces)]
    beginnings = tuple(requests) or ""  # every id starts with the empty prefix
    shown = [
        [
            request
            for request in plot.requests
            if request.is_visible and request.request_id.startswith(beginnings)
        ]
        for plot in plots
    ]
    label_of = _labels({request.request_id for rows in shown for request in rows})
    panels = tuple(
        Panel(
            name=_printable(trace.header.worker),
            header=trace.header,
            end=trace.end,
            rows=tuple([request.to_row(label_of) for request in rows]),
            steps=tuple(plot.steps),
        )
        for trace, plot, rows in zip(traces, plots, shown, strict=True)
    )
    return Chart(columns, sum(len(column.steps) for column in found[max_columns:]), panels)


@dataclass(slots=True)
class _Request:
    """A request from its first mention to its end. After that, another request may have the same id."""

    request_id: str
    number: int
    num_prompt_tokens: int | None = None
    pieces: list[Piece] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    ended_s: float | None = None
    end: tuple[int, FinishReason] | None = None

    @property
    def is_visible(self) -> bool:
        return bool(self.pieces or self.preempted or self.end)

    def to_row(self, label_of: Callable[[str], str]) -> Row:
        label = label_of(self.request_id) + "'" * self.number
        end = self.end
        if end is not None:  # after tokens that were computed in vain
            end = (max([end[0], *(piece.last + 1 for piece in self.pieces)]), end[1])
        return Row(
            _printable(self.request_id),
            label,
            self.num_prompt_tokens,
            tuple(self.pieces),
            tuple(self.preempted),
            end,
        )

    def extend(self, kind: PieceKind, first: int, last: int) -> None:
        """Records that the request waits, and extends its last piece if it waited before."""
        previous = self.pieces[-1] if self.pieces else None
        if previous is not None and previous.kind is kind and previous.last == first - 1:
            first = previous.first
            self.pieces.pop()
        self.pieces.append(Piece(kind=kind, first=first, last=last))


class _Plot:
    """Reads one trace from its beginning, and draws everything that happens within the columns."""

    def __init__(self, owner: int, trace: Trace, columns: Sequence[Column]) -> None:
        self.requests: list[_Request] = []
        self.steps: list[tuple[int, StepTrace]] = []
        self._columns = columns
        self._own = [index for index, column in enumerate(columns) if column.owner == owner]
        self._index_of = {step.step: index for index in self._own for step in columns[index].steps}
        self._current: dict[str, _Request] = {}
        for step in trace.steps:
            self._draw_step(step)

    def _draw_step(self, step: StepTrace) -> None:
        index = self._index_of.get(step.step)
        is_first = index is not None and self._columns[index].steps[0] is step
        for request_id in step.scheduled:
            self._compute(step, request_id, index if is_first else None)
        for kind, request_ids in ((PieceKind.LOADING, step.loading), (PieceKind.WAITING, step.waiting)):
            for request_id in request_ids:
                request = self._request(request_id, step)
                if index is not None and is_first and request.ended_s is None:
                    request.extend(kind, index, self._next_own(index) - 1)
        for request_id in step.preempted:
            request = self._request(request_id, step)
            if index is not None and request.ended_s is None:
                request.preempted.append(index)
        for request_id, reason in step.ended.items():
            self._end(step, request_id, reason, index)
        if index is not None and is_first:
            self.steps.append((index, self._columns[index].steps[-1]))

    def _request(self, request_id: str, step: StepTrace) -> _Request:
        """The request with this id.

        A step that was planned before a request's end was known still means the old request.
        """
        request = self._current.get(request_id)
        if request is None or (request.ended_s is not None and step.planned_s >= request.ended_s):
            request = _Request(request_id, 0 if request is None else request.number + 1)
            self._current[request_id] = request
            self.requests.append(request)
        return request

    def _compute(self, step: StepTrace, request_id: str, index: int | None) -> None:
        request, share = self._request(request_id, step), step.scheduled[request_id]
        is_resumed = request_id in step.resumed
        if request_id in step.num_prompt_tokens:
            request.num_prompt_tokens = step.num_prompt_tokens[request_id]
        if index is None:
            return
        num_cached = step.num_cached_tokens.get(request_id, 0)
        num_drafts = step.num_drafts.get(request_id, 0)
        decodes = is_decode(share, num_drafts, request.num_prompt_tokens)
        request.pieces.append(
            Piece(
                kind=PieceKind.DECODE if decodes else PieceKind.PREFILL,
                first=index,
                last=self._end_of_work(index) - 1,
                num_steps=len(self._columns[index].steps),
                num_tokens=share.num_tokens,
                num_sampled=share.num_sampled if num_drafts else None,
                num_cached_tokens=num_cached,
                num_swapped_in_tokens=share.num_computed_tokens - num_cached if is_resumed else 0,
                is_resumed=is_resumed,
                is_in_vain=request.ended_s is not None,
            )
        )

    def _end(self, step: StepTrace, request_id: str, reason: FinishReason, index: int | None) -> None:
        request = self._request(request_id, step)
        is_in_step = any(request_id in ids for ids in (step.scheduled, step.loading, step.waiting))
        is_by_result = is_in_step and step.done_s is not None
        request.ended_s = step.done_s if is_by_result else step.planned_s
        if index is not None:
            request.end = (self._end_of_work(index) if is_by_result else index, reason)

    def _next_own(self, index: int) -> int:
        """The index of the column in which the worker's next step begins."""
        position = bisect_left(self._own, index + 1)
        return self._own[position] if position < len(self._own) else len(self._columns)

    def _end_of_work(self, index: int) -> int:
        """The first column that begins after this column's step is done."""
        end_s, next_own = self._columns[index].end_s, self._next_own(index)
        return next((i for i in range(index + 1, next_own) if self._columns[i].begin_s >= end_s), next_own)


def _labels(request_ids: Collection[str]) -> Callable[[str], str]:
    """A function that shortens ids to the leading or trailing characters that tell them apart, whichever are fewer."""
    printable = {request_id: _printable(request_id) for request_id in request_ids}
    longest = max(map(len, request_ids), default=0)
    for size in range(_MIN_LABEL, longest) if longest > _MAX_WHOLE_LABEL else ():
        beginnings = {request_id: text[:size] for request_id, text in printable.items()}
        ends = {
            request_id: text if len(text) <= size else "…" + text[-size:]
            for request_id, text in printable.items()
        }
        for labels in (beginnings, ends):
            if len(set(labels.values())) == len(labels):
                return labels.__getitem__
    return printable.__getitem__


def _printable(name: str) -> str:
    """Replaces characters that would move the cursor of a terminal."""
    return "".join(character if character.isprintable() else "?" for character in name)
