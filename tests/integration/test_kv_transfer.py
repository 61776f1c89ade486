"""Two workers' connectors over real sockets, by every transport: blocks arrive, and either end may vanish."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
import pytest
import zmq

from baton.clock import SystemClock
from baton.config import KVTransferConfig
from baton.kv import KVFingerprint, WorkerRef
from baton.request import FirstToken
from baton.step import KVConnectorOutput
from baton.system.curve import secure_client
from kv_transfer import KVConnectorMetadata, SharedMemory
from kv_transfer.commands import (
    AbortLoad,
    AbortSend,
    BeginLoad,
    BeginSend,
    FinishSend,
    ImmediateCommand,
    LoadBlocks,
    SendBlocks,
    WithdrawBlocks,
)
from kv_transfer.connector.worker import KVConnectorWorker
from kv_transfer.cuda.memory import CudaMemory
from kv_transfer.pool import DeviceBlocks
from kv_transfer.transport import shared_memory
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.nixl_agent import nixl_is_available
from tests.factories.fake_cuda import FakeDriver, FakeHost
from tests.factories.hand_overs import both_ends
from tests.factories.hosts import BIND_HOSTS
from tests.factories.security import KEYS

BLOCK_BYTES = 2 * 2 * 2 * 16 * 8 * 4
FINGERPRINT = KVFingerprint(2, "model", "float32", "LKHTD", 2, 2, 8, 16, 1)
TOKEN = FirstToken(7, None)
CONFIG = KVTransferConfig(lease_s=2.0, load_timeout_s=8.0, peer_timeout_s=2.0, checksum="on")

T = TypeVar("T")


class Worker:
    """A connector with a pool of its own; `pool` starts with contents that differ from every other worker's."""

    transport: ClassVar[str] = "auto"
    host: ClassVar[FakeHost | None] = None
    """Where pools are in the memory of a pretended device."""
    bind_host: ClassVar[str] = "127.0.0.1"
    fingerprint: ClassVar[KVFingerprint] = FINGERPRINT

    def __init__(self, name: str, incarnation: str, *, is_started: bool = True) -> None:
        rng = np.random.default_rng(sum(incarnation.encode()))
        blocks, memory = self._make_pool(64 * BLOCK_BYTES)
        self.pool[:] = rng.integers(0, 256, (64, BLOCK_BYTES), dtype=np.uint8)
        self._has_output = threading.Event()
        self._news: list[KVConnectorOutput] = []
        self.connector = KVConnectorWorker(
            CONFIG.with_values("test", transport=self.transport),
            self.bind_host,
            KEYS.kv,
            incarnation,
            SystemClock(),
            blocks,
            self.fingerprint,
            self._has_output.set,
            memory=memory,
        )
        if is_started:
            self.connector.start()
        self.ref = WorkerRef(name, incarnation, (self.connector.kv_address,), 16)

    def _make_pool(self, num_bytes: int) -> tuple[Bytes | DeviceBlocks, SharedMemory | None]:
        """The pool as a connector gets it; `self.pool` is [num_blocks, bytes of a block]."""
        if self.host is None:
            memory = SharedMemory(num_bytes)
            self.pool = memory.array.reshape(-1, BLOCK_BYTES)
            return self.pool, memory
        device = CudaMemory(num_bytes, 0, FakeDriver(self.host))
        self.pool = np.frombuffer(self.host.memories[device.address], np.uint8).reshape(-1, BLOCK_BYTES)
        return DeviceBlocks(device, BLOCK_BYTES), None

    def command(self, *commands: ImmediateCommand | LoadBlocks, after: tuple[SendBlocks, ...] = ()) -> None:
        at_once = tuple(command for command in commands if not isinstance(command, LoadBlocks))
        loads = tuple(command for command in commands if isinstance(command, LoadBlocks))
        metadata = KVConnectorMetadata(at_once, loads, after)
        self.connector.send_commands(metadata)
        self.connector.start_load_kv(metadata)
        self.connector.save_kv_blocks(metadata, set())

    def until(self, pick: Callable[[KVConnectorOutput], tuple[T, ...]], timeout_s: float = 60.0) -> T:
        """The first output in which `pick` finds something. All other outputs are kept."""
        end = time.monotonic() + timeout_s
        while True:
            for news in self._news:
                if found := pick(news):
                    self._news.remove(news)
                    return found[0]
            assert self._has_output.wait(max(0.0, end - time.monotonic())), f"no such news, only {self._news}"
            self._has_output.clear()
            self._news.append(self.connector.get_finished())

    def gather(self, is_enough: Callable[[KVConnectorOutput], bool]) -> KVConnectorOutput:
        """All outputs together, as soon as they are enough."""
        end, news = time.monotonic() + 60.0, KVConnectorOutput()
        while not is_enough(news):
            assert self._has_output.wait(max(0.0, end - time.monotonic())), f"only {news}"
            self._has_output.clear()
            news += self.connector.get_finished()
        return news

    def stop(self) -> None:
        self.connector.shutdown()


