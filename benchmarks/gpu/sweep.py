"""Launch parameters of tuned kernels: what was chosen beside its neighbours, over the shapes that matter.

One parameter at a time is moved away from the choice, since each combination is compiled anew. Every candidate's result
is compared with the choice's before it is timed.
"""

from collections.abc import Callable, Mapping
from statistics import median

import torch

from benchmarks.gpu import sweep_attention, sweep_linear
from benchmarks.gpu.measure import all_seconds, make_recorder, relative_error
from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Emit, Setting
from benchmarks.gpu.sweep_case import CHOSEN, Candidate, SweepCase
from engine.gpu.graphs import Replay

PART = "sweep"
MIN_GAIN = 0.02
"""Less is noise."""
ROUNDS = 24


def run(setting: Setting, emit: Emit) -> None:
    for case in (*sweep_linear.cases(setting), *sweep_attention.cases(setting)):
        emit(_sweep(setting, case))


def _sweep(setting: Setting, case: SweepCase) -> Row:
    candidates = case.make()
    want = candidates[CHOSEN](0)()
    times, wrong = {}, []
    for name, candidate in candidates.items():
        try:
            error = relative_error(candidate(0)(), want)
            if not error <= case.max_error:
                wrong.append(f"{name}: {error:.1e} off")
                continue
            times[name] = _seconds(setting, case, candidate)
        except (
            Exception
        ) as problem:  # Triton's own kinds: it needs too much shared memory, or does not compile
            print(f"  {case.name}: {name}: {str(problem).splitlines()[0][:160]}")
    best = min(times, key=lambda name: times[name])
    return Row(
        PART,
        case.name,
        f"{1e6 * times[CHOSEN]:.1f} us as chosen",
        f"{_advice(times, best)}; {len(times)} candidates" + (f"; wrong: {wrong}" if wrong else ""),
        is_failed=bool(wrong) or CHOSEN not in times,
        figures={"best": best, "bytes": case.num_bytes, "us": _microseconds(times)},
    )


def _advice(times: Mapping[str, float], best: str) -> str:
    gain = 1 - times[best] / times[CHOSEN]
    return "keep" if gain < MIN_GAIN else f"{gain:.0%} less with {best}"


def _microseconds(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(1e6 * time_s, 2) for name, time_s in times.items()}


def _seconds(setting: Setting, case: SweepCase, candidate: Candidate) -> float:
    """The median of replays from graphs, the copies of the inputs taken in turn."""
    recorder = make_recorder(setting.device)
    replays: list[Replay] = []
    for copy in range(case.num_copies):
        with torch.inference_mode():
            replays.append(recorder.record(candidate(copy))[1])
    works: list[Callable[[], object]] = list(replays)
    return median(all_seconds(setting.device, works, 1 if setting.is_dry else ROUNDS))
