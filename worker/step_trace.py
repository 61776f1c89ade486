"""StepTrace: what a worker's scheduler decided, step by step, as lines of JSON for people and programs to read.

    {"baton_trace":1,"worker":"w0", ...}              TraceHeader: whose steps these are
    {"step":1,"planned_s":0.0012,"scheduled": ...}    StepTrace, in ascending order; what is empty is left out, and so
                                                      are steps in which nothing happened
    {"end":"closed"}                                  TraceEnd; absent while the worker runs, and after kill -9

Knows neither the engine that writes such a file (worker/step_trace_writer.py) nor what is drawn from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from baton.errors import TraceError
from baton.request import FinishReason
from baton.worker import WorkerRole

TRACE_VERSION = 1

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """Whose steps these are, and what they had to share."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    baton_trace: int = TRACE_VERSION
    worker: str
    incarnation: str
    role: WorkerRole
    """What the worker was when it started."""
    began_unix_s: float
    """The time of day at the trace's second 0: lays files of several workers side by side, as well as clocks agree."""
    max_num_batched_tokens: int
    num_blocks: int
    """That requests can have: the null block does not count."""
    block_size: int


class Share(NamedTuple):
    """What one request had of a step. A tuple, because there is one for each request of every step."""

    num_tokens: int
    """Computed in this step."""
    num_computed_tokens: int
    """Before it."""
    num_sampled: int = 0
    """Tokens that the step gave; what was sampled for a request that had ended meanwhile counts too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step: its plan, how things stood when it was planned, and what came of it. Times are seconds of the worker's
    own clock since the trace began.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    step: int
    planned_s: float
    done_s: float | None = None
    """When its result was taken in; None if the worker stopped before."""
    scheduled: Mapping[str, Share] = field(default_factory=dict)
    """By request, in the order of scheduling."""
    num_prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of the requests that compute for the first time."""
    num_cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of requests that start or are resumed: tokens found in the prefix cache. What else they have computed before came
    from another worker (those that start), or out of host memory (those that are resumed).
    """
    resumed: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    """For this step, or since the plan before it."""
    ended: Mapping[str, FinishReason] = field(default_factory=dict)
    """With this step's result if they ran or waited in it, else between the plan before it and this one."""
    loading: tuple[str, ...] = ()
    """Wait for KV from another worker."""
    waiting: tuple[str, ...] = ()
    """First in the queue; `num_waiting` counts those that are not named too."""
    num_waiting: int = 0
    num_swapped_out: int = 0
    """Blocks copied to host memory."""
    num_swapped_in: int = 0
    num_free_blocks: int = 0


class TraceEnd(Enum):
    """Why a trace has no more lines."""

    CLOSED = "closed"
    """The worker stopped."""
    FULL = "full"
    """The file reached its limit; the worker went on."""
    OPEN = "open"
    """No last word: the worker runs still, or was killed between two lines."""
    CUT = "cut"
    """No last word, and the last line is not whole: the worker was killed in the middle of it, or writes it now."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole file."""

    header: TraceHeader
    steps: tuple[StepTrace, ...]
    end: TraceEnd


_HEADER = TypeAdapter(TraceHeader)
_STEP = TypeAdapter(StepTrace)
_LAST_WORDS = {f'{{"end":"{end.value}"}}\n'.encode(): end for end in (TraceEnd.CLOSED, TraceEnd.FULL)}


def encode_header(header: TraceHeader) -> bytes:
    """One line."""
    return _HEADER.dump_json(header) + b"\n"


def encode_step(step: StepTrace) -> bytes:
    """One line without what is empty."""
    return _STEP.dump_json(step, exclude_defaults=True) + b"\n"


def encode_end(end: TraceEnd) -> bytes:
    """The last line."""
    return next(line for line, known in _LAST_WORDS.items() if known is end)


def read_trace(path: Path) -> Trace:
    """The trace in a file, whether or not it is complete. OSError if it cannot be opened; TraceError names the line."""
    with path.open("rb") as file:
        lines = file.readlines()
    if not lines:
        raise TraceError(f"{path}: empty; not even the worker's name was written")
    header = _decode_header(path, lines[0])
    is_cut = not lines[-1].endswith(b"\n")
    end = TraceEnd.CUT if is_cut else _LAST_WORDS.get(lines[-1], TraceEnd.OPEN)
    num_lines = len(lines) if end is TraceEnd.OPEN else len(lines) - 1
    steps: list[StepTrace] = []
    for number, line in enumerate(lines[1:num_lines], 2):
        step = _decode_step(path, number, line)
        if steps and step.step <= steps[-1].step:
            raise TraceError(f"{path}:{number}: step {step.step} comes after step {steps[-1].step}")
        steps.append(step)
    return Trace(header, tuple(steps), end)


def _decode_header(path: Path, line: bytes) -> TraceHeader:
    try:
        header = _HEADER.validate_json(line)
    except ValidationError as error:
        raise TraceError(
            f"{path}:1: not a trace of steps, which begins with a line about its worker: {_brief(error)}"
        ) from None
    if header.baton_trace != TRACE_VERSION:
        raise TraceError(
            f"{path}:1: a trace of version {header.baton_trace}; this command reads version {TRACE_VERSION}"
        )
    return header


def _decode_step(path: Path, number: int, line: bytes) -> StepTrace:
    try:
        return _STEP.validate_json(line)
    except ValidationError as error:
        raise TraceError(f"{path}:{number}: not a step: {_brief(error)}") from None


def _brief(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]
