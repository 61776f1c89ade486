"""`baton trace`: draws the traces of workers' scheduler steps in the terminal."""

import argparse
import re

from baton.errors import ConfigError, TraceError
from cli.console import wide_console
from cli.trace_chart.columns import StepRange
from cli.trace_chart.steps import make_chart
from cli.trace_chart.text import text_of
from worker.step_trace import Trace, read_trace

_CHARACTERS_PER_STEP = 6
"""Approximate width of a step. It is used only to decide whether equal steps are folded."""


def run(options: argparse.Namespace) -> int:
    """Prints the picture.

    Raises TraceError for a bad trace file, and ConfigError for a bad flag or a file that cannot be read.
    """
    if options.max_columns < 1:
        raise ConfigError(f"--max-columns: got {options.max_columns}; must be at least 1")
    steps = parse_steps(options.steps)
    requests = tuple(filter(None, (options.requests or "").split(",")))
    try:
        traces = [read_trace(path) for path in options.files]
    except OSError as error:
        raise ConfigError(str(error)) from error
    console = wide_console()
    width = console.width
    chart = make_chart(traces, steps, requests, width // _CHARACTERS_PER_STEP, options.max_columns)
    if not chart.columns:
        raise TraceError(f"{options.files[0]}: nothing to draw; {_steps_text(traces[0])}")
    if requests and not any(panel.rows for panel in chart.panels):
        missing = f"no request id in these steps starts with {' or '.join(map(repr, requests))}"
        if chart.num_left_out:
            missing += f"; later steps are left out ({chart.num_left_out}); see --steps and --max-columns"
        raise TraceError(missing)
    console.print(text_of(chart, width), soft_wrap=True, highlight=False)
    return 0


def parse_steps(text: str | None) -> StepRange:
    """Reads `A:B` with both ends included, `A:`, `:B`, or a single step; None means all steps."""
    if text is None:
        return StepRange()
    match = re.fullmatch(r"(\d+)|(\d*):(\d*)", text)
    if match is None:
        raise ConfigError(f"--steps: got {text!r}; use a range of step numbers, such as 10:20, 10: or :20")
    alone, first, last = match.groups()
    steps = StepRange(*[int(number) if number else None for number in (alone or first, alone or last)])
    if steps.first is not None and steps.last is not None and steps.first > steps.last:
        raise ConfigError(f"--steps: got {text!r}; the last step must not be before the first")
    return steps


def _steps_text(trace: Trace) -> str:
    if not trace.steps:
        return "the worker has not finished a step yet"
    return f"the trace holds steps {trace.steps[0].step} to {trace.steps[-1].step}"
