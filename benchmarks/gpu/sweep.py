"""Launch parameters of tuned kernels: the chosen values compared with their neighbours, over important shapes.

If a library has such a kernel, it is compared, too. A variant differs from the choice in one parameter only, since each
combination must be compiled; only some large tiles of experts' products differ in several parameters. Several processes
compile all candidates before the first one is timed. Every candidate's result is compared with the choice's result
before the candidate is timed.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median

import torch

from benchmarks.gpu import sweep_attention, sweep_experts, sweep_latents, sweep_linear
from benchmarks.gpu.measure import all_seconds, make_recorder, relative_error
from benchmarks.gpu.precompile import precompile
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting, guarded
from benchmarks.gpu.sweep_case import CHOSEN, Candidate, SweepCase
from engine.gpu.graphs import Replay

PART = "sweep"
MIN_GAIN = 0.02
"""A smaller gain counts as noise."""
ROUNDS = 24
NUM_SHARES = 3
"""How many processes share a case's candidates, if time permits. Each makes its own inputs."""
COMPILING_SHARE = 0.5
"""Precompiling may use at most this share of the part's time."""


def run(setting: Setting, emit: Emit) -> None:
    all_cases = (
        *sweep_linear.cases(setting),
        *sweep_attention.cases(setting),
        *sweep_latents.cases(setting),
        *sweep_experts.cases(setting),
    )
    cases = [case for case in all_cases if setting.cases in case.name]
    if not cases:
        names = ", ".join(case.name for case in all_cases)
        emit(Row(PART, f"cases with '{setting.cases}'", "none", f"there are {names}", is_failed=True))
        return
    shares = range(1 if setting.is_dry else NUM_SHARES)
    works = [partial(_launch_share, case, share, len(shares)) for case in cases for share in shares]
    now = time.monotonic()
    precompile(setting, works, min(now + COMPILING_SHARE * setting.remaining_s, now + 3600.0))
    for case in cases:
        guarded(emit, PART, case.name, partial(_sweep, setting, case))


def _launch_share(case: SweepCase, share: int, num_shares: int) -> None:
    candidates = list(case.make().values())
    for candidate in candidates[share::num_shares]:
        try:
            candidate(0)()
        except Exception as problem:  # other candidates may still compile
            print(f"  {case.name}: {str(problem).splitlines()[0][:160]}", flush=True)


def _sweep(setting: Setting, case: SweepCase) -> Iterator[Row]:
    candidates = case.make()
    want = candidates[CHOSEN](0)()
    times: dict[str, float] = {}
    wrong: list[str] = []
    refusals: dict[str, str] = {}
    for name, candidate in candidates.items():
        try:
            error = relative_error(candidate(0)(), want)
            if not error <= case.max_error:
                wrong.append(f"{name}: {error:.1e} off")
                continue
            times[name] = _seconds(setting, case, candidate)
        except Exception as problem:  # such as Triton's errors: too much shared memory, or no compilation
            refusals[name] = str(problem).splitlines()[0][:160]
            print(f"  {case.name}: {name}: {refusals[name]}")
    best = min((name for name in times if name != case.yardstick), key=lambda name: times[name])
    yield Row(
        PART,
        case.name,
        f"{1e6 * times[CHOSEN]:.1f} us as chosen",
        f"{_advice(times, best)}; {len(times)} candidates"
        + _against_library(case.yardstick, times, refusals)
        + (f"; wrong: {wrong}" if wrong else ""),
        is_failed=bool(wrong) or CHOSEN not in times,
        figures={
            "best": best,
            "bytes": case.num_bytes,
            "us": _microseconds(times),
            "times_yardstick": times[CHOSEN] / times[case.yardstick] if case.yardstick in times else None,
        },
    )


def _advice(times: Mapping[str, float], best: str) -> str:
    gain = 1 - times[best] / times[CHOSEN]
    return "keep" if gain < MIN_GAIN else f"{gain:.0%} less with {best}"


def _against_library(yardstick: str | None, times: Mapping[str, float], refusals: Mapping[str, str]) -> str:
    """Our time divided by the library's, or the reason why there is no such quotient."""
    if yardstick is None or (yardstick not in times and yardstick not in refusals):
        return ""  # no library, or the row shows that its result is wrong
    if yardstick in refusals:
        return f"; {yardstick} is not here: {refusals[yardstick]}"
    return f"; {times[CHOSEN] / times[yardstick]:.2f} x {yardstick} time"


def _microseconds(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e6 * time_s, 2) for name, time_s in times.items()}


def _seconds(setting: Setting, case: SweepCase, candidate: Candidate) -> float:
    """The median time of replayed graphs. The graphs use the copies of the inputs in turn."""
    recorder = make_recorder(setting.device)
    replays: list[Replay] = []
    for copy in range(case.num_copies):
        with torch.inference_mode():
            replays.append(recorder.record(candidate(copy))[1])
    works: list[Callable[[], object]] = list(replays)
    return median(all_seconds(setting.device, works, 1 if setting.is_dry else ROUNDS))
