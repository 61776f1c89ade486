"""What the engine's thread learns of its steps, so that a slow machine's steps are not taken for a standstill."""

import math

import pytest

from baton.clock import VirtualClock
from baton.system.progress import PieceOfWork, Progress
from tests.factories.engine import StepHook, make_core, make_engine_request

SLOW_S, LEAST_S = 15.0, 10.0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_time_of_a_step_is_learned_also_where_its_submission_computes_it(async_scheduling: bool) -> None:
    clock = VirtualClock()
    progress = Progress("its engine", clock, math.inf, LEAST_S)
    hook = StepHook(lambda _: clock.advance(SLOW_S))
    core = make_core(hook, clock=clock, progress=progress, async_scheduling=async_scheduling)
    core.add_request(make_engine_request(max_tokens=3), "gateway")
    core.may_progress = True
    while core.may_progress:
        progress.begin()  # as the loop does while it takes commands
        core.step()
    progress.end()
    assert progress.limit_s(PieceOfWork(clock.now(), 1)) >= 20 * SLOW_S
    core.close()
