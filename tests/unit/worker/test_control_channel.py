"""Both ends of a worker's control channel over real pipes, with the calls that a worker answers."""

import asyncio
import binascii
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import Mock

import msgpack
import pytest

from baton.errors import ClusterError, FleetError
from baton.kv import TransferRole, WorkerRef
from baton.messages.control import (
    CONTROL_PLANE_VERSION,
    ControlRequest,
    Done,
    Drain,
    Drained,
    FlushCache,
    SetRole,
    WaitStatus,
)
from baton.messages.control_codec import FailureFrame, Reply, read_reply, write_call
from baton.worker import (
    KVBlockCounts,
    KVPeerCounts,
    RequestCounts,
    WorkerLoad,
    WorkerRole,
    WorkerState,
    WorkerStatus,
)
from worker.control_calls import WorkerControl
from worker.control_channel import CODEC, MAX_CALLS, MAX_LINE_BYTES, StdioControlClient, StdioControlServer

STATUS = WorkerStatus(
    WorkerRef("w0", "incarnation", ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), 16),
    WorkerRole.DECODE,
    WorkerState.DRAINING,
    KVBlockCounts(9, 5, 1, 2),
    RequestCounts(1, 2, 3),
    {"preemptions": 4},
    (KVPeerCounts(TransferRole.CONSUMER, "w1", "zmq_tcp", 1, 2, 3, 4, 0.5, 0.25, 0.125),),
    "nothing yet",
    WorkerLoad(7, 0.5, 100.0, 0.02),
)


class FakeWorker:
    """Drains when it may, cannot become a prefill worker, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.may_drain = threading.Event()

    def drain(self, timeout_s: float) -> bool:
        self.asked.append(("drain", timeout_s))
        assert self.may_drain.wait(60)
        return timeout_s > 1.0

    def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        self.asked.append(("set_role", role, timeout_s))
        if role is WorkerRole.PREFILL:
            raise FleetError("worker w0: 3 blocks are leased")

    def flush_cache(self, timeout_s: float, *, force: bool) -> None:
        self.asked.append(("flush_cache", timeout_s, force))
        if not force:
            raise FleetError("blocks are in use")

    def when_ended(self, callback: Callable[[], None]) -> None:
        self.end = callback

    def status(self) -> WorkerStatus:
        if self.asked and self.asked[-1] == ("set_role", WorkerRole.DECODE, 99.0):
            raise ZeroDivisionError("a defect")
        return STATUS


def server_of(worker: FakeWorker, write_line: Callable[[str], None]) -> StdioControlServer:
    return StdioControlServer(WorkerControl(cast("Any", worker)).call, write_line)


class Pipes:
    """A worker behind two pipes, and a client of it."""

    def __init__(self) -> None:
        self.worker = FakeWorker()
        questions, answers = os.pipe(), os.pipe()
        self._to_parent = os.fdopen(answers[1], "w")
        server = server_of(self.worker, self._write)
        self._thread = threading.Thread(target=self._serve, args=(server, questions[0]), daemon=True)
        self._thread.start()
        self._stdin = os.fdopen(questions[1], "w")
        self.client = StdioControlClient("w0", self._stdin, os.fdopen(answers[0]))

    def _write(self, line: str) -> None:
        with contextlib.suppress(ValueError):  # it is closed: the process has ended
            print(line, file=self._to_parent, flush=True)

    def _serve(self, server: StdioControlServer, questions: int) -> None:
        while data := os.read(questions, 7):  # lines come in pieces
            server.receive(data)
        server.close()
        self._to_parent.close()
        os.close(questions)

    def end(self) -> None:
        with contextlib.suppress(OSError):  # what was not written before it ended
            self._stdin.close()
        self._thread.join(60)
        self.client._reader.join(60)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    pipes = Pipes()
    yield pipes
    pipes.worker.may_drain.set()
    pipes.end()


def test_a_status_comes_as_it_was_said(pipes: Pipes) -> None:
    assert asyncio.run(pipes.client.call(WaitStatus(0.0))) == STATUS


def test_a_status_comes_at_once_when_the_worker_ends(pipes: Pipes) -> None:
    async def scenario() -> None:
        waiting = asyncio.create_task(pipes.client.call(WaitStatus(1000.0)))
        for _ in range(9):
            assert await pipes.client.call(WaitStatus(0.0)) == STATUS
        assert not waiting.done()
        pipes.worker.end()
        assert await asyncio.wait_for(waiting, 10) == STATUS

    asyncio.run(scenario())


@pytest.fixture(params=["threads", "no thread"])
def system(request: pytest.FixtureRequest, pipes: Pipes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `no thread`, no thread can start. At a machine's limit of threads, every worker that does not
    answer would be ended."""
    if request.param == "no thread":
        start = Mock(side_effect=RuntimeError("can't start new thread"))
        monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("system")
def test_a_long_call_delays_no_other(pipes: Pipes) -> None:
    async def scenario() -> None:
        drains = [asyncio.create_task(pipes.client.call(Drain(seconds))) for seconds in (5.0, 0.5)]
        await pipes.client.call(SetRole(WorkerRole.DECODE, 2.0))
        assert await pipes.client.call(WaitStatus(0.0)) == STATUS
        assert not any(drain.done() for drain in drains)
        pipes.worker.may_drain.set()
        assert await asyncio.gather(*drains) == [Drained(is_clean=True), Drained(is_clean=False)]

    asyncio.run(scenario())
    assert sorted(pipes.worker.asked, key=str) == [
        ("drain", 0.5),
        ("drain", 5.0),
        ("set_role", WorkerRole.DECODE, 2.0),
    ]


