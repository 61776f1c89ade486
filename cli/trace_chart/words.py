"""The wording of step charts."""

from collections.abc import Sequence
from enum import Enum

from baton.request import FinishReason
from cli.trace_chart.columns import Column
from cli.trace_chart.steps import Chart, Panel, PieceKind
from worker.step_trace import TraceEnd

END_WORDS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "aborted",
    FinishReason.ERROR: "error",
    FinishReason.HANDED_OVER: "handed over",
}

TRACE_ENDS = {
    TraceEnd.CLOSED: "",
    TraceEnd.FULL: "the file reached its limit; the worker went on",
    TraceEnd.OPEN: "the trace has no end: the worker still runs, or was killed",
    TraceEnd.CUT: "the last line is incomplete: the worker was killed, or is writing it",
}


class Sign(Enum):
    """A sign that occurs in a chart; the value explains it."""

    PREFILL = "prompt tokens"
    DECODE = "output token"
    DRAFTS = "output tokens, of n computed with drafts"
    IN_VAIN = "computed in vain"
    FOLD = "so many equal steps"
    CACHED = "from the prefix cache"
    SWAPPED_IN = "back from host memory"
    WAITING = "in the queue"
    LOADING = "waits for KV from another worker"
    PREEMPTED = "preempted"
    RESUMED = "resumed"


def signs_of(chart: Chart) -> list[Sign]:
    """The signs that occur in this chart."""
    rows = [row for panel in chart.panels for row in panel.rows]
    pieces = [piece for row in rows for piece in row.pieces]
    kinds = {piece.kind for piece in pieces}
    occurs = {
        Sign.PREFILL: PieceKind.PREFILL in kinds,
        Sign.DECODE: any(p.kind is PieceKind.DECODE and p.num_sampled is None for p in pieces),
        Sign.DRAFTS: any(piece.num_sampled is not None for piece in pieces),
        Sign.IN_VAIN: any(piece.is_in_vain for piece in pieces),
        Sign.FOLD: any(piece.num_steps > 1 for piece in pieces),
        Sign.CACHED: any(piece.num_cached_tokens for piece in pieces),
        Sign.SWAPPED_IN: any(piece.num_swapped_in_tokens for piece in pieces),
        Sign.WAITING: PieceKind.WAITING in kinds,
        Sign.LOADING: PieceKind.LOADING in kinds,
        Sign.PREEMPTED: any(row.preempted for row in rows),
        Sign.RESUMED: any(piece.is_resumed for piece in pieces),
    }
    return [sign for sign in Sign if occurs[sign]]


def heading_of(panel: Panel) -> str:
    """The worker's role, its token budget for a step, and its blocks."""
    header = panel.header
    return (
        f"{header.role.value} worker, {header.max_num_batched_tokens} tokens a step, "
        f"{header.num_blocks} blocks of {header.block_size}"
    )


def left_out(chart: Chart) -> str:
    """Says how many steps did not fit; empty if all did."""
    if chart.num_left_out == 1:
        return "1 later step is left out"
    return f"{chart.num_left_out} later steps are left out" if chart.num_left_out else ""


def step_text(column: Column) -> str:
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
