"""What it costs to be watched: a request's end and a scrape at a gateway, a step and a scrape at a worker.

python -m benchmarks.metrics
"""

import random
import time
from collections.abc import Callable
from functools import partial

from baton.kv import WorkerRef
from baton.request import FinishReason
from baton.worker import KVBlockCounts, RequestCounts, WorkerRole, WorkerState, WorkerStatus
from gateway.auth.callers import ANYBODY
from gateway.requests.record import Outcome, RequestRecord
from gateway.requests.request import Finish
from gateway.requests.timing import HandoverParts, Timing, TtftParts
from gateway.routing.placement import Mode, Placement
from gateway.telemetry.metrics import GatewayMetrics
from worker.metrics import WorkerMetrics
from worker.step_counts import StepCounts

PARTS = TtftParts(
    gateway_s=0.001,
    queue_s=0.0,
    failed_attempts_s=0.0,
    worker_queue_s=0.01,
    transfer_exposed_s=0.0,
    prefill_s=0.1,
)
HANDOVER = HandoverParts(transfer_exposed_s=0.001, first_step_s=0.01, gateway_s=0.0)
STATUS = WorkerStatus(
    WorkerRef("w0", "life", ("tcp://127.0.0.1:1",), 16),
    WorkerRole.DECODE,
    WorkerState.READY,
    KVBlockCounts(1000, 500, 10, 0),
    RequestCounts(64, 10, 3),
    {f"kv_event_{number}": number for number in range(40)},
)


def record_of(num_tokens: int) -> RequestRecord:
    """A request that was handed over, finished and had so many tokens."""
    rng = random.Random(1)
    itl_s = tuple(rng.expovariate(50.0) for _ in range(num_tokens - 1))
    timing = Timing(
        ttft_s=0.111,
        itl_s=itl_s,
        queue_s=0.01,
        prefill_s=0.1,
        transfer_s=0.02,
        transfer_bytes=1 << 20,
        handover_s=0.011,
        decode_s=sum(itl_s),
        total_s=0.111 + sum(itl_s),
        transfer_wait_s=0.1,
        transport="shared_memory",
        ttft_parts=PARTS,
        handover_parts=HANDOVER,
    )
    placement = Placement(Mode.DISAGGREGATED, "w0", "w1")
    finish = Finish(FinishReason.LENGTH, None, None, 100, num_tokens, 0, timing, placement, 1)
    return RequestRecord(
        request_id="r",
        caller=ANYBODY,
        api="chat",
        trace=None,
        is_chat=True,
        outcome=Outcome.FINISHED,
        error=None,
        arrived_at=0.0,
        ended_at=timing.total_s,
        num_prompt_tokens=100,
        num_output_tokens=num_tokens,
        num_attempts=1,
        path="disaggregated",
        finish=finish,
        ttft_parts=PARTS,
    )


def best_us(call: Callable[[], object], count: int) -> float:
    """Microseconds of the fastest of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - began) / count * 1e6)
    return min(rounds)


def main() -> None:
    gateway, steps = GatewayMetrics("model", 8192), StepCounts()
    worker = WorkerMetrics(lambda: STATUS, steps, dict)
    for num_tokens in (1, 100, 1000):
        took_us = best_us(partial(gateway.ended, record_of(num_tokens)), 200)
        print(f"a request of {num_tokens:4} tokens ends   {took_us:8.1f} us")
    print(f"a first token comes            {best_us(lambda: gateway.first_token(0.1), 2000):8.1f} us")
    print(f"an engine's step is counted    {best_us(lambda: steps.done(0, 64, 0.01), 2000):8.2f} us")
    print(f"a gateway is scraped           {best_us(lambda: gateway.render(''), 5):8.0f} us")
    print(f"a worker is scraped            {best_us(lambda: worker.render(''), 5):8.0f} us")


if __name__ == "__main__":
    main()
