"""`baton trace`: draws what workers wrote down of their schedulers' steps, for the terminal and as SVG."""

import argparse
import re

from rich.console import Console

from baton.errors import ConfigError, TraceError
from cli.trace_chart.columns import StepRange
from cli.trace_chart.steps import make_chart
from cli.trace_chart.svg import svg_of
from cli.trace_chart.text import text_of
from worker.step_trace import Trace, read_trace

_WIDTH_OF_FILES = 160
"""Columns when nobody's terminal says how wide the picture may be."""

_CHARACTERS_PER_STEP = 6
"""About what a step takes; whether equal steps are folded depends on it, and nothing else."""

_COLUMNS_OF_SVG = 24
"""Where equal steps are folded, more than this are rarely needed, and make a picture wider than a page."""


def run(options: argparse.Namespace) -> int:
    """Prints the picture, and writes it where asked. TraceError says what is wrong with a file, OSError that it cannot
    be read or written, ConfigError what is wrong with a flag.
    """
    if options.max_columns < 1:
        raise ConfigError(f"--max-columns: got {options.max_columns}; a picture has at least one")
    steps = parse_steps(options.steps)
    requests = tuple(filter(None, (options.requests or "").split(",")))
    traces = [read_trace(path) for path in options.files]
    console = Console()
    width = console.width if console.is_terminal else _WIDTH_OF_FILES
    chart = make_chart(traces, steps, requests, width // _CHARACTERS_PER_STEP, options.max_columns)
    if not chart.columns:
        raise TraceError(f"{options.files[0]}: nothing to draw; {_what_there_is(traces[0])}")
    if requests and not any(panel.rows for panel in chart.panels):
        raise TraceError(f"no request in these steps begins with {' or '.join(map(repr, requests))}")
    console.print(text_of(chart, width), soft_wrap=True, highlight=False)
    if options.svg is not None:
        drawn = make_chart(traces, steps, requests, _COLUMNS_OF_SVG, options.max_columns)
        options.svg.write_text(svg_of(drawn), encoding="utf-8")
    return 0


def parse_steps(text: str | None) -> StepRange:
    """`A:B` with both ends included, `A:`, `:B`, or one step alone; None is everything."""
    if text is None:
        return StepRange()
    match = re.fullmatch(r"(\d+)|(\d*):(\d*)", text)
    if match is None:
        raise ConfigError(f"--steps: got {text!r}; give two numbers of steps, as in 10:20, 10: or :20")
    alone, first, last = match.groups()
    steps = StepRange(*[int(number) if number else None for number in (alone or first, alone or last)])
    if steps.first is not None and steps.last is not None and steps.first > steps.last:
        raise ConfigError(f"--steps: got {text!r}, which ends before it begins")
    return steps


def _what_there_is(trace: Trace) -> str:
    if not trace.steps:
        return "the worker has not finished a step yet"
    return f"the trace holds steps {trace.steps[0].step} to {trace.steps[-1].step}"
