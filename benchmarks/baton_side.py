"""Baton's scheduler as a `Side`. Uses only the public names of its package.

    python -m benchmarks.baton_side

This process runs timed rounds when it gets orders on standard input; see `benchmarks/peer.py`.
"""

from dataclasses import asdict
from functools import partial
from typing import Any

from baton.config import SchedulerConfig
from baton.kv_groups import KVGroups
from baton.sampling import SamplingParams
from baton.step import ModelRunnerOutput
from benchmarks.peer import serve
from benchmarks.scheduler_play import Decisions, Ended, Share
from benchmarks.scheduler_rounds import run_round
from benchmarks.scheduler_workloads import EOS, RequestSpec, Settings
from scheduler import Request, RequestStatus, Scheduler


class BatonSide:
    """One scheduler. With `is_async`, it may plan one step before the model has computed the previous one."""

    def __init__(self, settings: Settings, *, is_async: bool = False) -> None:
        values = asdict(settings)
        num_speculative_tokens = values.pop("num_speculative_tokens")
        groups = KVGroups(*(values.pop(name) for name in ("num_full", "num_windowed", "window")))
        config = SchedulerConfig(**values, async_scheduling=is_async)
        self._scheduler = Scheduler(config, num_speculative_tokens=num_speculative_tokens, kv_groups=groups)

    @property
    def num_unfinished(self) -> int:
        return len(self._scheduler.request_ids)

    def add(self, spec: RequestSpec, prompt_token_ids: list[int]) -> None:
        params = SamplingParams(
            max_tokens=spec.max_tokens,
            min_tokens=spec.min_tokens,
            stop_token_ids=spec.stop_token_ids,
            ignore_eos=spec.ignore_eos,
        )
        self._scheduler.add_request(
            Request(
                spec.request_id,
                prompt_token_ids,
                params,
                arrival_time=spec.arrival_time,
                priority=spec.priority,
                eos_token_ids=(EOS,),
                cache_salt=spec.cache_salt,
            )
        )

    def abort(self, request_id: str) -> None:
        self._scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        return self._scheduler.schedule()

    def decisions(self, plan: Any) -> Decisions:
        cached = plan.scheduled_cached_reqs
        computed = plan.num_computed_tokens()
        blocks = dict(zip(cached.request_ids, cached.new_block_ids, strict=True))
        blocks |= {new.request_id: new.block_ids for new in plan.scheduled_new_reqs}
        admitted = {new.request_id for new in plan.scheduled_new_reqs} | cached.resumed_request_ids
        drafts = plan.scheduled_spec_decode_tokens
        shares = tuple(
            Share(i, num_tokens, computed[i], i in admitted, blocks[i], drafts.get(i, ()))
            for i, num_tokens in plan.num_scheduled_tokens.items()
        )
        return Decisions(shares, plan.preempted_req_ids)

    def request_ids(self, plan: Any) -> list[str]:
        return list(plan.num_scheduled_tokens)

    def runner_output(self, _plan: Any, sampled: dict[str, list[int]], drafts: dict[str, list[int]]) -> Any:
        return ModelRunnerOutput(sampled, draft_token_ids={i: tuple(guess) for i, guess in drafts.items()})

    def update(self, plan: Any, runner_output: Any) -> Any:
        return self._scheduler.update_from_output(plan, runner_output)

    def ended(self, report: Any) -> tuple[Ended, ...]:
        outputs = [output for news in report.values() for output in news]
        return tuple(
            Ended(output.request_id, output.finish_reason.value) for output in outputs if output.finish_reason
        )


if __name__ == "__main__":
    serve(partial(run_round, BatonSide))
