"""How a step is filled, and in which order: the policies of `SchedulerConfig.batching`."""

from typing import Protocol

from baton.config import SchedulerConfig
from scheduler.admission import Admission
from scheduler.kv_cache import KVCache
from scheduler.request import Request
from scheduler.running import Running
from scheduler.step import StepPlan


class Batching(Protocol):
    """Fills steps from running and waiting requests."""

    def fill(self, step: StepPlan) -> None: ...


class Unified:
    """Prompts and outputs share every step: running requests continue first, waiting ones get the rest of the budget.

    Prompts that do not fit are split, unless `enable_chunked_prefill` is false. A step that preempts a request admits
    no waiting request, which would soon be preempted, too. On a prefill worker, waiting prompts with a lower key than
    the first running prompt are admitted before the running prompts continue.
    """

    def __init__(self, config: SchedulerConfig, running: Running, admission: Admission) -> None:
        self._enable_chunked_prefill = config.enable_chunked_prefill
        self._running = running
        self._admission = admission

    def fill(self, step: StepPlan) -> None:
        received = self._admission.admit_received(step)
        if (first := self._running.first_for_others()) is not None:
            self._admission.admit_waiting(step, self._fit, before=first.queue_key)
        self._running.continue_all(step)
        self._running.join(received)
        if not step.preempted:
            self._admission.admit_waiting(step, self._fit)

    def _fit(self, request: Request, num_computed_tokens: int, step: StepPlan) -> int:
        num_wanted = self._running.num_wanted_tokens(request, num_computed_tokens)
        if num_wanted > step.token_budget and not self._enable_chunked_prefill:
            return 0
        return self._running.num_fitting_tokens(request, num_wanted, num_computed_tokens, step)


class WholePrompts:
    """The classical schedulers: whole prompts come before outputs, and every waiting request before every running one.

    As in nano-vLLM, a whole prompt must fit into the budget and the free blocks. This check counts the whole prompt,
    even tokens that are prefix-cache hits. An admitted prompt then uses only as much of the budget as it has tokens to
    compute. With miniVLLM's rules, it uses its whole length.
    """

    def __init__(self, config: SchedulerConfig, running: Running, admission: Admission, kv: KVCache) -> None:
        self._mixes = config.batching == "mixed"
        """Whether a step with prompts also computes outputs. If not, a step computes either prompts or outputs."""
        self._has_mini_vllm_rules = config.prefill_first_rules == "mini_vllm"
        self._running = running
        self._admission = admission
        self._kv = kv

    def fill(self, step: StepPlan) -> None:
        self._admission.admit_waiting(step, self._fit)
        if self._mixes or not step.requests:
            self._decode(step)

    def _decode(self, step: StepPlan) -> None:
        received = self._admission.admit_received(step)
        self._running.continue_all(step)
        if self._has_mini_vllm_rules:
            self._running.make_room_for_next(step)
        self._running.join(received)

    def _fit(self, request: Request, num_computed_tokens: int, step: StepPlan) -> int:
        num_tokens = request.num_tokens
        num_charged = num_tokens + (step.num_reused_tokens if self._has_mini_vllm_rules else 0)
        has_room = (
            num_charged <= step.token_budget and self._kv.num_blocks_for(num_tokens) <= self._kv.num_free
        )
        return num_tokens - num_computed_tokens if has_room else 0


def make_batching(config: SchedulerConfig, running: Running, admission: Admission, kv: KVCache) -> Batching:
    if config.batching == "unified":
        return Unified(config, running, admission)
    return WholePrompts(config, running, admission, kv)
