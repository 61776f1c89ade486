"""How the engine handles failing ranks; ranks as processes: tests/integration/test_ranks.py."""

from typing import cast

from baton.step import ModelRunnerOutput, SchedulerOutput
from engine.pipeline import StreamPipeline
from engine.ranks.group import RankGroup
from engine.ranks.remote import RankedPipeline
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
    """Rank 0's: its waits for other ranks end without an error, as NCCL's do."""

    def launch(self, plan: SchedulerOutput) -> "Device":
        return self

    def wait(self) -> ModelRunnerOutput:
        return ModelRunnerOutput({"a": [0]})


def test_no_token_comes_of_a_step_that_another_rank_left() -> None:
    group = Group()
    pipeline = RankedPipeline(StreamPipeline(Device()), cast("RankGroup", group))
    pipeline.submit(make_plan(1))
    pipeline.submit(make_plan(2))
    assert pipeline.take_result().output == ModelRunnerOutput({"a": [0]})
    group.has_failed = True
    result = pipeline.take_result()
    assert result.output is None
    assert str(result.error) == "rank 1 is gone"
