"""Both ends of a child process's control plane over real pipes: what is asked, what is answered, and by whom."""

import asyncio
import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.errors import ClusterError, FleetError
from baton.kv import TransferRole, WorkerRef
from baton.worker import (
    KVBlockCounts,
    KVPeerCounts,
    RequestCounts,
    WorkerLoad,
    WorkerRole,
    WorkerState,
    WorkerStatus,
)
from worker.control_channel import MAX_LINE_BYTES, MAX_QUESTIONS, ControlChannel, ControlServer

STATUS = WorkerStatus(
    WorkerRef("w0", "life", ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), 16),
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
        assert self.may_drain.wait(10)
        return timeout_s > 1.0

    def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        self.asked.append(("set_role", role, timeout_s))
        if role is WorkerRole.PREFILL:
            raise FleetError("worker w0: 3 blocks are leased")

    def status(self) -> WorkerStatus:
        if self.asked and self.asked[-1] == ("set_role", WorkerRole.DECODE, 99.0):
            raise ZeroDivisionError("a defect")
        return STATUS


class Pipes:
    """A worker behind two pipes, and the channel to it."""

    def __init__(self) -> None:
        self.worker = FakeWorker()
        questions, answers = os.pipe(), os.pipe()
        self._to_parent = os.fdopen(answers[1], "w")
        server = ControlServer(self.worker, self._write)
        self._thread = threading.Thread(target=self._serve, args=(server, questions[0]), daemon=True)
        self._thread.start()
        self.channel = ControlChannel("w0", os.fdopen(questions[1], "w"), os.fdopen(answers[0]))

    def _write(self, line: str) -> None:
        with contextlib.suppress(ValueError):  # it is closed: the process has ended
            print(line, file=self._to_parent, flush=True)

    def _serve(self, server: ControlServer, questions: int) -> None:
        while data := os.read(questions, 7):  # lines come in pieces
            server.take(data)
        self._to_parent.close()
        os.close(questions)

    def end(self) -> None:
        self.channel.close()
        self._thread.join(10)
        self.channel._reader.join(10)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    pipes = Pipes()
    yield pipes
    pipes.worker.may_drain.set()
    pipes.end()


def test_a_status_comes_as_it_was_said(pipes: Pipes) -> None:
    assert asyncio.run(pipes.channel.status()) == STATUS


def test_a_long_question_keeps_nobody_waiting(pipes: Pipes) -> None:
    async def scenario() -> None:
        drains = [asyncio.create_task(pipes.channel.drain(seconds)) for seconds in (5.0, 0.5)]
        await pipes.channel.set_role(WorkerRole.DECODE, 2.0)
        assert await pipes.channel.status() == STATUS
        assert not any(drain.done() for drain in drains)
        pipes.worker.may_drain.set()
        assert await asyncio.gather(*drains) == [True, False]

    asyncio.run(scenario())
    assert sorted(pipes.worker.asked, key=str) == [
        ("drain", 0.5),
        ("drain", 5.0),
        ("set_role", WorkerRole.DECODE, 2.0),
    ]


def test_what_the_worker_raises_is_raised_here(pipes: Pipes) -> None:
    with pytest.raises(FleetError, match="worker w0: 3 blocks are leased"):
        asyncio.run(pipes.channel.set_role(WorkerRole.PREFILL, 2.0))
    asyncio.run(pipes.channel.set_role(WorkerRole.DECODE, 99.0))
    with pytest.raises(ClusterError, match="a defect"):
        asyncio.run(pipes.channel.status())


def test_the_end_of_a_worker_ends_every_call(pipes: Pipes) -> None:
    async def scenario() -> None:
        drain = asyncio.create_task(pipes.channel.drain(5.0))
        while not pipes.worker.asked:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(pipes.end)
        for call in (drain, pipes.channel.status()):
            with pytest.raises(ClusterError, match="its process has ended"):
                await asyncio.wait_for(call, 10)

    asyncio.run(scenario())


def test_who_waits_no_longer_does_no_harm(pipes: Pipes) -> None:
    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pipes.channel.drain(5.0), 0.05)
        pipes.worker.may_drain.set()
        assert await pipes.channel.status() == STATUS

    asyncio.run(scenario())


def answers_to(data: bytes, count: int = 1, worker: FakeWorker | None = None) -> list[dict[str, Any]]:
    lines: queue.Queue[str] = queue.Queue()
    put: Callable[[str], None] = lines.put
    ControlServer(worker or FakeWorker(), put).take(data)
    return [json.loads(lines.get(timeout=10)) for _ in range(count)]


@pytest.mark.parametrize(
    ("line", "number", "complaint"),
    [
        (b"what?", None, "Invalid JSON"),
        (b"[]", None, "not a question"),
        (b'{"do":"dance","id":7}', 7, "'dance'"),
        (b'{"do":"drain","id":7}', 7, "drain.timeout_s: Field required"),
        (b'{"do":"drain","id":7,"timeout_s":-1}', 7, "greater than or equal to 0"),
        (b'{"do":"drain","id":7,"timeout_s":"1"}', 7, "valid number"),
        (b'{"do":"set_role","id":7,"timeout_s":1,"role":"juggler"}', 7, "'prefill' or 'decode'"),
        (b'{"do":"status","id":7,"why":"so"}', 7, "status.why"),
        (b'{"do":"status","id":"7"}', None, "status.id"),
    ],
)
def test_what_is_no_question_is_answered_too_and_the_next_one_is_served(
    line: bytes, number: int | None, complaint: str
) -> None:
    refusal, answer = answers_to(line + b'\n\n{"do":"status","id":8}\n', 2)
    assert (refusal["answer"], refusal["id"], refusal["kind"]) == ("failed", number, "WireError")
    assert complaint in refusal["message"]
    assert (answer["answer"], answer["id"]) == ("status", 8)


def test_a_line_without_end_is_not_kept() -> None:
    (refusal,) = answers_to(b"x" * (MAX_LINE_BYTES + 1))
    assert refusal["message"] == f"a line of more than {MAX_LINE_BYTES} bytes"


def test_too_many_questions_at_a_time_are_refused() -> None:
    worker = FakeWorker()
    drain = b'{"do":"drain","id":1,"timeout_s":1}\n'
    (refusal,) = answers_to(drain * (MAX_QUESTIONS + 1), worker=worker)
    assert refusal["message"] == f"{MAX_QUESTIONS} questions wait for an answer already"
    worker.may_drain.set()
