"""A step chart for terminals: readable without colours, as wide as fits, in several bands if needed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from baton.request import FinishReason
from cli.trace_chart.columns import Column
from cli.trace_chart.steps import Chart, Panel, Piece, PieceKind, Row
from worker.step_trace import StepTrace, TraceEnd

_END_WORDS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "aborted",
    FinishReason.ERROR: "error",
    FinishReason.HANDED_OVER: "handed over",
}

_TRACE_ENDS = {
    TraceEnd.CLOSED: "",
    TraceEnd.FULL: "the file reached its size limit; the worker continued",
    TraceEnd.OPEN: "the trace has no end: the worker still runs, or was killed",
    TraceEnd.CUT: "the last line is incomplete: the worker was killed, or is writing it",
}
_END_SIGNS = {FinishReason.HANDED_OVER: "→"}
_STYLES = {
    PieceKind.PREFILL: "black on cyan",
    PieceKind.DECODE: "bold",
    PieceKind.LOADING: "magenta",
    PieceKind.WAITING: "dim",
}
_FILLS = {PieceKind.LOADING: "~", PieceKind.WAITING: "·"}
_PREEMPTED, _RESUMED = "✗", "↻"
_LEVELS = " ▁▂▃▄▅▆▇█"
_MIN_WIDTH = 3


def text_of(chart: Chart, width: int) -> Text:
    """The whole picture in lines of at most `width` characters. Headings and single columns may be wider."""
    if not chart.columns:
        return Text("no steps\n")
    layout = _Layout(chart)
    lines: list[Text] = []
    for first, stop in layout.bands(width):
        band = _Band(chart, layout, first, stop)
        for number, panel in enumerate(chart.panels):
            lines += band.lines_of(number, panel)
    lines += _legend(chart, width)
    if _left_out(chart):
        lines.append(Text(_left_out(chart), "bold"))
    return Text("\n").join(lines)


class _Layout:
    """The widths of the chart's columns."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self.unit = time_unit(chart.columns)
        rows = [row for panel in chart.panels for row in panel.rows]
        self.label_width = max([len("request"), *(len(row.label) for row in rows)])
        self.widths = [
            max(_MIN_WIDTH, len(_step_text(column)), len(time_text(column.begin_s, self.unit)))
            for column in chart.columns
        ]
        for panel in chart.panels:
            for column, step in panel.steps:
                texts = [text for _, text in _usage_texts(panel, step)]
                self.widths[column] = max([self.widths[column], *map(len, texts)])
        pieces = [(piece, row) for row in rows for piece in row.pieces if piece.kind.is_computed]
        for piece, row in sorted(pieces, key=lambda pair: pair[0].last - pair[0].first):
            num_characters = (piece.first in row.preempted) + sum(map(len, _cell(piece)))
            self.widths[piece.last] += max(0, num_characters - self.width(piece.first, piece.last + 1))

    @property
    def margin(self) -> int:
        """Where the first column begins: right of the request, the prompt, and the axes' names."""
        return self.label_width + len("  prompt  step  ")

    def width(self, first: int, stop: int) -> int:
        """Width of these columns, with the gaps between them."""
        return sum(self.widths[first:stop]) + max(0, stop - first - 1)

    def bands(self, width: int) -> Iterator[tuple[int, int]]:
        """Splits the columns into bands that fit the width. Yields, for each band, the index of its first column, and
        the index after its last column."""
        first = 0
        while first < len(self.widths):
            stop = first + 1
            while stop < len(self.widths) and self._num_characters(first, stop + 1) <= width:
                stop += 1
            yield first, stop
            first = stop

    def _num_characters(self, first: int, stop: int) -> int:
        num_characters = self.margin + self.width(first, stop)
        for panel in self._chart.panels:
            for row in panel.rows:
                if row.end is not None and first < row.end[0] <= stop:
                    begin = self.margin + self.width(first, row.end[0]) + 1
                    num_characters = max(num_characters, begin + len(_end_text(row.end[1])))
        return num_characters


@dataclass(slots=True)
class _Line:
    """Collects texts at their positions, from left to right."""

    text: Text = field(default_factory=Text)

    def put(self, at: int, text: str, style: str = "") -> "_Line":
        self.text.append(" " * (at - len(self.text)))
        self.text.append(text, style)
        return self