def test_what_the_worker_raises_is_raised_here(pipes: Pipes) -> None:
    with pytest.raises(FleetError, match="worker w0: 3 blocks are leased"):
        asyncio.run(pipes.client.call(SetRole(WorkerRole.PREFILL, 2.0)))
    asyncio.run(pipes.client.call(SetRole(WorkerRole.DECODE, 99.0)))
    with pytest.raises(ClusterError, match="a defect"):
        asyncio.run(pipes.client.call(WaitStatus(0.0)))


def test_c63_a_flush_reaches_the_worker_and_its_refusal_the_caller(pipes: Pipes) -> None:
    assert asyncio.run(pipes.client.call(FlushCache(force=True, timeout_s=2.0))) == Done()
    with pytest.raises(FleetError, match="blocks are in use"):
        asyncio.run(pipes.client.call(FlushCache(force=False, timeout_s=3.0)))
    assert pipes.worker.asked == [("flush_cache", 2.0, True), ("flush_cache", 3.0, False)]


def test_the_end_of_a_worker_ends_every_call(pipes: Pipes) -> None:
    async def scenario() -> None:
        drain = asyncio.create_task(pipes.client.call(Drain(5.0)))
        while not pipes.worker.asked:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(pipes.end)
        for call in (drain, pipes.client.call(WaitStatus(0.0))):
            with pytest.raises(ClusterError, match="its process has ended"):
                await asyncio.wait_for(call, 60)

    asyncio.run(scenario())


def test_who_waits_no_longer_does_no_harm(pipes: Pipes) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pipes.client.call(Drain(5.0)), 0.05)
        pipes.worker.may_drain.set()
        assert await pipes.client.call(WaitStatus(0.0)) == STATUS

    asyncio.run(scenario())


def line(number: int, request: ControlRequest[Any]) -> bytes:
    return binascii.b2a_base64(write_call(CODEC.frame(number, 0.0, request)))


def raw(*message: Any) -> bytes:
    """A line with a call, valid or not, that contains this message."""
    frame = msgpack.packb(["Call", CONTROL_PLANE_VERSION, 7, 0.0, msgpack.packb(list(message))])
    return binascii.b2a_base64(frame, newline=False)


def replies_to(data: bytes, count: int = 1, worker: FakeWorker | None = None) -> list[Reply]:
    lines: queue.Queue[str] = queue.Queue()
    put: Callable[[str], None] = lines.put
    with contextlib.closing(server_of(worker or FakeWorker(), put)) as server:
        server.receive(data)
        return [read_reply(binascii.a2b_base64(lines.get(timeout=60))) for _ in range(count)]


def failure_in(reply: Reply) -> tuple[int, str, str]:
    assert isinstance(reply, FailureFrame)
    return reply.number, reply.failure.kind, reply.failure.reason


@pytest.mark.parametrize(
    ("line_", "number", "complaint"),
    [
        (b"what?", 0, "not a call: not base64"),
        (b'{"do":"drain","id":7}', 0, "not base64"),
        (binascii.b2a_base64(b"\xc1", newline=False), 0, "not msgpack"),
        (raw("Dance"), 7, "unknown message kind 'Dance'"),
        (raw("Drain"), 7, "Drain: expected 1 fields"),
        (raw("Drain", -1.0), 7, "timeout_s must be zero or more, got -1"),
        (raw("Drain", "1"), 7, "Drain.timeout_s: expected float, got '1'"),
        (raw("SetRole", "juggler", 1.0), 7, "expected one of ['prefill', 'decode']"),
        (raw("FlushCache", True, -1.0), 7, "timeout_s must be zero or more, got -1"),
        (raw("WaitStatus", 0.0, "so"), 7, "WaitStatus: expected 1 fields"),
        (binascii.b2a_base64(msgpack.packb(["Call", 1, 7, 1.0, b""]), newline=False), 0, "version 1 of"),
    ],
)
def test_what_is_no_call_is_answered_too_and_the_next_one_is_served(
    line_: bytes, number: int, complaint: str
) -> None:
    first, second = replies_to(line_ + b"\n\n" + line(8, WaitStatus(0.0)), 2)
    if second.number != 8:  # each call has a thread of its own
        first, second = second, first
    assert failure_in(first)[:2] == (number, "WireError")
    assert complaint in failure_in(first)[2]
    assert CODEC.value_in(second, WaitStatus(0.0)) == STATUS


def test_a_line_without_end_is_not_kept() -> None:
    (refusal,) = replies_to(b"x" * (MAX_LINE_BYTES + 1))
    assert failure_in(refusal)[2] == f"a call is longer than {MAX_LINE_BYTES} bytes"


def test_too_many_calls_at_a_time_are_refused() -> None:
    worker = FakeWorker()
    (refusal,) = replies_to(b"".join(line(n, Drain(1.0)) for n in range(MAX_CALLS + 1)), worker=worker)
    assert failure_in(refusal) == (MAX_CALLS, "FleetError", f"{MAX_CALLS} calls are under way already")
    worker.may_drain.set()


def test_a_client_whose_stream_was_closed_by_the_owner_of_the_process_says_that_the_worker_is_gone() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as stdin:
        stdout = os.fdopen(read_end)
        stdout.close()  # before the reader begins, as on a busy machine
        client = StdioControlClient("w0", stdin, stdout)
        client._reader.join(60)
        assert client.is_gone
        with pytest.raises(ClusterError, match="its process has ended"):
            asyncio.run(client.call(WaitStatus(0.0)))
