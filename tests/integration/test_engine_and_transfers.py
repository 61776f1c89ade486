"""The real engine loop, core, scheduler and connector: steps and timers while transfers are outstanding."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from baton.clock import SystemClock, VirtualClock
from baton.config import KVTransferConfig
from baton.kv import PROTOCOL_VERSION, KVFingerprint, KVTransferParams, TransferRole, WorkerRef
from baton.request import ErrorKind, FinishReason
from baton.step import SchedulerOutput
from baton.transfer import TransferEventKind
from decode_worker import DecodeRole
from engine.pipeline import DeviceLostError, StepLauncher
from kv_transfer.commands import AbortSend, BeginSend, KVConnectorMetadata
from kv_transfer.connector.worker import KVConnectorWorker
from prefill_worker import PrefillRole
from tests.factories.engine import RunningLoop, StepHook, make_core, make_engine_request
from tests.factories.hand_overs import both_ends
from tests.factories.security import KEYS
from worker.role import Role

NUM_BLOCKS, BLOCK_NBYTES = 101, 2 * 2 * 2 * 16 * 8 * 4
FINGERPRINT = KVFingerprint(PROTOCOL_VERSION, "model", "float32", "LKHTD", 2, 2, 8, 16, 1)


def silent_port() -> int:
    """Accepts connections, and sends nothing: a port that refuses them would show a dead worker."""
    server = socket.create_server(("127.0.0.1", 0))
    port: int = server.getsockname()[1]
    server.detach()  # open until this process ends
    return port


NOBODY = WorkerRef("nobody", "incarnation-0", (f"tcp://127.0.0.1:{silent_port()}",), 16)
"""A worker that never answers."""
LONG_S, SHORT_S, SLACK_S = 120.0, 0.5, 60.0
TO_NOBODY = KVTransferParams(TransferRole.PRODUCER, "t", 0, NOBODY)
FROM_NOBODY = KVTransferParams(TransferRole.CONSUMER, "t", 0, NOBODY)


@contextmanager
def running_worker(
    role: Role,
    patience_s: float,
    *,
    incarnation: str = "incarnation-1",
    load_timeout_s: float | None = None,
    runner: StepLauncher | None = None,
) -> Iterator[RunningLoop]:
    """A worker without a device, which waits `patience_s` for peers that are silent."""
    loops: list[RunningLoop] = []
    connector = KVConnectorWorker(
        KVTransferConfig(
            lease_s=patience_s, peer_timeout_s=patience_s, load_timeout_s=load_timeout_s or patience_s
        ),
        "127.0.0.1",
        KEYS.kv,
        incarnation,
        SystemClock(),
        np.zeros((NUM_BLOCKS, BLOCK_NBYTES), np.uint8),
        FINGERPRINT,
        on_kv_output=lambda: loops[0].commands.wake(),
    )
    loops.append(RunningLoop(make_core(runner, connector), role))
    loops[0].ref = WorkerRef(incarnation, incarnation, (connector.kv_address,), 16)
    connector.start()
    try:
        with loops[0]:
            yield loops[0]
    finally:
        connector.shutdown()


def test_c42_an_engine_that_dies_releases_the_consumers_of_its_prompts() -> None:
    """Otherwise its transfer thread would answer the consumers until the process ends."""
    entered, dies = threading.Event(), threading.Event()

    def die(_: SchedulerOutput) -> None:
        entered.set()
        assert dies.wait(60)
        raise DeviceLostError("the device fell off the bus")

    consuming = running_worker(DecodeRole(9), SHORT_S, incarnation="consumer", load_timeout_s=LONG_S)
    producing = running_worker(PrefillRole(9), SHORT_S, incarnation="producer", runner=StepHook(die))
    with producing as producer, consuming as consumer:
        produced, loaded = both_ends(producer.ref, consumer.ref)
        producer.loop.submit("gateway", make_engine_request("gives", 40, kv_transfer=produced))
        assert entered.wait(60)
        consumer.loop.submit("gateway", make_engine_request("loads", 40, max_tokens=1, kv_transfer=loaded))
        time.sleep(4 * SHORT_S)
        assert consumer.loop.snapshot.requests.waiting_for_remote_kvs == 1, (
            "its producer answers, so it waits"
        )
        dies.set()
        end = consumer.until_finished("loads")
        assert end.finish_reason is FinishReason.LENGTH, "it was computed here, as on_failure says"


def test_c39_a_decode_worker_that_refuses_a_request_releases_its_prompt() -> None:
    """The worker changed its role when the request was on its way, and the prompt was computed before the refusal."""
    refusing = running_worker(PrefillRole(9), LONG_S, incarnation="consumer")
    producing = running_worker(PrefillRole(9), LONG_S, incarnation="producer")
    with producing as producer, refusing as consumer:
        produced, loaded = both_ends(producer.ref, consumer.ref)
        producer.loop.submit("gateway", make_engine_request("gives", 40, kv_transfer=produced))
        assert producer.until_finished("gives").finish_reason is FinishReason.HANDED_OVER
        consumer.loop.submit("gateway", make_engine_request("loads", 40, kv_transfer=loaded))
        assert consumer.until_finished("loads").error_kind is ErrorKind.OVERLOADED
        report = producer.next_output()[1].stage_times
        assert report is not None
        (transfer,) = report.transfers
        assert transfer.events[-1].kind is TransferEventKind.NOT_NEEDED
        assert transfer.reason == "the decode worker refused the request"
        wait_until(lambda: producer.loop.snapshot.kv_blocks.free == NUM_BLOCKS - 1)


def wait_until(is_so: Callable[[], bool], timeout_s: float = SLACK_S) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


def test_c48_the_loop_keeps_stepping_while_a_load_is_outstanding() -> None:
    with running_worker(DecodeRole(100), LONG_S) as running:
        running.loop.submit("gateway", make_engine_request("loads", kv_transfer=FROM_NOBODY))
        wait_until(lambda: running.loop.snapshot.requests.waiting_for_remote_kvs == 1)
        began = time.monotonic()
        for request_id in ("first", "second", "third"):
            running.loop.submit("gateway", make_engine_request(request_id, max_tokens=20))
            assert running.until_finished(request_id).finish_reason is FinishReason.LENGTH
        assert time.monotonic() - began < SLACK_S
        snapshot = running.loop.snapshot
        assert snapshot.requests.waiting_for_remote_kvs == 1
        assert snapshot.kv_blocks.referenced == 1
        running.loop.abort("gateway", ("loads",))
        assert running.until_finished("loads").finish_reason is FinishReason.ABORT
        wait_until(lambda: running.loop.snapshot.kv_blocks.free == NUM_BLOCKS - 1)


def test_c48_the_loop_keeps_stepping_while_the_freeing_of_blocks_is_delayed() -> None:
    with running_worker(PrefillRole(100), LONG_S) as running:
        running.loop.submit("gateway", make_engine_request("gives", kv_transfer=TO_NOBODY))
        assert running.until_finished("gives").finish_reason is FinishReason.HANDED_OVER
        wait_until(lambda: running.loop.snapshot.kv_blocks.leased == 1)
        began = time.monotonic()
        for number in range(5):
            transfer = KVTransferParams(TransferRole.PRODUCER, f"t{number}", 0, NOBODY)
            request = make_engine_request(f"other{number}", 100, kv_transfer=transfer)
            running.loop.submit("gateway", request)
            assert running.until_finished(request.request_id).finish_reason is FinishReason.HANDED_OVER
        assert time.monotonic() - began < SLACK_S
        wait_until(lambda: running.loop.snapshot.kv_blocks.leased > 1)


def test_c48_a_loads_deadline_fires_on_an_idle_engine_which_used_no_cpu_until_then() -> None:
    with running_worker(DecodeRole(100), SHORT_S) as running:
        before = time.process_time()
        running.loop.submit("gateway", make_engine_request("loads", max_tokens=1, kv_transfer=FROM_NOBODY))
        end = running.until_finished("loads")
        assert time.process_time() - before < SHORT_S / 2
    assert end.finish_reason is FinishReason.LENGTH, "it was computed here, as on_failure says"
    assert end.stage_times is not None
    (transfer,) = end.stage_times.transfers
    assert transfer.events[-1].kind is TransferEventKind.FAILED
    assert SHORT_S <= transfer.elapsed_s < SHORT_S + SLACK_S
    assert end.stage_times.queue_s < SHORT_S <= end.stage_times.transfer_s


def test_c48_a_lease_ends_on_an_idle_engine_and_its_blocks_come_home() -> None:
    with running_worker(PrefillRole(100), SHORT_S) as running:
        running.loop.submit("gateway", make_engine_request("gives", kv_transfer=TO_NOBODY))
        assert running.until_finished("gives").finish_reason is FinishReason.HANDED_OVER
        wait_until(lambda: running.loop.snapshot.kv_blocks.free == NUM_BLOCKS - 1)
        assert running.loop.snapshot.kv_blocks.leased == 0
        _, output = running.next_output()
    assert (output.request_id, output.finish_reason, output.token_ids) == ("gives", None, ())
    assert output.stage_times is not None
    (transfer,) = output.stage_times.transfers
    assert transfer.events[-1].kind is TransferEventKind.FAILED
    assert "was silent for" in transfer.reason or "never received" in transfer.reason


def test_c48_a_requests_own_deadline_fires_on_an_idle_engine_while_it_loads() -> None:
    with running_worker(DecodeRole(100), LONG_S) as running:
        request = make_engine_request("loads", kv_transfer=FROM_NOBODY, timeout_s=SHORT_S)
        running.loop.submit("gateway", request)
        end = running.until_finished("loads")
        assert (end.finish_reason, end.error) == (FinishReason.ABORT, "the request's deadline passed")
        wait_until(lambda: running.loop.snapshot.kv_blocks.free == NUM_BLOCKS - 1)


def test_a_hand_over_counts_from_the_command_and_not_from_the_transfer_threads_turn() -> None:
    """Otherwise, its times on the request's axis would be too early if the thread has to wait for a processor."""
    clock, has_output = VirtualClock(), threading.Event()
    connector = KVConnectorWorker(
        KVTransferConfig(),
        "127.0.0.1",
        KEYS.kv,
        "incarnation-1",
        clock,
        np.zeros((NUM_BLOCKS, BLOCK_NBYTES), np.uint8),
        FINGERPRINT,
        has_output.set,
    )
    try:
        abort = AbortSend("r", "cancelled", is_unneeded=True, is_held=True)
        connector.send_commands(KVConnectorMetadata((BeginSend("r", TO_NOBODY, 32), abort), (), ()))
        clock.advance(7.0)
        connector.start()
        assert has_output.wait(60)
        record = connector.get_finished().transfers["r"]
    finally:
        connector.shutdown()
    assert [(event.kind, event.at_s) for event in record.events] == [
        (TransferEventKind.BEGUN, 0.0),
        (TransferEventKind.NOT_NEEDED, 7.0),
    ]
