"""The cost of a placement: the seconds that it adds to all answers together; knows no policy.

See docs/routing.md.

pair   = wait(P) + compute(P) + late(P, D) + HANDOVER_S + decode(D)
local  = wait(D) + compute(D) * (1 + running(D))         + decode(D)

wait      prompt tokens that wait on the worker / its prefill rate
compute   prompt tokens that are not in the worker's cache / its prefill rate
late      how much longer the transfer of D's missing tokens takes than P's computation
running   the requests on D. A request that still waits for KV counts only if its KV arrives soon: within NEAR
          times the time of this prompt
decode    the steps of the answer, each with one more request, plus the time that the answer adds to the steps
          of running requests; plus the time to recompute evicted tokens if blocks run short

When a pair is compared with a decode worker alone, `order` replaces wait(P). For each prompt that waits on P,
`order` counts the tokens of that prompt or of the new prompt, whichever are fewer. A prefill worker computes
the shorter of two prompts first (scheduler/order.py), so the longer prompt waits for the shorter one. `order`
adds at most one step of the other tokens on P, since the step in progress is not interrupted. The sum is
divided by the prefill rate.

When prefill workers are compared with each other, all waiting tokens count, since later prompts may pass this
one, too. So all prefill workers get equal load.
"""

from dataclasses import dataclass

from baton.config import SchedulerConfig
from baton.worker import WorkerStatus
from gateway.routing.rates import PREFILL_TOKENS_PER_S, LinkRates, MovingAverage, StepTime
from gateway.routing.worker_estimate import WorkerEstimate

HANDOVER_S = 0.005
"""Fixed cost of a hand-over of any size; see the hand-over benchmark."""

EXPECTED_NEW_TOKENS = 128
"""The router assumes that an answer has at most this many tokens, even if its limit is higher. The real length is
unknown, and few answers reach their limit."""

NEAR = 4
"""A prompt on D probably delays a request whose KV arrives within this many times the prompt's own time. The margin is
large, since the times of single hand-overs are not known."""

DEFAULT_SCHEDULER = SchedulerConfig()

ALIKE = 1.25
"""Rates that differ by less than this factor count as equal. Measured rates differ by chance, and equal
workers should share the load."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a request needs from its workers."""

    num_tokens: int
    """Tokens that a worker must compute, or find in its cache, before it can compute the next token."""
    num_new_tokens: int
    """Tokens that are expected to follow."""
    hits: dict[str, int]
    """How many of the `num_tokens` tokens each worker already has, by worker name."""

    def num_missing(self, worker: str) -> int:
        return self.num_tokens - self.hits.get(worker, 0)


class CostModel:
    """The fleet's rates, and the terms of the cost that follow from them."""

    def __init__(self, scheduler: SchedulerConfig) -> None:
        """`scheduler`: the workers' configuration. With `policy: priority`, `order` of a prefill worker
        counts all earlier prompts completely."""
        self._shorter_first = scheduler.policy == "fcfs"
        self.links = LinkRates()
        self._prefill_rate = MovingAverage()
        self._decode_step = StepTime()

    def on_status(self, status: WorkerStatus) -> None:
        """Learns typical rates. They apply to workers without measurements of their own."""
        if status.load.prefill_tokens_per_s > 0.0:
            self._prefill_rate.add(status.load.prefill_tokens_per_s)
        if status.load.decode_step_s > 0.0:
            self._decode_step.add(max(1, status.num_decoding), status.load.decode_step_s)

    def pair_s(self, prefill: WorkerEstimate, decode: WorkerEstimate, need: Need) -> float:
        prefill_s = self.compute_s(prefill, need)
        per_token_s = self.links.seconds_per_token(prefill.name, decode.name)
        late_s = self._late_s(decode, need, per_token_s, prefill_s)
        return self.wait_s(prefill) + prefill_s + late_s + HANDOVER_S + self.decode_s(decode, need)

    def local_s(self, decode: WorkerEstimate, need: Need, load_s: float = 0.0) -> float:
        """The cost of `local`, in seconds. `load_s`: how long it takes until all KV that requests on D wait for has
        arrived."""
        compute_s, num_loads = self.compute_s(decode, need), decode.num_requests - decode.num_here
        near = NEAR * compute_s / load_s if load_s > NEAR * compute_s else 1.0
        num_delayed = 1 + decode.num_here + near * num_loads
        return self.wait_s(decode) + compute_s * num_delayed + self.decode_s(decode, need)

    def prefill_s(self, prefill: WorkerEstimate, need: Need) -> float:
        """The part of `pair_s` that is the same for every decode worker."""
        return self.wait_s(prefill) + self.compute_s(prefill, need)

    def receiver_s(self, decode: WorkerEstimate, need: Need) -> float:
        """Approximately the part of `pair_s` that is the same for every prefill worker, assuming a typical link."""
        per_token_s = self.links.typical_seconds_per_token()
        return self._late_s(decode, need, per_token_s, 0.0) + self.decode_s(decode, need)

    def order_s(self, prefill: WorkerEstimate, need: Need) -> float:
        if not self._shorter_first:
            return self.wait_s(prefill)
        in_order = prefill.num_tokens_in_order(need.num_missing(prefill.name))
        in_progress = min(prefill.step_tokens, prefill.num_waiting_tokens - in_order)
        return self.prompt_s(prefill, in_order + in_progress)

    def wait_s(self, worker: WorkerEstimate) -> float:
        return self.prompt_s(worker, worker.num_waiting_tokens)

    def compute_s(self, worker: WorkerEstimate, need: Need) -> float:
        return self.prompt_s(worker, need.num_missing(worker.name))

    def prompt_s(self, worker: WorkerEstimate, num_tokens: int) -> float:
        return num_tokens / self._tokens_per_s(worker)

    def decode_s(self, worker: WorkerEstimate, need: Need) -> float:
        own, typical = worker.decode_step, self._decode_step
        num_running, num_new = worker.num_requests, need.num_new_tokens
        step_s = typical.start_s + typical.per_request_s * (2 * num_running + 1)
        if own.is_measured:
            step_s = _unless_alike(own.start_s + own.per_request_s * (2 * num_running + 1), step_s)
        seconds = num_new * step_s
        num_to_come = (num_running + 1) * num_new // 2 + need.num_tokens
        num_short = num_to_come - worker.room_tokens
        return seconds + num_short / self._tokens_per_s(worker) if num_short > 0 else seconds

    def _late_s(self, decode: WorkerEstimate, need: Need, per_token_s: float, prefill_s: float) -> float:
        return max(0.0, need.num_missing(decode.name) * per_token_s - prefill_s)

    def _tokens_per_s(self, worker: WorkerEstimate) -> float:
        typical = self._prefill_rate.value or PREFILL_TOKENS_PER_S
        own = worker.prefill_rate.value
        return typical if own is None else _unless_alike(own, typical)


def _unless_alike(own: float, typical: float) -> float:
    """The typical value if the worker's own value is near it; else the worker's own value."""
    return own if not typical / ALIKE < own < typical * ALIKE else typical
