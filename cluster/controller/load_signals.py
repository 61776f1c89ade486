"""Signals: measurements that show whether a role is short of workers, each with its target; pure."""

from dataclasses import dataclass
from typing import Literal

from baton.config import AutoscalingConfig
from baton.worker import WorkerRole, WorkerStatus
from cluster.controller.observation import Observation

TTFT = "time to first token p99"


@dataclass(frozen=True, slots=True)
class Signal:
    """One measurement and its target, which it should not exceed."""

    what: str
    value: float
    target: float
    unit: Literal["time", "share"]

    @property
    def ratio(self) -> float:
        """Above 1: the target is missed."""
        return self.value / self.target

    def __str__(self) -> str:
        side = "above" if self.ratio > 1.0 else "within"
        return f"{self.what} is {self.show(self.value)}, {side} the target of {self.show(self.target)}"

    def show(self, value: float) -> str:
        """Another value of this signal, in the same unit."""
        return seconds(value) if self.unit == "time" else percent(value)


def signals(
    config: AutoscalingConfig, observation: Observation, role: WorkerRole, has_prefill: bool
) -> list[Signal]:
    """All signals of one role. Without prefill workers, the signals of prompts belong to decode workers."""
    found = []
    if role is WorkerRole.DECODE:
        found += _decode_signals(config, observation)
    if role is WorkerRole.PREFILL or not has_prefill:
        found += _prompt_signals(config, observation, role)
    return found


def _prompt_signals(config: AutoscalingConfig, observation: Observation, role: WorkerRole) -> list[Signal]:
    found = []
    waits_for_decode_room = False
    if (target := config.target_queue_time_s) is not None:
        waited_s = max((s.load.oldest_waiting_s for s in _statuses(observation, role)), default=0.0)
        found.append(Signal("queue time of prompts", waited_s, target, "time"))
        waits_for_decode_room = observation.oldest_queued_s > target
    # More prefill workers do not help prompts that wait for room on a decode worker.
    if (target := config.target_ttft_p99_s) is not None and not waits_for_decode_room:
        found.append(Signal(TTFT, observation.ttft_p99_s, target, "time"))
    return found


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
    """83 ms, 1.2 s, 120 s."""
    if 0.0 < value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.1f}".removesuffix(".0") + " s" if value < 10.0 else f"{value:.0f} s"


def percent(value: float) -> str:
    return f"{value:.0%}".replace("%", " %")
