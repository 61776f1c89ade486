"""StepTraceWriter: writes a worker's steps to a file as they become known; a failed write never ends the engine.

It is called twice for each step: when the step is planned, and when its result is processed. With
asynchronous scheduling, the next step is planned in between. So records are completed by step number, and
lines stay in ascending order.
"""

import contextlib
import errno
import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from baton.clock import Clock
from baton.errors import ConfigError
from baton.request import FinishReason
from baton.step import ClientOutputs, SchedulerOutput
from scheduler import Scheduler
from worker.step_trace import (
    Share,
    StepTrace,
    TraceEnd,
    TraceHeader,
    encode_end,
    encode_header,
    encode_step,
)

logger = logging.getLogger(__name__)

MAX_WAITING_IDS = 32
"""How many waiting requests each step names."""

_TIME_DIGITS = 6


def open_step_trace(
    folder: str, header: TraceHeader, clock: Clock, max_bytes: int
) -> "StepTraceWriter | None":
    """Creates a file `WORKER-INCARNATION.jsonl` in the folder, and the folder if necessary;
    ConfigError if that fails. If the disk is full, logs an error and returns None: the traces of earlier
    incarnations may have filled it, and the new incarnation must start nevertheless.
    """
    path = Path(folder) / f"{header.worker}-{header.incarnation}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("xb", buffering=0)
        try:
            return StepTraceWriter(file, path, header, clock, max_bytes)
        except OSError:
            file.close()
            path.unlink()
            raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            logger.error(
                "cannot write the trace %s, so this worker runs without one: %s", path, error.strerror
            )
            return None
        raise ConfigError(
            f"engine.trace_dir: got {folder!r}, but {error.filename or path} cannot be written "
            f"({error.strerror}); use a folder that this worker may write to"
        ) from error


