"""Signals: measurements that show whether a role is short of workers, each with its target; pure."""

from dataclasses import dataclass
from typing import Literal

from baton.config import AutoscalingConfig
from baton.worker import WorkerRole, WorkerStatus
from cluster.controller.observation import Observation

TTFT = "time to first token p99"


@dataclass(frozen=True, slots=True)
class Signal:
    """One measurement, and the target that it should not exceed."""

    what: str
    value: float
    target: float
    unit: Literal["time", "share"]

    @property
    def ratio(self) -> float:
        """The value divided by its target. Above 1, the target is missed."""
        return self.value / self.target

    def __str__(self) -> str:
        side = "above" if self.ratio > 1.0 else "within"
        return f"{self.what} is {self.show(self.value)}, {side} the target of {self.show(self.target)}"

    def show(self, value: float) -> str:
        """Text for another value of this signal, in the same unit."""
        return seconds(value) if self.unit == "time" else percent(value)


def signals(
    config: AutoscalingConfig, observation: Observation, role: WorkerRole, may_have_prefill: bool
) -> list[Signal]:
    """All signals of one role. If `may_have_prefill` is false, the signals of prompts belong to decode workers."""
    found = []
    if role is WorkerRole.DECODE:
        found += _decode_signals(config, observation)
    if role is _role_of_prompts(may_have_prefill):
        found += _prompt_signals(config, observation)
    if role is WorkerRole.PREFILL and may_have_prefill:
        found += _prefill_queue(config, observation)
    return found


def signals_of_fewer(
    config: AutoscalingConfig, observation: Observation, role: WorkerRole, may_have_prefill: bool
) -> list[Signal]:
    """Signals that are no reason for more workers of the role. But they must meet their targets before the role loses a
    worker."""
    if role is not _role_of_prompts(may_have_prefill):
        return []
    found = _ttft_signals(config, observation, observation.slowest_ttft_s)
    if role is WorkerRole.PREFILL and len(observation.of(role)) == 1:
        # Without this last prefill worker, decode workers compute the prompts.
        found += _prompt_queue(config, observation, WorkerRole.DECODE)
    return found


def _role_of_prompts(may_have_prefill: bool) -> WorkerRole:
    return WorkerRole.PREFILL if may_have_prefill else WorkerRole.DECODE


def _prompt_signals(config: AutoscalingConfig, observation: Observation) -> list[Signal]:
    computed_by = WorkerRole.PREFILL if observation.serving(WorkerRole.PREFILL) else WorkerRole.DECODE
    return [
        *_prompt_queue(config, observation, computed_by),
        *_ttft_signals(config, observation, observation.ttft_p99_s),
    ]


def _prompt_queue(config: AutoscalingConfig, observation: Observation, role: WorkerRole) -> list[Signal]:
    if (target := config.target_queue_time_s) is None:
        return []
    waited_s = max((s.load.oldest_waiting_s for s in _statuses(observation, role)), default=0.0)
    return [Signal("queue time of prompts", waited_s, target, "time")]


def _ttft_signals(config: AutoscalingConfig, observation: Observation, ttft_s: float) -> list[Signal]:
    """The signal for the time to first token. There is none while requests wait for room on a decode worker, since more
    prefill workers do not help these requests."""
    queue_target, target = config.target_queue_time_s, config.target_ttft_p99_s
    waits_for_decode_room = queue_target is not None and observation.oldest_queued_s > queue_target
    if target is None or waits_for_decode_room:
        return []
    return [Signal(TTFT, ttft_s, target, "time")]


def _prefill_queue(config: AutoscalingConfig, observation: Observation) -> list[Signal]:
    if (target := config.target_queue_time_s) is None:
        return []
    waited_s = observation.oldest_without_prefill_s
    return [Signal("queue time for a prefill worker", waited_s, target, "time")]


def _decode_signals(config: AutoscalingConfig, observation: Observation) -> list[Signal]:
    found = []
    if (target := config.target_itl_p99_s) is not None:
        found.append(Signal("inter-token latency p99", observation.itl_p99_s, target, "time"))
    if (target := config.target_block_use) is not None:
        blocks = [status.kv_blocks for status in _statuses(observation, WorkerRole.DECODE)]
        total = sum(count.total for count in blocks)
        use = 1.0 - sum(count.free for count in blocks) / total if total else 0.0
        found.append(Signal("block use of decode workers", use, target, "share"))
    if (target := config.target_queue_time_s) is not None:
        found.append(Signal("queue time for a decode worker", observation.oldest_queued_s, target, "time"))
    return found


def _statuses(observation: Observation, role: WorkerRole) -> list[WorkerStatus]:
    return [worker.status for worker in observation.serving(role) if worker.status is not None]


def seconds(value: float) -> str:
    """The time as text, such as `83 ms`, `1.2 s` or `120 s`."""
    if 0.0 < value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f}".removesuffix(".0") + " s" if value < 10.0 else f"{value:.0f} s"


def percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")
