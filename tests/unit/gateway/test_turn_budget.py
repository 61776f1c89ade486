"""The loop's time: what several tasks do in one turn of it, and how long it stood, in virtual time."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import zmq.asyncio

from baton.kv import WorkerRef
from baton.messages.request_plane import TO_GATEWAY, KVEvents, Outputs
from baton.request import RequestOutput
from baton.worker import WorkerEndpoint, WorkerRole, WorkerStatus
from gateway.auth.callers import ANYBODY
from gateway.http.call import HttpCall
from gateway.http.openai.completion_request import CompletionRequest
from gateway.http.openai.routes import OpenAIRoutes
from gateway.model import ServedModel
from gateway.preprocess import ClientRequest
from gateway.requests.request import GatewayRequest
from gateway.telemetry.loop_lag import CHECK_INTERVAL_S, LONGEST_S, LoopLag
from gateway.text import TextStream
from gateway.turn_budget import TURN_S, SharedTurns
from gateway.workers.worker_client import OUTPUTS_AT_ONCE, WorkerClient
from gateway.workers.worker_listener import LossCause
from tests.factories.gateway import NETWORK
from tests.factories.models import make_tokenizer
from tests.factories.virtual_loop import in_virtual_time, virtual_loop

PORTION_S = 0.0005


@in_virtual_time
async def test_c58_all_tasks_together_work_no_longer_in_a_turn_of_the_loop_than_their_budget() -> None:
    loop = virtual_loop()
    turns = SharedTurns(loop.time)
    order: list[str] = []

    async def work(name: str, num_portions: int) -> None:
        for _ in range(num_portions):
            async with turns:
                loop.stand_still(PORTION_S)
                order.append(name)

    tasks = [asyncio.create_task(work(name, 40)) for name in "abcdefgh"]
    worst_s = 0.0
    while not all(task.done() for task in tasks):
        before = loop.time()
        await asyncio.sleep(0)
        worst_s = max(worst_s, loop.time() - before)
    assert worst_s < TURN_S + 2 * PORTION_S
    assert "".join(order[:20]) == "aaaabcdefghabcdefgha", "the first has a turn, then they come in turn"


@in_virtual_time
async def test_a_single_task_with_little_to_do_never_waits() -> None:
    loop = virtual_loop()
    turns = SharedTurns(loop.time)
    num_turns = 0

    def count() -> None:
        nonlocal num_turns
        num_turns += 1
        loop.call_soon(count)

    loop.call_soon(count)
    for _ in range(3):
        async with turns:
            loop.stand_still(PORTION_S)
    assert num_turns == 0


class Listener:
    """Takes a tenth of a millisecond for each output, and two for KV events."""

    def __init__(self, loop: "asyncio.AbstractEventLoop") -> None:
        self.seen: list[tuple[str, int]] = []
        self.at: list[float] = []
        self._loop = loop

    def on_status(self, status: WorkerStatus) -> None: ...

    def on_outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        virtual_loop().stand_still(0.0001 * len(outputs))
        self.seen += [(output.request_id, output.first_position) for output in outputs]
        self.at += [self._loop.time()] * len(outputs)

    def on_kv_events(self, worker: str, events: KVEvents) -> None:
        virtual_loop().stand_still(TURN_S)

    def on_worker_lost(self, worker: str, cause: LossCause, reason: str) -> None: ...


@contextmanager
def client_of(listener: Listener) -> Iterator[WorkerClient]:
    context = zmq.asyncio.Context()
    ref = WorkerRef("w0", "w0-incarnation", ("tcp://127.0.0.1:1",), 16)
    endpoint = WorkerEndpoint(ref, WorkerRole.DECODE, "tcp://127.0.0.1:1", "here", 1)
    turns = SharedTurns(virtual_loop().time)
    client = WorkerClient(endpoint, context, "cafe", 1, NETWORK, None, listener, Counter(), turns)
    try:
        yield client
    finally:
        client.close()
        context.destroy(linger=0)


async def stalls_during(work: Coroutine[Any, Any, Any]) -> list[float]:
    """How long each turn of the loop took until this work was done."""
    working, stalls = asyncio.create_task(work), []
    while not working.done():
        before = virtual_loop().time()
        await asyncio.sleep(0)
        stalls.append(virtual_loop().time() - before)
    await working
    return stalls


@in_virtual_time
async def test_c58_a_burst_of_outputs_leaves_turns_to_others_and_keeps_each_requests_order() -> None:
    listener = Listener(virtual_loop())
    burst = [
        RequestOutput(request_id=f"r{number}", first_position=step)
        for step in range(16)
        for number in range(50)
    ]
    with client_of(listener) as client:
        stalls = await stalls_during(client._pass_on(list(burst)))
    assert sorted(listener.seen) == sorted((output.request_id, output.first_position) for output in burst)
    steps: dict[str, list[int]] = {}
    for request_id, step in listener.seen:
        steps.setdefault(request_id, []).append(step)
    assert all(own == list(range(16)) for own in steps.values())
    assert max(stalls) < TURN_S + 2 * OUTPUTS_AT_ONCE * 0.0001
    changes = sum(before[0] != after[0] for before, after in pairwise(listener.seen))
    assert changes == 49, "what comes for one client at once is sent at once"


@in_virtual_time
async def test_c58_messages_that_wait_are_decoded_and_applied_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def decode(client: WorkerClient, frame: bytes) -> object:
        virtual_loop().stand_still(TURN_S)
        return decode_it(client, frame)

    decode_it = WorkerClient._decode
    monkeypatch.setattr(WorkerClient, "_decode", decode)
    outputs = TO_GATEWAY.encode(Outputs((RequestOutput(request_id="r", first_position=0),)))
    listing = TO_GATEWAY.encode(KVEvents(0, True, b"", b""))
    with client_of(listener := Listener(virtual_loop())) as client:
        stalls = await stalls_during(client._handle([outputs, listing] * 16))
    assert len(listener.seen) == 16
    assert max(stalls) < 3 * TURN_S


class SlowPreprocessor:
    """Takes a millisecond for each prompt, as tokenizing 2,000 characters does."""

    pool = SimpleNamespace(tokenizer=None)

    async def preprocess(self, asked: ClientRequest) -> GatewayRequest:
        virtual_loop().stand_still(0.001)
        text = TextStream(make_tokenizer(), (), 0, True)
        return GatewayRequest(
            request_id="r",
            prompt_token_ids=(5,),
            sampling_params=asked.params,
            text=text,
            caller=asked.caller,
        )


@in_virtual_time
async def test_c58_a_call_of_many_prompts_leaves_turns_to_others() -> None:
    loop = virtual_loop()
    model = ServedModel("m", "m", 100, 300, (2,), "float32", "float32")
    routes = OpenAIRoutes(None, SlowPreprocessor(), model)  # type: ignore[arg-type]
    body = CompletionRequest(model="m", prompt=["x"] * 128)
    call = HttpCall("r", "r", "completions", ANYBODY, None, None)
    asking = asyncio.create_task(routes.completion(body, call))
    worst_s = 0.0
    while not asking.done():
        before = loop.time()
        await asyncio.sleep(0)
        worst_s = max(worst_s, loop.time() - before)
    await asking
    assert worst_s < TURN_S + 2 * 0.001


@in_virtual_time
async def test_c58_the_loops_longest_stall_is_measured_wherever_it_falls() -> None:
    loop = virtual_loop()
    seen: list[tuple[float, float]] = []
    lag = LoopLag(lambda lag_s, longest_s: seen.append((lag_s, longest_s)))
    lag.start()
    await asyncio.sleep(1.07)
    loop.stand_still(0.8)
    await asyncio.sleep(0.5)
    assert max(lag_s for lag_s, _ in seen) == pytest.approx(0.8, abs=CHECK_INTERVAL_S + 0.001)
    assert seen[-1][0] < 0.001
    assert seen[-1][1] == max(lag_s for lag_s, _ in seen)
    await asyncio.sleep(LONGEST_S)
    assert seen[-1][1] > 0.7, "it is still to be seen a minute later"
    await asyncio.sleep(LONGEST_S + 1.0)
    assert seen[-1][1] < 0.01
    lag.stop()
