"""StepTrace: a worker's scheduler decisions, step by step, as lines of JSON for people and programs.

    {"baton_trace":1,"worker":"w0", ...}              TraceHeader: the worker
    {"step":1,"planned_s":0.0012,"scheduled": ...}    StepTrace, in ascending order; empty fields are left out, and so
                                                      are steps in which nothing happened
    {"end":"closed"}                                  TraceEnd; absent while the worker runs, after kill -9, and
                                                      after a failed write

Knows neither the engine that writes the file (worker/step_trace_writer.py) nor the pictures drawn from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import ClassVar, NamedTuple

from pydantic import ConfigDict, PositiveInt, TypeAdapter, ValidationError

from baton.errors import TraceError
from baton.request import FinishReason
from baton.worker import WorkerRole

TRACE_VERSION = 1

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The worker, and the resources that its requests share."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    baton_trace: int = TRACE_VERSION
    worker: str
    incarnation: str
    role: WorkerRole
    """The worker's initial role."""
    began_unix_s: float
    """The time of day at the trace's second 0; aligns files of several workers, as far as their clocks agree."""
    max_num_batched_tokens: PositiveInt
    num_blocks: PositiveInt
    """Blocks for requests, without the null block."""
    block_size: PositiveInt


class Share(NamedTuple):
    """One request's part of a step. A tuple, because there is one for each request of every step."""

    num_tokens: int
    """Tokens computed in this step."""
    num_computed_tokens: int
    """Tokens computed before this step."""
    num_sampled: int = 0
    """Tokens that the step sampled for the request, even if the request had ended meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step: its plan, the state when it was planned, and its result. Times are seconds of the worker's own clock
    since the trace began.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    step: int
    planned_s: float
    done_s: float | None = None
    """When its result was processed; None if the worker stopped before."""
    scheduled: Mapping[str, Share] = field(default_factory=dict)
    """By request, in the order of scheduling."""
    num_drafts: Mapping[str, int] = field(default_factory=dict)
    """By request: drafts among its tokens. All of its samples but one are drafts that were right."""
    num_prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """The length of the prompt, for requests that compute for the first time."""
    num_cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """For requests that start or resume: tokens found in the prefix cache. Their other computed tokens came from
    another worker (if they start), or from host memory (if they resume).
    """
    resumed: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()
    """Requests preempted for this step, or since the previous plan."""
    ended: Mapping[str, FinishReason] = field(default_factory=dict)
    """Requests that ended. If they ran or waited in this step, they ended with its result. Otherwise, they ended
    between the previous plan and this one."""
    loading: tuple[str, ...] = ()
    """Requests that wait for KV from another worker."""
    waiting: tuple[str, ...] = ()
    """The first requests in the queue; `num_waiting` also counts those that are not named."""
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
    """No end: the worker still runs, was killed between two lines, or could not write the next line."""
    CUT = "cut"
    """No end, and an incomplete last line: the worker was killed in the middle of it, is writing it, or could not write
    all of it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole file."""

    header: TraceHeader
    steps: tuple[StepTrace, ...]
    end: TraceEnd


_HEADER = TypeAdapter(TraceHeader)
_STEP = TypeAdapter(StepTrace)


def encode_header(header: TraceHeader) -> bytes:
    """The first line."""
    return _HEADER.dump_json(header) + b"\n"


def encode_step(step: StepTrace) -> bytes:
    """One line without empty fields."""
    return _STEP.dump_json(step, exclude_defaults=True) + b"\n"


def encode_end(end: TraceEnd) -> bytes:
    """The last line."""
    return f'{{"end":"{end.value}"}}\n'.encode()


_ENDS = {encode_end(end): end for end in (TraceEnd.CLOSED, TraceEnd.FULL)}


def read_trace(path: Path) -> Trace:
    """Reads a trace file, complete or not. OSError if it cannot be opened; TraceError names the line."""
    with path.open("rb") as file:
        lines = file.readlines()
    if not lines:
        raise TraceError(f"{path}: the file is empty")
    header = _decode_header(path, lines[0])
    is_cut = not lines[-1].endswith(b"\n")
    end = TraceEnd.CUT if is_cut else _ENDS.get(lines[-1], TraceEnd.OPEN)
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
            f"{path}:1: not a step trace ({_brief(error)}); pass a file that a worker wrote with --trace-dir"
        ) from None
    if header.baton_trace != TRACE_VERSION:
        raise TraceError(
            f"{path}:1: this trace has version {header.baton_trace}, but this command reads version "
            f"{TRACE_VERSION}; use the version of Baton that wrote it"
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