@pytest.fixture(
    autouse=True,
    params=["zmq_tcp", "shared_memory", "nixl", "cuda_ipc on a device", "zmq_tcp on a device"],
)
def _transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, _, where = request.param.partition(" ")
    if transport == "nixl" and not nixl_is_available():
        pytest.skip("nixl cannot run here: pip install 'baton[nixl]'")
    monkeypatch.setattr(Worker, "transport", transport)
    monkeypatch.setattr(Worker, "host", FakeHost() if where else None)


@pytest.fixture
def prefill() -> Iterator[Worker]:
    worker = Worker("p0", "p-incarnation-1")
    yield worker
    worker.stop()


@pytest.fixture
def decode() -> Iterator[Worker]:
    worker = Worker("d0", "d-incarnation-1")
    yield worker
    worker.stop()


def start(prefill: Worker, decode: Worker, request_id: str = "r") -> None:
    """A prompt of 40 tokens: two full blocks, and a tail. It goes to blocks 10, 11, 12 of the decode worker."""
    to_prefill, to_decode = both_ends(prefill.ref, decode.ref, request_id)
    prefill.command(BeginSend(request_id, to_prefill, 40))
    decode.command(BeginLoad(request_id, to_decode, 40), LoadBlocks(request_id, 0, (10, 11, 12)))


def test_blocks_arrive_progressively_and_both_ends_are_notified(prefill: Worker, decode: Worker) -> None:
    start(prefill, decode)
    prefill.command(after=(SendBlocks("r", 0, (1,)),))
    prefill.command(after=(SendBlocks("r", 1, (2,)),))
    prefill.command(FinishSend("r", 3, (3,), TOKEN))
    received = decode.until(lambda news: news.finished_recving)
    assert (received.request_id, received.first_token, received.num_bytes) == ("r", TOKEN, 3 * BLOCK_BYTES)
    assert received.transport == Worker.transport
    assert (decode.pool[10:13] == prefill.pool[1:4]).all()
    assert prefill.until(lambda news: news.finished_sending) == "r"
    # More if the machine is so slow that pieces are sent again.
    assert prefill.connector.counters()["kv_bytes_sent"] >= 3 * BLOCK_BYTES


def test_two_workers_hand_over_to_each_other_at_once(prefill: Worker, decode: Worker) -> None:
    """Each hands over its blocks 1, 2, 3 sixteen times, and receives each prompt in other blocks."""
    pairs, places = [(prefill, decode), (decode, prefill)], range(10, 58, 3)
    for first in places:
        for producer, consumer in pairs:
            name = f"{producer.ref.name} {first}"
            to_producer, to_consumer = both_ends(producer.ref, consumer.ref, name)
            producer.command(BeginSend(name, to_producer, 40), after=(SendBlocks(name, 0, (1, 2)),))
            consumer.command(
                BeginLoad(name, to_consumer, 40), LoadBlocks(name, 0, (first, first + 1, first + 2))
            )
            producer.command(FinishSend(name, 3, (3,), TOKEN))
    for producer, consumer in pairs:
        news = consumer.gather(lambda news: len(news.finished_recving) == len(news.finished_sending) == 16)
        assert sorted(load.request_id for load in news.finished_recving) == [
            f"{producer.ref.name} {first}" for first in places
        ]
        assert sorted(news.finished_sending) == [f"{consumer.ref.name} {first}" for first in places]
        for first in places:
            assert (consumer.pool[first : first + 3] == producer.pool[1:4]).all()