class StepTraceWriter:
    """Writes the trace file. Every method belongs to the engine's thread, and none raises.

    A failed write is logged once, and the engine continues without a trace. Each step is in the file as soon
    as its result is known.
    """

    def __init__(self, file: BinaryIO, path: Path, header: TraceHeader, clock: Clock, max_bytes: int) -> None:
        """Takes over `file`, which must be unbuffered. OSError if the header cannot be written."""
        self._file: BinaryIO | None = file
        self._path = path
        self._clock = clock
        self._began = clock.now()
        self._num_bytes_left = max_bytes - len(encode_end(TraceEnd.FULL))
        self._max_bytes = max_bytes
        self._block_size = header.block_size
        self._planned: dict[int, tuple[SchedulerOutput, StepTrace]] = {}
        """By step: its plan, and the state when it was planned."""
        self._ended_between: dict[str, FinishReason] = {}
        self._last_seen: tuple[object, ...] = ((), (), 0)
        """Loading and waiting requests of the last written step."""
        self._write_whole(encode_header(header))

    def planned(self, plan: SchedulerOutput, scheduler: Scheduler) -> None:
        """Notes that `scheduler` has planned a step. Call it before any part of the step is computed."""
        if self._file is not None:
            ended, self._ended_between = self._ended_between, {}
            step = StepTrace(
                step=plan.step,
                planned_s=self._now(),
                ended=ended,
                loading=scheduler.loading_ids,
                waiting=scheduler.waiting_ids(MAX_WAITING_IDS),
                num_waiting=scheduler.request_counts().waiting,
                num_free_blocks=scheduler.kv_block_counts().free,
            )
            self._planned[plan.step] = plan, step

    def ended(self, outputs: ClientOutputs) -> None:
        """Notes requests that ended between two steps, by a deadline for example, or without their prompt."""
        if self._file is not None:
            self._ended_between |= _ends(outputs)

    def done(self, step: int, sampled_token_ids: Mapping[str, list[int]], outputs: ClientOutputs) -> None:
        """Notes that the result of a planned step was processed: the device's samples, and the resulting outputs."""
        planned = self._planned.pop(step, None)
        if planned is not None:
            self._record(*planned, self._now(), sampled_token_ids, _ends(outputs))

    def close(self) -> None:
        """Writes the steps without a result, and the end. May be called again."""
        for planned in tuple(self._planned.values()):
            self._record(*planned, None, {}, {})
        self._end(TraceEnd.CLOSED)

    def _now(self) -> float:
        return round(self._clock.now() - self._began, _TIME_DIGITS)

    def _record(
        self,
        plan: SchedulerOutput,
        step: StepTrace,
        done_s: float | None,
        sampled: Mapping[str, list[int]],
        ended: Mapping[str, FinishReason],
    ) -> None:
        """Writes one step, unless nothing happened in it: an engine that waits for a transfer plans empty steps."""
        ended = {**step.ended, **ended}
        seen = (step.loading, step.waiting, step.num_waiting)
        if plan.is_empty and not ended and seen == self._last_seen:
            return
        self._last_seen = seen
        cached = plan.scheduled_cached_reqs
        step = replace(
            step,
            done_s=done_s,
            scheduled=_shares(plan, sampled),
            num_drafts={name: len(drafts) for name, drafts in plan.scheduled_spec_decode_tokens.items()},
            num_prompt_tokens={new.request_id: len(new.prompt_token_ids) for new in plan.scheduled_new_reqs},
            num_cached_tokens=_num_cached_tokens(plan, self._block_size),
            resumed=tuple(cached.resumed_request_ids),
            preempted=tuple(sorted(plan.preempted_req_ids)),
            ended=ended,
            num_swapped_out=len(plan.swap_out),
            num_swapped_in=len(plan.swap_in),
        )
        self._write(encode_step(step))

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        if len(line) > self._num_bytes_left:
            logger.warning(
                "the trace %s has reached its limit of %d bytes and ends here", self._path, self._max_bytes
            )
            self._end(TraceEnd.FULL)
            return
        try:
            self._write_whole(line)
        except OSError as error:
            logger.error("cannot write the trace %s, which ends here: %s", self._path, error)
            self._stop()

    def _write_whole(self, line: bytes) -> None:
        assert self._file is not None
        num_written = self._file.write(line)
        if num_written != len(line):
            raise OSError(
                errno.ENOSPC, f"only {num_written} of {len(line)} bytes could be written; the disk is full"
            )
        self._num_bytes_left -= len(line)

    def _end(self, end: TraceEnd) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a trace without its end is acceptable
                self._file.write(encode_end(end))
            self._stop()

    def _stop(self) -> None:
        assert self._file is not None
        with contextlib.suppress(OSError):
            self._file.close()
        self._file = None
        self._planned.clear()


def _shares(plan: SchedulerOutput, sampled: Mapping[str, list[int]]) -> dict[str, Share]:
    num_computed = plan.num_computed_tokens()
    return {
        request_id: Share(num_tokens, num_computed[request_id], len(sampled.get(request_id, ())))
        for request_id, num_tokens in plan.num_scheduled_tokens.items()
    }


def _num_cached_tokens(plan: SchedulerOutput, block_size: int) -> dict[str, int]:
    """For each request that gets blocks with this plan: its prefix-cache hits in tokens, if any. They are its computed
    tokens less those from host memory."""
    num_cached = {
        new.request_id: new.num_computed_tokens for new in plan.scheduled_new_reqs if not new.is_loaded
    }
    cached = plan.scheduled_cached_reqs
    if cached.resumed_request_ids:
        swapped_in = {block_id for _, block_id in plan.swap_in}
        changes = zip(cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_computed in changes:
            if request_id in cached.resumed_request_ids:
                num_rows = -(-(num_computed + plan.num_scheduled_tokens[request_id]) // block_size)
                copied = (index for index, block_id in enumerate(block_ids) if block_id in swapped_in)
                # A row has a block of each KV group.
                first_row = next(copied, len(block_ids)) * num_rows // len(block_ids)
                num_cached[request_id] = min(num_computed, first_row * block_size)
    return {request_id: num_tokens for request_id, num_tokens in num_cached.items() if num_tokens}


def _ends(outputs: ClientOutputs) -> dict[str, FinishReason]:
    return {
        output.request_id: output.finish_reason
        for output in chain.from_iterable(outputs.values())
        if output.finish_reason is not None
    }