class _Band:
    """Some columns side by side, with all their content."""

    def __init__(self, chart: Chart, layout: _Layout, first: int, stop: int) -> None:
        self._chart = chart
        self._layout = layout
        self._first = first
        self._stop = stop

    def lines_of(self, number: int, panel: Panel) -> list[Text]:
        """The lines of one worker's panel in this band; empty if the worker has no steps in it."""
        rows = [row for row in panel.rows if self._has(row)]
        usage = self._usage(panel)
        if not rows and not usage:
            return []
        return [_heading(panel), *self._axis(number), *map(self._row, rows), Text(), *usage, Text()]

    def _at(self, column: int) -> int:
        """The position at which a column begins."""
        gap = 1 if column > self._first else 0
        return self._layout.margin + self._layout.width(self._first, column) + gap

    def _has(self, row: Row) -> bool:
        is_busy = any(piece.first < self._stop and piece.last >= self._first for piece in row.pieces)
        return (
            is_busy
            or any(map(self._holds, row.preempted))
            or (row.end is not None and self._ends(row.end[0]))
        )

    def _holds(self, column: int) -> bool:
        return self._first <= column < self._stop

    def _ends(self, column: int) -> bool:
        """Whether the reason for an end at this column belongs to this band.

        A reason before the first column of a band is drawn after the last column of the band above.
        """
        return self._first < column <= self._stop or column == self._first == 0

    def _axis(self, number: int) -> list[Text]:
        """The number and the start time of each step."""
        head = f"{'request':<{self._layout.label_width}}  prompt"
        steps = _Line().put(self._layout.margin - len("step  "), "step", "dim")
        times = _Line().put(0, f"{head}  {self._layout.unit[0]:>4}", "dim")
        for index in range(self._first, self._stop):
            column, width = self._chart.columns[index], self._layout.widths[index]
            if column.owner == number:
                steps.put(self._at(index), _step_text(column).center(width).rstrip())
                times.put(
                    self._at(index),
                    time_text(column.begin_s, self._layout.unit).center(width).rstrip(),
                    "dim",
                )
        return [steps.text, times.text]

    def _row(self, row: Row) -> Text:
        prompt = "" if row.num_prompt_tokens is None else str(row.num_prompt_tokens)
        line = _Line().put(0, row.label, "bold").put(self._layout.label_width + 2, prompt.rjust(6), "dim")
        pieces = [piece for piece in row.pieces if piece.first < self._stop and piece.last >= self._first]
        marks: list[tuple[int, Piece | None]] = [(piece.first, piece) for piece in pieces]
        marks += [(column, None) for column in row.preempted if self._holds(column)]
        for column, piece in sorted(marks, key=lambda mark: (mark[0], mark[1] is not None)):
            if piece is None:
                line.put(self._at(column), _PREEMPTED, "bold red")
            else:
                self._put(line, piece)
        if row.end is not None and self._ends(row.end[0]):
            column, reason = row.end
            line.put(self._at(column), _end_text(reason), "bold")
        return line.text

    def _put(self, line: _Line, piece: Piece) -> None:
        first, stop = max(piece.first, self._first), min(piece.last + 1, self._stop)
        begin = max(self._at(first), len(line.text))
        width = self._at(first) + self._layout.width(first, stop) - begin
        if piece.kind in _FILLS:
            line.put(begin, _FILLS[piece.kind] * width, _STYLES[piece.kind])
            return
        lead, body, fold = _cell(piece) if first == piece.first else ("", "", "")
        line.put(begin, lead, "cyan")
        width -= len(lead) + len(fold)
        if piece.kind is PieceKind.PREFILL:
            body = body.strip("[]").center(width - 2)[: width - 2]
            body = ("[" if first == piece.first else " ") + body + ("]" if stop == piece.last + 1 else " ")
        else:
            body = body.center(width).rstrip()
        line.put(begin + len(lead), body, _STYLES[piece.kind])
        line.put(len(line.text), fold, "dim")

    def _usage(self, panel: Panel) -> list[Text]:
        lines: dict[str, _Line] = {}
        names = _usage_names(panel)
        for column, step in panel.steps:
            if self._holds(column):
                for name, text in _usage_texts(panel, step):
                    if name in names and text:
                        line = lines.setdefault(name, _Line().put(0, names[name], "dim"))
                        line.put(self._at(column), text.center(self._layout.widths[column]).rstrip())
        return [line.text for line in lines.values()]


def _heading(panel: Panel) -> Text:
    """The worker's name and role, its token budget for a step, and its blocks; also why its trace ended early."""
    header = panel.header
    heading = Text.assemble(
        (panel.name, "bold cyan"),
        f"  {header.role.value} worker, {header.max_num_batched_tokens} tokens a step, "
        f"{header.num_blocks} blocks of {header.block_size}",
    )
    if _TRACE_ENDS[panel.end]:
        heading.append(f"\n{_TRACE_ENDS[panel.end]}", "bold")
    return heading


