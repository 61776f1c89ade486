"""Step traces made by hand, with as few values as a test needs."""

from collections.abc import Iterable, Mapping
from typing import Any

from baton.request import FinishReason
from baton.worker import WorkerRole
from worker.step_trace import Share, StepTrace, Trace, TraceEnd, TraceHeader


def make_header(worker: str = "w0", **overrides: Any) -> TraceHeader:
    """A header with 100 tokens a step, 50 blocks of 16, and a trace that began at second 0."""
    values: dict[str, Any] = {
        "worker": worker,
        "incarnation": "incarnation",
        "role": WorkerRole.DECODE,
        "began_unix_s": 0.0,
        "max_num_batched_tokens": 100,
        "num_blocks": 50,
        "block_size": 16,
    }
    return TraceHeader(**values | overrides)


def make_step(
    step: int, scheduled: Mapping[str, tuple[int, int] | tuple[int, int, int]] | None = None, **values: Any
) -> StepTrace:
    """Makes a step that takes 10 ms; steps follow one another without a gap.

    `scheduled` has two or three numbers by request: tokens, tokens computed before, and perhaps sampled tokens.
    """
    shares = {request_id: Share(*counts) for request_id, counts in (scheduled or {}).items()}
    defaults: dict[str, Any] = {
        "planned_s": (step - 1) / 100,
        "done_s": step / 100,
        "num_free_blocks": 40,
        "num_waiting": len(values.get("waiting", ())),
    }
    return StepTrace(step=step, scheduled=shares, **defaults | values)


def make_trace(
    steps: Iterable[StepTrace], worker: str = "w0", end: TraceEnd = TraceEnd.CLOSED, **header: Any
) -> Trace:
    return Trace(make_header(worker, **header), tuple(steps), end)


CHUNKED = make_trace(
    [
        make_step(
            1, {"one": (60, 0), "two": (40, 0)}, num_prompt_tokens={"one": 60, "two": 70}, waiting=("three",)
        ),
        make_step(2, {"one": (1, 60), "two": (30, 40), "three": (9, 0)}, num_prompt_tokens={"three": 9}),
        make_step(
            3,
            {"one": (1, 61), "two": (1, 70), "three": (1, 9)},
            ended={"one": FinishReason.STOP},
            num_free_blocks=38,
        ),
        make_step(4, {"two": (1, 71), "three": (1, 10)}, ended={"two": FinishReason.LENGTH}),
        make_step(5, ended={"three": FinishReason.ABORT}, num_free_blocks=50),
    ]
)
"""Continuous batching with a budget of 100: a prompt is split, and a third request waits for a step."""

PREEMPTED = make_trace(
    [
        make_step(1, {"old": (48, 0), "young": (30, 0)}, num_prompt_tokens={"old": 48, "young": 30}),
        make_step(2, {"old": (1, 48), "young": (1, 30)}),
        make_step(
            3,
            {"old": (1, 49)},
            preempted=("young",),
            waiting=("young",),
            num_swapped_out=2,
            num_free_blocks=0,
        ),
        *[make_step(n, {"old": (1, 46 + n)}, waiting=("young",), num_free_blocks=0) for n in range(4, 14)],
        make_step(14, {"old": (1, 60)}, waiting=("young",), ended={"old": FinishReason.LENGTH}),
        make_step(15, {"young": (1, 31)}, resumed=("young",), num_swapped_in=2),
        make_step(
            16,
            {"young": (1, 32), "new": (3, 32)},
            num_prompt_tokens={"new": 35},
            num_cached_tokens={"new": 32},
        ),
        make_step(17, {"new": (1, 35)}, preempted=("young",), waiting=("young",)),
        make_step(
            18,
            {"new": (1, 36), "young": (17, 16)},
            resumed=("young",),
            num_cached_tokens={"young": 16},
            num_free_blocks=9,
        ),
    ],
    end=TraceEnd.OPEN,
)
"""A request loses its blocks twice. The first time, they return from host memory. The second time, it computes
again what the cache no longer has."""

HANDED_OVER = (
    make_trace(
        [
            make_step(1, {"aaaa": (100, 0)}, num_prompt_tokens={"aaaa": 150}, planned_s=0.0, done_s=0.1),
            make_step(
                2, {"aaaa": (50, 100)}, planned_s=0.1, done_s=0.16, ended={"aaaa": FinishReason.HANDED_OVER}
            ),
        ],
        worker="p0",
        role=WorkerRole.PREFILL,
        began_unix_s=1000.0,
    ),
    make_trace(
        [
            make_step(
                1,
                {"bbbb": (40, 0)},
                num_prompt_tokens={"bbbb": 40},
                planned_s=0.01,
                done_s=0.05,
                loading=("aaaa",),
            ),
            *[
                make_step(
                    n,
                    {"bbbb": (1, 38 + n)},
                    planned_s=0.03 + n / 100,
                    done_s=0.04 + n / 100,
                    loading=("aaaa",),
                )
                for n in range(2, 14)
            ],
            make_step(
                14,
                {"aaaa": (1, 150), "bbbb": (1, 52)},
                num_prompt_tokens={"aaaa": 150},
                planned_s=0.17,
                done_s=0.19,
            ),
            make_step(
                15,
                {"aaaa": (1, 151), "bbbb": (1, 53)},
                planned_s=0.19,
                done_s=0.21,
                ended={"aaaa": FinishReason.STOP, "bbbb": FinishReason.ERROR},
            ),
        ],
        worker="d0",
        began_unix_s=1000.005,
        end=TraceEnd.CUT,
    ),
)
"""The traces of a prefill worker and a decode worker for the same fifth of a second."""
