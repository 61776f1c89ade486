"""TopView: draws a screen of `baton top` from two descriptions of a fleet, and fits it to the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cli.views import rates, words

_BAR_STYLES = (("referenced", "█", "green"), ("leased", "▓", "cyan"), ("quarantined", "░", "magenta"))
_FREE = "·"
_NUM_LINES = 5
"""Lines of each section if there is enough room."""
_FEW = 2
"""Lines of each section if there is little room."""
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class TopView:
    """The whole screen.

    `previous` was taken `elapsed_s` before `current`; without `previous` there are no rates.
    """

    target: str
    previous: dict[str, Any] | None
    current: dict[str, Any]
    elapsed_s: float
    height: int | None = None
    """Lines of the screen; None shows everything."""
    notice: str = ""
    """Why there is no newer description; empty if `current` is up to date."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, is_wide = options.max_width, options.max_width >= words.WIDE
        header, workers = self._header(width), self.current["workers"]
        pairs = rates.transfers(self.previous, self.current, self.elapsed_s)
        failures, decisions = self._failures(), self._decisions()
        sizes = [min(_NUM_LINES, len(lines)) for lines in (pairs, failures, decisions)]
        num_shown = len(workers)
        if self.height is not None:
            num_shown, sizes = fit(self.height - len(header) - 2, num_shown, sizes)
        yield from header
        yield self._workers(workers[:num_shown], is_wide)
        yield _legend(len(workers) - num_shown)
        if sizes[0]:
            yield from (_title("transfers"), _transfers(pairs[: sizes[0]], is_wide))
        if sizes[1]:
            yield from (_title("last failures"), *failures[: sizes[1]])
        if sizes[2]:
            yield from (_title("planner"), *decisions[-sizes[2] :])

    def _header(self, width: int) -> list[Text]:
        current, gateway = self.current, self.current["gateway"]
        name = Text.assemble(
            ("baton top", "bold"), "  ", (current["model"], "bold cyan"), f" at {self.target}"
        )
        leave = "q leaves"
        name.append(" " * max(2, width - name.cell_len - len(leave)) + leave, "dim")
        paths = Text("paths  ")
        for index, (path, count, per_s) in enumerate(
            rates.path_rates(self.previous, current, self.elapsed_s)
        ):
            pace = f" ({per_s:.1f}/s)" if per_s else ""
            paths.append(f"{', ' if index else ''}{count} {path}{pace}")
        in_flight = f"{gateway['in_flight']} in flight, {gateway['queued']} queued"
        state = Text.assemble((in_flight, "bold"), "   ", words.controller_text(current["controller"]))
        if current["nodes"]:
            state.append("   ").append_text(_nodes_text(current["nodes"]))
        outcomes = Text(words.outcomes_text(gateway["counters"]))
        lines = [name, state, paths, outcomes]
        if self.notice:
            lines.append(Text(f"the data below is old: {self.notice}", "bold red"))
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return [*lines, Text("")]

    def _workers(self, workers: list[dict[str, Any]], is_wide: bool) -> Table:
        table = words.plain_table("worker", "role", "state", *(["node"] if is_wide else []), expand=True)
        table.add_column("blocks", ratio=1, no_wrap=True, min_width=8)
        numbers = ["used", "run", "wait", "load", "step ms", "tok/s"]
        for heading in numbers + (
            ["queued tok", "oldest s", "hits", "drafts", "host", "starts"] if is_wide else []
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for worker in workers:
            table.add_row(*self._row(worker, is_wide))
        return table

    def _row(self, worker: dict[str, Any], is_wide: bool) -> list[RenderableType]:
        blocks, requests, load = worker["kv_blocks"], worker["requests"], worker["load"]
        head: list[RenderableType] = [
            Text(worker["name"]),
            Text(words.role_text(worker, is_wide)),
            words.state_text(worker),
        ]
        if is_wide:
            head.append(Text(words.node_of(worker)))
        if not blocks["total"]:  # of this worker, only the number of starts is known
            return [*head, *[""] * 12, words.starts_of(worker)] if is_wide else head
        used = 1 - blocks["free"] / blocks["total"]
        step_ms, prefill_rate = load["decode_step_s"] * 1e3, load["prefill_tokens_per_s"]
        row: list[RenderableType] = [
            *head,
            _BlocksBar(blocks),
            f"{used:.0%}",
            str(requests["running"]),
            str(requests["waiting"]),
            str(requests["waiting_for_remote_kvs"]),
            f"{step_ms:.1f}" if step_ms else "-",
            words.amount(prefill_rate) if prefill_rate else "-",
        ]
        if is_wide:
            hits = rates.hit_rate(self.previous, worker)
            accepted = rates.acceptance_rate(self.previous, worker)
            row += [
                words.amount(load["queued_prompt_tokens"]),
                f"{load['oldest_waiting_s']:.1f}",
                "-" if hits is None else f"{hits:.0%}",
                "-" if accepted is None else f"{accepted:.0%}",
                f"{blocks['host_used']}/{blocks['host_total']}" if blocks["host_total"] else "-",
                words.starts_of(worker),
            ]
        return row

    def _failures(self) -> list[Text]:
        return [
            Text.assemble((f"{worker}: ", "yellow"), what, no_wrap=True, overflow="ellipsis")
            for worker, what in words.failures(self.current)
        ]

    def _decisions(self) -> list[Text]:
        decisions = self.current["controller"]["decisions"]
        return [Text(words.one_line(what), no_wrap=True, overflow="ellipsis") for what in decisions]


def fit(room: int, num_workers: int, sizes: list[int]) -> tuple[int, list[int]]:
    """How many workers, and how many lines of each section, fit into `room` lines.

    The longest sections shrink first. A section with lines also has a title and a gap. At least one worker is
    shown.
    """
    sizes = list(sizes)

    def num_below() -> int:
        return sum(size + 2 for size in sizes if size)

    while num_workers + num_below() > room and max(sizes) > _FEW:
        sizes[sizes.index(max(sizes))] -= 1
    return max(1, min(num_workers, room - num_below())), sizes


@dataclass(frozen=True, slots=True)
class _BlocksBar:
    """A bar as wide as its column.

    Kinds of blocks are shown in proportion, with at least one cell for each kind that occurs.
    """

    blocks: dict[str, int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield bar(self.blocks, options.max_width)


def bar(blocks: dict[str, int], width: int) -> Text:
    """Draws the blocks of a pool as `width` cells: referenced, leased, quarantined, and free blocks."""
    known = {kind: blocks[kind] for kind in ("leased", "quarantined", "free")}
    counts = {"referenced": blocks["total"] - sum(known.values()), **known}
    text = Text(no_wrap=True)
    room = width
    for kind, glyph, style in _BAR_STYLES:
        cells = min(room, max(round(width * counts[kind] / blocks["total"]), 1 if counts[kind] else 0))
        text.append(glyph * cells, style)
        room -= cells
    text.append(_FREE * room, "dim")
    return text


def _title(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _transfers(pairs: Sequence[rates.PairTransfers], is_wide: bool) -> Table:
    fastest = max(pair.bytes_per_s or 0.0 for pair in pairs)
    table = words.plain_table(show_header=False)
    for is_number in (False, False, True, False, True, True, True):
        table.add_column(justify="right" if is_number else "left", no_wrap=True)
    cells = 40 if is_wide else 10
    for pair in pairs:
        bytes_per_s, done_per_s = pair.bytes_per_s or 0.0, pair.done_per_s or 0.0
        filled = round(cells * bytes_per_s / fastest) if fastest else 0
        table.add_row(
            Text(f"{pair.producer} > {pair.consumer}"),
            Text(", ".join(sorted(pair.transports)) or "-", "dim"),
            f"{bytes_per_s / _MIB:.1f} MiB/s",
            Text(f"{'━' * filled:<{cells}}", "cyan"),
            f"{done_per_s:.1f}/s",
            f"{pair.num_bytes / _MIB:.0f} MiB in total",
            Text(f"{pair.failed} failed", "red") if pair.failed else "",
        )
    return table


def _legend(num_hidden: int) -> Text:
    legend = Text(no_wrap=True, overflow="ellipsis")
    for kind, glyph, style in _BAR_STYLES:
        legend.append(glyph, style).append(f" {kind}  ", "dim")
    legend.append(f"{_FREE} free", "dim")
    if num_hidden:
        legend.append(f"   {num_hidden} more in `baton status`", "yellow")
    return legend


def _nodes_text(nodes: list[dict[str, Any]]) -> Text:
    gone = [node["name"] for node in nodes if not node["is_alive"]]
    text = Text(f"{len(nodes) - len(gone)} of {len(nodes)} nodes alive")
    return text.append(f" ({', '.join(gone)} gone)", "bold red") if gone else text
