"""Behaviour 63 on a worker: its prefix cache is forgotten between two steps, or kept with the reason."""

import logging
import threading
import time
from concurrent.futures import Future

import pytest

from baton.errors import FleetError
from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.request import FinishReason
from baton.step import KVConnectorOutput, SchedulerOutput
from prefill_worker import PrefillRole
from tests.factories.engine import (
    FakeBlockMover,
    Held,
    RunningLoop,
    StepHook,
    make_core,
    make_engine_request,
)
from tests.factories.scheduling import token_at
from worker.kv_events import KVChange

PATIENCE_S = 60.0


def num_cached(running: RunningLoop, request_id: str) -> int:
    """Tokens that a prompt of 40 tokens, equal for all, finds in the cache."""
    running.loop.submit("gateway", make_engine_request(request_id, 40))
    return running.until_finished(request_id).num_cached_tokens


def test_c63_a_flushed_cache_has_nothing_and_its_subscribers_know() -> None:
    with RunningLoop() as running:
        assert [num_cached(running, request_id) for request_id in ("a", "b")] == [0, 32]
        running.loop.subscribe_kv_events("gateway")
        _, listing = running.kv_changes.get(timeout=60)
        assert listing.stored
        running.loop.flush_cache(PATIENCE_S, force=False)
        assert running.kv_changes.get(timeout=60) == (("gateway",), KVChange(True, b"", b""))
        assert num_cached(running, "c") == 0
        _, change = running.kv_changes.get(timeout=60)
        assert (change.is_anew, change.stored) == (False, listing.stored)
        assert num_cached(running, "d") == 32


def test_c63_a_worker_in_use_keeps_its_cache_unless_forced_and_no_request_loses_a_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    has_begun = threading.Event()

    def take_time(_: SchedulerOutput) -> None:
        has_begun.set()
        threading.Event().wait(0.005)

    with RunningLoop(make_core(StepHook(take_time))) as running:
        running.loop.submit("gateway", make_engine_request("r", 40, max_tokens=200))
        assert has_begun.wait(60)
        with pytest.raises(FleetError, match=r"^blocks are in use \(1 requests run\); wait, or use force$"):
            running.loop.flush_cache(PATIENCE_S, force=False)
        running.loop.flush_cache(PATIENCE_S, force=True)
        assert "emptied the prefix cache; 1 running request(s) compute their KV again" in caplog.text
        tokens: list[int] = []
        while True:
            _, output = running.next_output()
            assert output.first_position == len(tokens)
            tokens += output.token_ids
            if output.finish_reason is not None:
                break
        assert output.finish_reason is FinishReason.LENGTH
        assert tokens == [token_at("r", position) for position in range(200)]
        assert running.loop.snapshot.counters["preemptions"] == 1


def test_c63_blocks_that_a_reader_still_needs_survive_a_forced_flush() -> None:
    connector = FakeBlockMover()
    peer = WorkerRef("w1", "incarnation", ("tcp://127.0.0.1:1",), 16)

    def hand_over(request_id: str) -> int:
        """Tokens of the prompt that were found in the cache."""
        transfer = KVTransferParams(TransferRole.PRODUCER, request_id, 0, peer)
        running.loop.submit("gateway", make_engine_request(request_id, 40, kv_transfer=transfer))
        output = running.until_finished(request_id)
        assert output.finish_reason is FinishReason.HANDED_OVER
        return output.num_cached_tokens

    def num_leased() -> int:
        counted: Future[int] = Future()
        running.commands.put(lambda: counted.set_result(core.scheduler.kv_block_counts().leased))
        return counted.result(60)

    core = make_core(connector=connector)
    with RunningLoop(core, PrefillRole(9), lease_s=30.0) as running:
        assert [hand_over("a"), hand_over("b")] == [0, 32]
        with pytest.raises(FleetError, match=r"blocks are in use \(4 blocks are leased\)"):
            running.loop.flush_cache(PATIENCE_S, force=False)
        running.loop.flush_cache(PATIENCE_S, force=True)
        assert num_leased() == 4
        assert hand_over("c") == 0, "what is leased cannot be hit any more"
        assert num_leased() == 7
        connector.outputs.append(KVConnectorOutput(finished_sending=("a", "b", "c")))
        give_up_at = time.monotonic() + 60.0
        while num_leased():
            assert time.monotonic() < give_up_at
        running.loop.flush_cache(PATIENCE_S, force=False)


def test_an_engine_that_is_busy_or_has_ended_flushes_nothing() -> None:
    device = Held()
    running = RunningLoop(make_core(StepHook(device)))
    running.loop.start()
    running.loop.submit("gateway", make_engine_request("long", 40))
    assert device.entered.wait(60)
    with pytest.raises(FleetError, match=r"its engine was busy with one step for 0\.05 s"):
        running.loop.flush_cache(0.05, force=True)
    device.go_on.set()
    running.until_finished("long")
    assert num_cached(running, "same") == 32, "what the caller was told not to have happened did not"
    running.loop.fail(RuntimeError("the request plane ended"))
    running.until_ended()
    with pytest.raises(FleetError, match="its engine has ended"):
        running.loop.flush_cache(PATIENCE_S, force=True)