@pytest.mark.parametrize("bind_host", BIND_HOSTS)
def test_workers_hand_over_wherever_they_listen(bind_host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "bind_host", bind_host)
    prefill, decode = Worker("p0", "p-incarnation-1"), Worker("d0", "d-incarnation-1")
    try:
        start(prefill, decode)
        prefill.command(after=(SendBlocks("r", 0, (1, 2)),))
        prefill.command(FinishSend("r", 3, (3,), TOKEN))
        decode.until(lambda news: news.finished_recving)
        assert (decode.pool[10:13] == prefill.pool[1:4]).all()
    finally:
        prefill.stop()
        decode.stop()


def test_c43_unlike_workers_refuse_before_a_byte_moves_and_name_the_field(
    prefill: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "fingerprint", replace(FINGERPRINT, dtype="float16"))
    decode = Worker("d0", "d-incarnation-1")
    try:
        start(prefill, decode)
        prefill.command(after=(SendBlocks("r", 0, (1, 2)),))
        failed = decode.until(lambda news: news.failed_recving)
        assert "dtype: float32 != float16" in failed.reason
        assert prefill.connector.counters()["kv_bytes_sent"] == 0
        assert decode.connector.counters()["kv_bytes_received"] == 0
    finally:
        decode.stop()


def test_c41_blocks_taken_back_are_never_sent_with_what_others_wrote_into_them(
    prefill: Worker, decode: Worker
) -> None:
    to_prefill, to_decode = both_ends(prefill.ref, decode.ref)
    truth = prefill.pool[1:4].copy()
    prefill.command(BeginSend("r", to_prefill, 40), after=(SendBlocks("r", 0, (1, 2)),))
    prefill.command(WithdrawBlocks("r"))
    prefill.pool[5:8] = truth
    prefill.pool[1:3] = 99  # another request's
    decode.command(BeginLoad("r", to_decode, 40), LoadBlocks("r", 0, (10, 11, 12)))
    prefill.command(after=(SendBlocks("r", 0, (5, 6)),))
    prefill.command(FinishSend("r", 3, (7,), TOKEN))
    decode.until(lambda news: news.finished_recving)
    assert (decode.pool[10:13] == truth).all()


def test_c32_an_abort_while_loading_is_quiet_and_frees_the_other_end(prefill: Worker, decode: Worker) -> None:
    start(prefill, decode)
    prefill.command(after=(SendBlocks("r", 0, (1, 2)),))
    decode.command(AbortLoad("r", "the client left"))
    assert decode.until(lambda news: news.quiesced) == "r"
    prefill.command(FinishSend("r", 3, (3,), TOKEN))
    assert prefill.until(lambda news: news.finished_sending) == "r"


def test_c33_an_abort_that_crosses_the_arrival_does_no_harm(prefill: Worker, decode: Worker) -> None:
    for number in range(5):
        name = f"r{number}"
        start(prefill, decode, name)
        prefill.command(after=(SendBlocks(name, 0, (1, 2)),))
        prefill.command(FinishSend(name, 3, (3,), TOKEN))
        decode.until(lambda news: news.finished_recving)
        decode.command(AbortLoad(name, "the client left"))
        prefill.until(lambda news: news.finished_sending)


@pytest.mark.parametrize("is_late", [False, True])
def test_c40_a_request_that_ended_with_its_prefill_is_not_waited_for(
    prefill: Worker, decode: Worker, is_late: bool
) -> None:
    if not is_late:
        start(prefill, decode)
        prefill.command(AbortSend("r", "the request ended", True, False))
    else:
        to_prefill, to_decode = both_ends(prefill.ref, decode.ref)
        prefill.command(BeginSend("r", to_prefill, 40), AbortSend("r", "the request ended", True, False))
        decode.command(BeginLoad("r", to_decode, 40), LoadBlocks("r", 0, (10, 11, 12)))
    failed = decode.until(lambda news: news.failed_recving)
    assert failed.is_unneeded


