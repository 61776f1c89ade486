"""How the engine handles failing ranks; ranks as processes: tests/integration/test_ranks.py."""

import threading
from typing import cast
from unittest.mock import MagicMock

import pytest

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.pipeline import DeviceLostError, StreamPipeline
from engine.ranks.group import RankGroup, RankLink
from engine.ranks.messages import StepFailed
from engine.ranks.remote import RankedPipeline
from engine.step_failures import FailStop
from tests.factories.engine import StepHook, make_core, make_engine_request
from tests.unit.engine.test_pipeline import make_plan


class Group:
    """Other ranks, one of which may have failed."""

    num_computed = 0
    has_failed = False

    def send(self, message: object) -> None:
        """There are no processes."""

    def check(self) -> None:
        if self.has_failed:
            raise RuntimeError("rank 1 is gone")


class Device:
    """Rank 0's device. Its waits for other ranks end without an error, as with NCCL."""

    def launch(self, plan: SchedulerOutput) -> "Device":
        return self

    def wait(self) -> ModelRunnerOutput:
        return ModelRunnerOutput({"a": [0]})


def three_ranks() -> tuple[RankGroup, MagicMock, MagicMock]:
    """Rank 0's group, and the links to ranks 1 and 2, which have no processes."""
    group = RankGroup([], 60.0, lambda: None, lambda: None)
    first, second = (MagicMock(RankLink, rank=rank, has_failed=False, is_lost=False) for rank in (1, 2))
    first.process = second.process = MagicMock()
    group._links = [first, second]
    return group, first, second


def test_no_token_comes_of_a_step_that_another_rank_left() -> None:
    group = Group()
    pipeline = RankedPipeline(StreamPipeline(Device()), cast("RankGroup", group))
    pipeline.submit(make_plan(1))
    pipeline.submit(make_plan(2))
    assert pipeline.take_result().output == ModelRunnerOutput({"a": [0]})
    group.has_failed = True
    result = pipeline.take_result()
    assert result.output is None
    assert isinstance(result.error, DeviceLostError)
    assert str(result.error) == "rank 1 is gone"


def test_no_step_follows_one_that_failed_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may have left it half done. So the worker ends, and whether a request is at fault stays open."""
    monkeypatch.setattr("engine.ranks.group.EXPLANATION_TIMEOUT_S", 0.01)

    def fail(plan: SchedulerOutput) -> None:
        raise ValueError("out of memory")

    group = RankGroup([], 60.0, lambda: None, lambda: None)
    group.serve()
    core = make_core(pipeline=RankedPipeline(StreamPipeline(FailStop(StepHook(fail)), is_async=False), group))
    core.add_request(make_engine_request("r"), "gateway")
    with pytest.raises(DeviceLostError, match="rank 0 failed to compute step 1: out of memory"):
        core.step()
    core.close()
    group.stop()


def test_a_report_that_arrived_in_time_explains_rank_0s_failure_though_it_counts_only_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.ranks.group.EXPLANATION_TIMEOUT_S", 0.01)
    group, first, _ = three_ranks()
    reporting = threading.Thread(target=group._handle, args=(first, StepFailed(7, "the device is on fire")))
    reporting.start()
    while group._first_report is None:
        assert reporting.is_alive()
    reason = "rank 1 failed to compute step 7: the device is on fire"
    assert group.explain(7, RuntimeError("all_reduce failed")) == reason
    reporting.join()


def test_the_rank_that_reports_first_is_named_though_another_ones_report_counts_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, first, second = three_ranks()
    may_count = threading.Event()

    def is_other_lost(group: RankGroup, link: RankLink) -> bool:
        return link is first and not may_count.wait(60.0)

    monkeypatch.setattr(RankGroup, "_is_other_lost", is_other_lost)
    reporting = threading.Thread(target=group._handle, args=(first, StepFailed(7, "the device is on fire")))
    reporting.start()
    while group._first_report is None:
        assert reporting.is_alive()
    group._handle(second, StepFailed(7, "all_reduce failed"))
    may_count.set()
    reporting.join()
    with pytest.raises(RuntimeError, match=r"^rank 1 failed to compute step 7: the device is on fire$"):
        group.check()
