"""A step chart as SVG: one file without scripts or fonts of its own, for light and dark pages and for printers.

Shapes alone identify a piece: prompts are blocks, outputs are pills, hatched tokens were computed before, and dotted
lines wait. The tooltip of a piece tells all about it.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from xml.etree.ElementTree import Element, tostring

from baton.request import FinishReason
from cli.trace_chart import shapes
from cli.trace_chart.shapes import ICON, TIMES, add, write
from cli.trace_chart.steps import Chart, Panel, Piece, PieceKind, Row, StepUsage
from cli.trace_chart.words import (
    END_WORDS,
    TRACE_ENDS,
    Sign,
    explain,
    heading_of,
    left_out,
    signs_of,
    step_text,
    time_text,
    time_unit,
)

_MARGIN = 24.0
_ROW = 30.0
_GAP = 2.0
"""Gap between a piece and the edges of its columns."""
_CHARACTER = 7.6
"""Width of a character of 12 pixels in a usual font, at most, as one among many."""
_MIN_COLUMN = 38.0
_BARS = 36.0
_PROMPT_WIDTH = 62.0
_LOADING_WORDS = "waits for KV"


def svg_of(chart: Chart) -> str:
    """The whole picture as one document."""
    drawing = _Drawing(chart)
    for panel in chart.panels:
        drawing.panel(panel)
    drawing.legend()
    return drawing.document()


class _Drawing:
    """Columns are laid out first; drawing then proceeds from top to bottom, with `_y` as its position."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        self._unit = time_unit(chart.columns)
        rows = [row for panel in chart.panels for row in panel.rows]
        label_width = max([len("free blocks"), *(len(row.label) for row in rows)]) * _CHARACTER
        self._left = _MARGIN + label_width + _PROMPT_WIDTH
        self._edges = _edges(chart, rows, self._unit, self._left)
        self._width = max([_MARGIN + 560.0, *map(self._end_of, rows)]) + _MARGIN
        self._root = Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "baton-steps", "role": "img"}
        )
        names = ", ".join(panel.name for panel in chart.panels)
        add(self._root, "title", f"Steps of {names}")
        shapes.add_definitions(self._root)
        self._page = add(self._root, "rect", x=0, y=0, rx=8, class_="page")
        self._y = _MARGIN + 8

    def panel(self, panel: Panel) -> None:
        """One worker: heading, axis, requests, and the step as a whole."""
        group = add(self._root, "g", class_="panel")
        heading = write(group, _MARGIN, self._y, panel.name, "name")
        add(heading, "tspan", heading_of(panel), dx=10, class_="muted", font_size="12px", font_weight="400")
        if TRACE_ENDS[panel.end]:
            self._y += 18
            write(group, _MARGIN, self._y, TRACE_ENDS[panel.end], "muted")
        self._y += 28
        grid = add(group, "g", class_="grid")
        top = self._y - 8
        self._axis(group, panel)
        for row in panel.rows:
            self._row(group, row)
        self._y += 14
        self._tokens(group, panel)
        self._free_blocks(group, panel)
        self._counts(group, panel)
        for column in [*(usage.column for usage in panel.usage), len(self._chart.columns)]:
            x = self._edges[column]
            add(grid, "line", x1=x, y1=top, x2=x, y2=self._y - 8)
        self._y += 26

    def legend(self) -> None:
        """The signs that occur, and the number of steps left out."""
        group, x = add(self._root, "g", class_="legend"), _MARGIN
        for sign in signs_of(self._chart):
            sample, width = _SAMPLES[sign]
            words = sign.value
            step = width + 8 + len(words) * 6.6 + 22
            if x > _MARGIN and x + step > self._width - _MARGIN:
                x = _MARGIN
                self._y += 28
            sample(group, x, self._y)
            write(group, x + width + 8, self._y, words, "muted")
            x += step
        if left_out(self._chart):
            self._y += 28
            write(group, _MARGIN, self._y, left_out(self._chart), "strong")
        self._y += _MARGIN + 10

    def document(self) -> str:
        width, height = f"{self._width:.0f}", f"{self._y:.0f}"
        self._root.attrib |= {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
        self._page.attrib |= {"width": width, "height": height}
        return tostring(self._root, encoding="unicode") + "\n"

    def _axis(self, group: Element, panel: Panel) -> None:
        """Number and start time of each step."""
        write(group, _MARGIN, self._y, "request", "muted")
        write(group, self._left - 48, self._y, "prompt", "muted right")
        write(group, self._left - 10, self._y, "step", "muted right")
        write(group, self._left - 10, self._y + 15, self._unit[0], "muted right small")
        for usage in panel.usage:
            column, middle = self._chart.columns[usage.column], self._middle_of(usage)
            write(group, middle, self._y, step_text(column), "middle")
            write(group, middle, self._y + 15, time_text(column.begin_s, self._unit), "middle muted small")
        self._y += 40

    def _row(self, group: Element, row: Row) -> None:
        line = add(group, "g", class_="request")
        label = write(line, _MARGIN, self._y, row.label, "label strong")
        add(label, "title", row.request_id)
        if row.num_prompt_tokens is not None:
            write(line, self._left - 48, self._y, str(row.num_prompt_tokens), "muted right")
        for column in row.preempted:
            mark = add(line, "g", class_="preemption")
            add(mark, "title", f"{row.request_id} is preempted")
            shapes.cross(mark, self._edges[column], self._y)
        for piece in row.pieces:
            self._piece(line, row, piece)
        if row.end is not None:
            column, reason = row.end
            is_handed_over = reason is FinishReason.HANDED_OVER
            mark = add(line, "g", class_="ending")
            shapes.end(mark, self._edges[column], self._y, END_WORDS[reason], is_handed_over)
        self._y += _ROW

    def _piece(self, line: Element, row: Row, piece: Piece) -> None:
        group = add(line, "g", class_=f"piece {piece.kind.name.lower()}-piece")
        add(group, "title", explain(row, piece))
        x, stop = self._edges[piece.first] + _GAP, self._edges[piece.last + 1] - _GAP
        if piece.first in row.preempted:
            x += ICON
        if piece.is_resumed:
            shapes.turn(group, x - _GAP, self._y)
            x += ICON
        for num_tokens, pattern in _leads(piece):
            width = _lead_width(num_tokens)
            shapes.lead(group, x, self._y, width, str(num_tokens), pattern)
            x += width + 1
        width, text = stop - x, str(piece.num_tokens)
        if piece.kind is PieceKind.WAITING:
            shapes.waiting(group, x, self._y, width)
        elif piece.kind is PieceKind.LOADING:
            shapes.loading(group, x, self._y, width, _LOADING_WORDS)
        elif piece.is_in_vain:
            shapes.in_vain(group, x, self._y, width, text)
        else:
            draw = shapes.prefill if piece.kind is PieceKind.PREFILL else shapes.decode
            draw(group, x, self._y, width, text, piece.num_steps)

    def _tokens(self, group: Element, panel: Panel) -> None:
        """How full the steps were: prompts below, outputs above, and the budget as a line."""
        budget = panel.header.max_num_batched_tokens
        part = self._begin_bars(group, "tokens", f"of {budget}", "tokens")
        top, bottom = self._y, self._y + _BARS
        for usage in panel.usage:
            x = self._edges[usage.column] + _GAP
            width = self._edges[usage.last + 1] - _GAP - x
            write(part, self._middle_of(usage), top - 9, str(usage.num_tokens), "middle small")
            outputs = max(2.0, usage.num_decode_tokens / budget * _BARS) if usage.num_decode_tokens else 0.0
            prompts = min(usage.num_prefill_tokens / budget * _BARS, _BARS - outputs)
            for y, height, class_ in (
                (bottom - prompts, prompts, "prefill"),
                (bottom - prompts - outputs, outputs, "output-bar"),
            ):
                if height:
                    add(part, "rect", x=x, y=y, width=width, height=height, class_=class_)
        add(part, "line", x1=self._left, y1=top, x2=self._edges[-1], y2=top, class_="limit")
        add(part, "line", x1=self._left, y1=bottom, x2=self._edges[-1], y2=bottom, class_="grid")
        self._y = bottom + 26

    def _free_blocks(self, group: Element, panel: Panel) -> None:
        total = panel.header.num_blocks
        part = self._begin_bars(group, "free blocks", f"of {total}", "free-blocks")
        bottom = self._y + _BARS * 0.6
        stops = [usage.column for usage in panel.usage[1:]] + [len(self._chart.columns)]
        for usage, stop in zip(panel.usage, stops, strict=True):
            x, width = self._edges[usage.column], self._edges[stop] - self._edges[usage.column]
            height = max(1.0, usage.num_free_blocks / total * _BARS * 0.6)
            write(part, self._middle_of(usage), self._y - 9, str(usage.num_free_blocks), "middle small")
            add(part, "rect", x=x, y=bottom - height, width=width, height=height, class_="blocks")
        add(part, "line", x1=self._left, y1=bottom, x2=self._edges[-1], y2=bottom, class_="grid")
        self._y = bottom + 20

    def _begin_bars(self, group: Element, name: str, of_how_many: str, class_: str) -> Element:
        part = add(group, "g", class_=class_)
        write(part, _MARGIN, self._y + 8, name, "muted")
        write(part, self._left - 10, self._y + 8, of_how_many, "muted right")
        return part

    def _counts(self, group: Element, panel: Panel) -> None:
        """Counts that get a line only if they occur."""
        counts: tuple[tuple[str, Callable[[StepUsage], str]], ...] = (
            ("in the queue", lambda usage: str(usage.num_waiting or "")),
            ("swapped out", lambda usage: str(usage.num_swapped_out or "")),
            ("swapped in", lambda usage: str(usage.num_swapped_in or "")),
        )
        for name, text_of in counts:
            if any(map(text_of, panel.usage)):
                part = add(group, "g", class_=name.replace(" ", "-"))
                write(part, _MARGIN, self._y, name, "muted")
                for usage in panel.usage:
                    if text_of(usage):
                        write(part, self._middle_of(usage), self._y, text_of(usage), "middle small")
                self._y += 20

    def _middle_of(self, usage: StepUsage) -> float:
        """The middle of all columns that a step spans."""
        return (self._edges[usage.column] + self._edges[usage.last + 1]) / 2

    def _end_of(self, row: Row) -> float:
        """The right end of a row, including the reason for its end."""
        if row.end is None:
            return self._edges[-1]
        return max(self._edges[-1], self._edges[row.end[0]] + ICON + len(END_WORDS[row.end[1]]) * _CHARACTER)


def _edges(chart: Chart, rows: Sequence[Row], unit: tuple[str, float], left: float) -> list[float]:
    """The left edge of each column, and the right edge of the last; columns are as narrow as their content allows."""
    widths = [
        max(
            _MIN_COLUMN,
            (len(step_text(column)) + 1) * _CHARACTER,
            (len(time_text(column.begin_s, unit)) + 1) * 6.7,
        )
        for column in chart.columns
    ]
    pieces = [(piece, row) for row in rows for piece in row.pieces if piece.kind.is_computed]
    for piece, row in sorted(pieces, key=lambda pair: pair[0].last - pair[0].first):
        icons = (piece.first in row.preempted) + piece.is_resumed
        leads = sum(_lead_width(num_tokens) + 1 for num_tokens, _ in _leads(piece))
        text = (
            f"{piece.num_tokens} {TIMES}{piece.num_steps}__" if piece.num_steps > 1 else str(piece.num_tokens)
        )
        wanted = icons * ICON + leads + len(text) * _CHARACTER + 12 + 2 * _GAP
        widths[piece.last] += max(0.0, wanted - sum(widths[piece.first : piece.last + 1]))
    return list(accumulate(widths, initial=left))


def _leads(piece: Piece) -> list[tuple[int, str]]:
    leads = ((piece.num_cached_tokens, "cached"), (piece.num_swapped_in_tokens, "swapped-in"))
    return [(num_tokens, pattern) for num_tokens, pattern in leads if num_tokens]


def _lead_width(num_tokens: int) -> float:
    return len(str(num_tokens)) * _CHARACTER + 10


_SAMPLES: dict[Sign, tuple[shapes.Shape, float]] = {
    Sign.PREFILL: (lambda group, x, y: shapes.prefill(group, x, y, 34, "n"), 34),
    Sign.DECODE: (lambda group, x, y: shapes.decode(group, x, y, 34, "1"), 34),
    Sign.IN_VAIN: (lambda group, x, y: shapes.in_vain(group, x, y, 34, "1"), 34),
    Sign.FOLD: (lambda group, x, y: shapes.decode(group, x, y, 44, "1", 9), 44),
    Sign.CACHED: (lambda group, x, y: shapes.lead(group, x, y, 28, "n", "cached"), 28),
    Sign.SWAPPED_IN: (lambda group, x, y: shapes.lead(group, x, y, 28, "n", "swapped-in"), 28),
    Sign.WAITING: (lambda group, x, y: shapes.waiting(group, x, y, 34), 34),
    Sign.LOADING: (lambda group, x, y: shapes.loading(group, x, y, 34, _LOADING_WORDS), 34),
    Sign.PREEMPTED: (shapes.cross, ICON),
    Sign.RESUMED: (shapes.turn, ICON),
}
"""A small example of each sign, and its width."""