def _cell(piece: Piece) -> tuple[str, str, str]:
    """Three texts of a cell: what comes before the tokens, the tokens, and the number of equal steps."""
    lead = _RESUMED if piece.is_resumed else ""
    if piece.num_cached_tokens:
        lead += f"{piece.num_cached_tokens}+"
    if piece.num_swapped_in_tokens:
        lead += f"{piece.num_swapped_in_tokens}^"
    tokens = f"{piece.num_tokens}" if piece.num_sampled is None else f"{piece.num_sampled}/{piece.num_tokens}"
    body = f"[{tokens}]" if piece.kind is PieceKind.PREFILL else tokens
    if piece.is_in_vain:
        body = f"({tokens})"
    return lead, body, f"x{piece.num_steps}" if piece.num_steps > 1 else ""


def _usage_names(panel: Panel) -> dict[str, str]:
    """The names of the lines below the requests. Lines without any value are left out."""
    names = {"tokens": f"tokens of {panel.header.max_num_batched_tokens}", "free": "free blocks"}
    if any(step.num_waiting for _, step in panel.steps):
        names["queue"] = "queue"
    if any(step.num_swapped_out or step.num_swapped_in for _, step in panel.steps):
        names["swap"] = "blocks swapped"
    return names


def _usage_texts(panel: Panel, step: StepTrace) -> list[tuple[str, str]]:
    num_tokens = sum(share.num_tokens for share in step.scheduled.values())
    share = num_tokens / panel.header.max_num_batched_tokens
    level = _LEVELS[min(8, math.ceil(share * 8))]
    out, back = step.num_swapped_out, step.num_swapped_in
    swap = " ".join([f"-{out}"] * bool(out) + [f"+{back}"] * bool(back))
    return [
        ("tokens", f"{num_tokens}{level}"),
        ("free", str(step.num_free_blocks)),
        ("queue", str(step.num_waiting) if step.num_waiting else ""),
        ("swap", swap),
    ]


def _end_text(reason: FinishReason) -> str:
    return f"{_END_SIGNS.get(reason, '■')} {_END_WORDS[reason]}"


def _legend(chart: Chart, width: int) -> list[Text]:
    """Explains the signs that occur in this chart."""
    lines = [Text()]
    for sign, meaning in _signs_in(chart):
        entry = Text.assemble((sign, "bold"), f" {meaning}   ")
        if lines[-1] and len(lines[-1]) + len(entry) > width:
            lines.append(Text())
        lines[-1].append(entry)
    for line in lines:
        line.rstrip()
    return lines


def _signs_in(chart: Chart) -> list[tuple[str, str]]:
    """The signs that occur in this chart, each with its meaning."""
    rows = [row for panel in chart.panels for row in panel.rows]
    pieces = [piece for row in rows for piece in row.pieces]
    kinds = {piece.kind for piece in pieces}
    is_plain = (piece.kind is PieceKind.DECODE and piece.num_sampled is None for piece in pieces)
    signs = (
        ("[n]", "prompt tokens", PieceKind.PREFILL in kinds),
        ("1", "output token", any(is_plain)),
        (
            "m/n",
            "n tokens computed with drafts, m of them output",
            any(p.num_sampled is not None for p in pieces),
        ),
        ("(1)", "computed, but not used", any(piece.is_in_vain for piece in pieces)),
        ("xn", "n equal steps", any(piece.num_steps > 1 for piece in pieces)),
        ("n+", "from the prefix cache", any(piece.num_cached_tokens for piece in pieces)),
        ("n^", "back from host memory", any(piece.num_swapped_in_tokens for piece in pieces)),
        ("···", "in the queue", PieceKind.WAITING in kinds),
        ("~~~", "waits for KV from another worker", PieceKind.LOADING in kinds),
        (_PREEMPTED, "preempted", any(row.preempted for row in rows)),
        (_RESUMED, "resumed", any(piece.is_resumed for piece in pieces)),
    )
    return [(sign, meaning) for sign, meaning, occurs in signs if occurs]


def _left_out(chart: Chart) -> str:
    """Says how many steps did not fit; empty if all did."""
    if chart.num_left_out == 1:
        return "1 later step is left out"
    return f"{chart.num_left_out} later steps are left out" if chart.num_left_out else ""


def _step_text(column: Column) -> str:
    """The number of a column's step, or the numbers of its first and last step."""
    first, last = column.steps[0].step, column.steps[-1].step
    return str(first) if first == last else f"{first}-{last}"


def time_unit(columns: Sequence[Column]) -> tuple[str, float]:
    """The name and the length in seconds of the unit that keeps the chart's times short."""
    return ("s", 1.0) if columns and columns[-1].begin_s >= 100 else ("ms", 1e-3)


def time_text(seconds: float, unit: tuple[str, float]) -> str:
    """The time in as few characters as the unit allows."""
    value = seconds / unit[1]
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
