"""Behaviours 11 and 61: an engine plans ahead, but not past drafts: no step leaves out a request that it could hold."""

from baton.request import RequestOutput
from baton.step import ModelRunnerOutput, SchedulerOutput
from tests.factories.engine import PlansPastPrompts, make_core, make_engine_request
from tests.factories.scheduling import FakeRunner, token_at

NUM_TOKENS = 9


class Watched(FakeRunner):
    """Guesses three right drafts for one request; notes who is in each step."""

    def __init__(self) -> None:
        super().__init__(guess=self._guess_some)
        self.steps: list[set[str]] = []

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if plan.num_scheduled_tokens:
            self.steps.append(set(plan.num_scheduled_tokens))
        return super().execute(plan)

    def _guess_some(self, request_id: str, position: int) -> tuple[int, ...] | None:
        right = tuple(token_at(request_id, position + ahead) for ahead in range(3))
        return right if request_id == "drafted" else None


def test_c61_no_step_leaves_out_a_request_whose_drafts_the_one_before_verifies() -> None:
    runner = Watched()
    core = make_core(pipeline=PlansPastPrompts(runner), num_speculative_tokens=3)
    for name in ("drafted", "plain"):
        core.add_request(make_engine_request(name, max_tokens=NUM_TOKENS), "gateway")
    outputs: list[RequestOutput] = []
    while sum(output.finish_reason is not None for output in outputs) < 2:
        outputs += core.step().get("gateway", [])
    core.close()
    for name in ("drafted", "plain"):
        tokens = [token for output in outputs if output.request_id == name for token in output.token_ids]
        assert tokens == [token_at(name, position) for position in range(NUM_TOKENS)]
    assert runner.steps == [{"drafted", "plain"}] * 3 + [{"plain"}] * (NUM_TOKENS - 3)
