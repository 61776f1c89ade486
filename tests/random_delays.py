"""A plugin of pytest that delays tasks at random. So a test that depends on the speed of tasks fails sooner or later.

`make racy-tests`, or `python -m pytest -p tests.random_delays FILES`. It delays only tasks of the tests' own event
loops, not those of processes that tests start. A run with the same seed is similar, but not the same. Tests that
rely on the order in which an event loop runs tasks are marked `in_order`, and left out.
"""

import asyncio
import os
import random
import time
from contextvars import Context
from typing import Any

SHARE_OF_STEPS = 0.05
"""A request over HTTP has about a hundred steps."""
MAX_DELAY_S = 0.03
SHARE_OF_STALLS = 0.0003
"""So many callbacks find that the whole loop has stood still before them, as on an overloaded machine."""
MAX_STALL_S = 0.15

_LOOP: Any = asyncio.SelectorEventLoop
_call_soon = _LOOP.call_soon
_seed = int(os.environ.get("RANDOM_DELAYS_SEED", time.time_ns() % 2**32))
_random = random.Random(_seed)


def pytest_report_header() -> str:
    return f"random delays: RANDOM_DELAYS_SEED={_seed}"


def pytest_configure() -> None:
    _LOOP.call_soon = call_soon


def pytest_unconfigure() -> None:
    _LOOP.call_soon = _call_soon


def call_soon(loop: Any, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
    """The event loop's own method, sometimes with a delay."""
    if type(loop) is _LOOP:  # time in a loop of tests.factories.virtual_loop is not real
        drawn = _random.random()
        if drawn < SHARE_OF_STEPS and _is_step(callback):
            delay_s = _random.uniform(0.0, MAX_DELAY_S)
            later: asyncio.Handle = loop.call_later(delay_s, callback, *args, context=context)
            return later
        if drawn > 1.0 - SHARE_OF_STALLS:
            time.sleep(_random.uniform(0.0, MAX_STALL_S))
    handle: asyncio.Handle = _call_soon(loop, callback, *args, context=context)
    return handle


def _is_step(callback: Any) -> bool:
    """Whether this begins or continues a task. The beginnings of gRPC's tasks are never delayed: gRPC reports a task
    that is cancelled before as an error."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return False
    is_wakeup = getattr(callback, "__name__", "") == "task_wakeup"
    return is_wakeup or not type(task.get_coro()).__module__.startswith("_cython")