@pytest.mark.parametrize("dies", [True, False])
def test_c42_a_lost_prefill_worker_is_noticed(
    prefill: Worker,
    decode: Worker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dies: bool,
) -> None:
    start(prefill, decode)
    prefill.command(after=(SendBlocks("r", 0, (1,)),))
    deadline = time.monotonic() + 60.0
    while not decode.connector.counters()["kv_bytes_received"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if dies:
        prefill.stop()
    else:
        monkeypatch.setattr(prefill.connector._endpoint, "on_arrival", lambda _: None)
    failed = decode.until(lambda news: news.failed_recving)
    assert (failed.num_valid_blocks, failed.is_unneeded) == (1, False)
    assert ("no longer accepts connections" if dies else "was silent for") in failed.reason
    assert "r" in [vars(record).get("engine_request_id") for record in caplog.records]


def test_c39_a_decode_worker_that_dies_frees_the_lease(prefill: Worker) -> None:
    decode = Worker("d0", "d-incarnation-1")
    start(prefill, decode)
    decode.stop()
    prefill.command(after=(SendBlocks("r", 0, (1, 2)),))
    prefill.command(FinishSend("r", 3, (3,), TOKEN))
    assert prefill.until(lambda news: news.finished_sending) == "r"
    assert prefill.connector.counters()["kv_lease_expiries"] == 1


def test_c44_another_incarnation_at_the_same_address_refuses_the_former_ones_transfers(
    decode: Worker,
) -> None:
    first = Worker("p0", "p-incarnation-1")
    to_prefill, to_decode = both_ends(first.ref, decode.ref)
    first.command(BeginSend("r", to_prefill, 40))
    address = first.ref.kv_addresses[0]
    first.stop()
    second = rebound("p0", "p-incarnation-2", address)
    decode.command(BeginLoad("r", to_decode, 40), LoadBlocks("r", 0, (10, 11, 12)))
    failed = decode.until(lambda news: news.failed_recving)
    assert "restarted" in failed.reason
    second.stop()


def rebound(name: str, incarnation: str, address: str) -> Worker:
    """A worker whose KV plane listens at a given address, as if the system had picked that port again."""
    worker = Worker(name, incarnation)
    router = worker.connector._channel._router
    router.bind(address)
    return worker


def test_garbage_on_the_kv_plane_is_counted_and_dropped(prefill: Worker, decode: Worker) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        secure_client(stranger, KEYS.kv)
        stranger.connect(prefill.ref.kv_addresses[0])
        stranger.send(b"")
        stranger.send(b"\xff" * 100)
        stranger.send_multipart([b"many", b"frames", b"at once"])
        deadline = time.monotonic() + 60.0
        while prefill.connector.counters()["kv_bad_messages"] < 3:
            assert time.monotonic() < deadline
    start(prefill, decode)
    prefill.command(after=(SendBlocks("r", 0, (1, 2)),))
    prefill.command(FinishSend("r", 3, (3,), TOKEN))
    decode.until(lambda news: news.finished_recving)


def test_stopping_ends_the_threads_and_closes_the_port() -> None:
    earlier = {*threading.enumerate()}
    worker = Worker("p0", "p-incarnation-1")
    threads = {*threading.enumerate()} - earlier
    assert threads
    worker.stop()
    assert not any(thread.is_alive() for thread in threads)


def test_a_connector_that_was_never_started_closes_its_sockets_too() -> None:
    """A worker whose start fails stops its connector; it used to leave the sockets to the garbage collector."""
    earlier = sockets()
    worker = Worker("p0", "p-incarnation-1", is_started=False)
    opened = sockets() - earlier
    assert opened
    worker.stop()
    worker.stop()
    assert not opened & sockets()


def sockets() -> set[str]:
    """Open sockets of this process by their inodes, which no later socket has.

    Descriptors would not do, since other tests' sockets may be closed at any time.
    """
    files = (file for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
    return {name for file in files if (name := os.readlink(file)).startswith("socket:")}


def test_stopping_leaves_no_thread_of_a_transport_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MIN_BYTES_FOR_TWO", 1)  # so small a prompt is copied by two threads
    earlier = {*threading.enumerate()}
    prefill, decode = Worker("p0", "p-incarnation-1"), Worker("d0", "d-incarnation-1")
    start(prefill, decode)
    prefill.command(after=(SendBlocks("r", 0, (1, 2)),))
    prefill.command(FinishSend("r", 3, (3,), TOKEN))
    decode.until(lambda news: news.finished_recving)
    prefill.stop()
    decode.stop()
    assert {*threading.enumerate()} <= earlier


def test_c54_a_transfer_thread_that_waits_for_messages_has_nothing_to_do(prefill: Worker) -> None:
    """Otherwise, a worker without hand-overs would seem to hang."""
    deadline = time.monotonic() + 10.0
    while prefill.connector.progress.piece is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    assert prefill.connector.progress.piece is None
