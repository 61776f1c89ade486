"""Pools of processes that end are closed at once: while one is open, no other process can use its memory."""

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from baton.clock import VirtualClock
from kv_transfer.consumer.remote_pools import IDLE_S, ProcessExits, RemotePools
from kv_transfer.protocol.transports import CUDA_IPC, SHARED_MEMORY, ZMQ_TCP
from kv_transfer.transport.base import TransportError
from kv_transfer.transport.shared_memory import SharedMemory, SharedMemoryReader
from tests.factories.endpoints import Fabric, Worker
from tests.factories.hand_overs import begin, prefill_at_once
from tests.factories.pool_readers import Owner, any_pieces, make_runs

NUM_TOKENS = 64


class Mortal:
    """A process that does nothing until it is killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "300"])
        self.pid = self._process.pid

    def kill(self) -> None:
        """The process has ended when this returns."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)


@pytest.fixture
def mortals() -> Iterator[list[Mortal]]:
    """Two of them."""
    mortals = [Mortal(), Mortal()]
    yield mortals
    for mortal in mortals:
        mortal.kill()


@contextmanager
def pids(mortals: list[Mortal]) -> Iterator[None]:
    """Descriptions of pools name these processes, one each."""
    with patch("os.getpid", side_effect=[mortal.pid for mortal in mortals]):
        yield


def two_workers(mortal: Mortal, *other_transports: str) -> tuple[Fabric, Worker, Worker]:
    """A prefill worker whose pool belongs to `mortal`, and a decode worker that can map it."""
    fabric = Fabric(CUDA_IPC, *other_transports)
    with pids([mortal]):
        prefill = fabric.add("p0")
    return fabric, prefill, fabric.add("d0")


def hand_over(fabric: Fabric, prefill: Worker, decode: Worker, request_id: str) -> None:
    """The decode worker has asked for a prompt, and the prefill worker has computed it."""
    begin(fabric, prefill, decode, NUM_TOKENS, request_id)
    prefill_at_once(prefill, NUM_TOKENS, request_id)
    fabric.deliver()


def test_a_dead_producers_device_memory_is_unmapped_at_once(mortals: list[Mortal]) -> None:
    fabric, prefill, decode = two_workers(mortals[0])
    hand_over(fabric, prefill, decode, "r")
    fabric.advance(1.0)
    assert len(fabric.drivers[1].opened) == 1, "it is open for the next hand-over"
    mortals[0].kill()
    fabric.advance(0.0)
    assert fabric.drivers[1].opened == []
    fabric.assert_at_rest()


def test_reads_under_way_end_before_their_pool_is_unmapped(mortals: list[Mortal]) -> None:
    fabric, prefill, decode = two_workers(mortals[0])
    driver = fabric.drivers[1]
    driver.is_slow = True
    hand_over(fabric, prefill, decode, "r")
    fabric.advance(0.01)
    assert driver.queued, "nothing is read"
    mortals[0].kill()
    fabric.advance(0.01)
    assert driver.queued
    assert len(driver.opened) == 1, "a copy was under way"
    driver.run()
    fabric.advance(0.01)
    assert driver.opened == []


def test_only_the_dead_ranks_pool_is_closed(mortals: list[Mortal]) -> None:
    fabric = Fabric(CUDA_IPC)
    with pids(mortals):
        prefill = fabric.add("p0", num_ranks=2)
    decode = fabric.add("d0")
    hand_over(fabric, prefill, decode, "r")
    fabric.advance(1.0)
    driver = fabric.drivers[2]
    first, second = driver.opened
    mortals[0].kill()
    fabric.advance(0.0)
    assert driver.opened == [second] != [first]
    mortals[1].kill()
    fabric.advance(0.0)
    assert driver.opened == []


def test_what_the_dead_had_announced_is_not_read_and_harms_nothing(mortals: list[Mortal]) -> None:
    """Pieces may be unread in a socket when their sender dies. Here it still sends, as TCP would deliver them."""
    fabric, prefill, decode = two_workers(mortals[0], ZMQ_TCP)
    begin(fabric, prefill, decode, NUM_TOKENS)
    assert len(fabric.drivers[1].opened) == 1
    mortals[0].kill()
    fabric.advance(0.0)
    prefill_at_once(prefill, NUM_TOKENS)
    fabric.advance(1.0)
    [received] = decode.output().finished_recving
    assert received.transport == ZMQ_TCP
    assert decode.holds(NUM_TOKENS)
    fabric.assert_at_rest()


def test_a_producer_that_is_silent_but_alive_keeps_its_pool_open(mortals: list[Mortal]) -> None:
    """A stopped process keeps its memory; when it continues, no pool has to be opened again."""
    fabric, prefill, decode = two_workers(mortals[0])
    hand_over(fabric, prefill, decode, "r")
    fabric.advance(1.0)
    decode.output()
    mortals[0].stop()
    fabric.advance(IDLE_S / 2)
    assert len(fabric.drivers[1].opened) == 1
    hand_over(fabric, prefill, decode, "again")
    fabric.advance(1.0)
    assert [load.request_id for load in decode.output().finished_recving] == ["again"]


def test_without_reports_of_ends_a_pool_is_closed_when_it_is_idle(mortals: list[Mortal]) -> None:
    fabric, prefill, decode = two_workers(mortals[0])
    with patch("os.pidfd_open", side_effect=PermissionError):
        hand_over(fabric, prefill, decode, "r")
    mortals[0].kill()
    fabric.advance(IDLE_S / 2)
    assert len(fabric.drivers[1].opened) == 1
    fabric.advance(IDLE_S)
    assert fabric.drivers[1].opened == []


def test_the_process_of_a_closed_pool_is_watched_no_longer(mortals: list[Mortal]) -> None:
    fabric, prefill, decode = two_workers(mortals[0])
    earlier = pidfds()
    hand_over(fabric, prefill, decode, "r")
    assert len(pidfds() - earlier) == 1
    fabric.advance(IDLE_S * 2)
    assert fabric.drivers[1].opened == []
    assert pidfds() == earlier


def test_a_pool_whose_process_ended_while_it_was_opened_is_out_of_reach(mortals: list[Mortal]) -> None:
    fabric = Fabric(CUDA_IPC, ZMQ_TCP)
    with pids(mortals[:1]):
        prefill = fabric.add("p0")
    mortals[0].kill()
    decode = fabric.add("d0")
    hand_over(fabric, prefill, decode, "r")
    fabric.advance(1.0)
    assert fabric.drivers[1].opened == []
    assert decode.connector.counters()["kv_unreachable_pools"] == 1
    assert [load.transport for load in decode.output().finished_recving] == [ZMQ_TCP]


def mapped() -> set[int]:
    """Inodes of the pools of others that this process maps."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return {int(line[4]) for line in lines if line[1] == "r--s" and "/memfd:baton-kv" in line[5]}


def test_shared_memory_of_the_dead_is_unmapped_at_once() -> None:
    memory = SharedMemory(4096)
    pools = RemotePools({SHARED_MEMORY: SharedMemoryReader(memory.array, memory)}, VirtualClock())
    key, earlier = ("p0-incarnation", 0, SHARED_MEMORY), mapped()  # other tests' mappings may go at any time
    with Owner(SHARED_MEMORY, 4096, seed=1) as owner:
        pools.open(key, owner.description)
        [pool] = mapped() - earlier
        pools.close_orphaned()
        assert pool in mapped()
        pools.read(key, any_pieces(), make_runs((0, 0, 1)))
        owner.kill()
        pools.close_orphaned()
        assert pool in mapped(), "something is read from it"
        assert not select.select([pools], [], [], 0.0)[0], "a sleep on it would end at once, again and again"
        assert len([*pools.finished()]) == 1
        pools.close_orphaned()
        assert pool not in mapped()
    with pytest.raises(TransportError, match="not open"):
        pools.read(key, any_pieces(), make_runs((0, 0, 1)))
    assert pools.next_deadline() is None
    pools.close()


def test_a_pool_that_waits_for_its_reads_is_opened_anew_and_not_read_on(mortals: list[Mortal]) -> None:
    """Another hand-over opens the pool, with a description that is older than the end of its process."""
    memory = SharedMemory(4096)
    pools = RemotePools({SHARED_MEMORY: SharedMemoryReader(memory.array, memory)}, VirtualClock())
    key = ("p0-incarnation", 0, SHARED_MEMORY)
    with Owner(SHARED_MEMORY, 4096, seed=1) as owner:
        pools.open(key, owner.description)
        pools.read(key, any_pieces(), make_runs((0, 0, 1)))
        owner.kill()
        pools.close_orphaned()
        with pytest.raises(TransportError):
            pools.open(key, owner.description)
    assert len([*pools.finished()]) == 1
    assert pools.next_deadline() is None
    pools.close()


def test_every_end_is_reported_once_and_nothing_else(mortals: list[Mortal]) -> None:
    exits = ProcessExits()
    first, second = (exits.watch(mortal.pid) for mortal in mortals)
    assert first is not None
    assert second is not None
    mortals[1].stop()
    assert exits.take_ended() == []
    mortals[0].kill()
    assert select.select([exits], [], [], 5.0)[0]
    assert exits.take_ended() == [first]
    assert exits.take_ended() == []
    assert not select.select([exits], [], [], 0.0)[0]
    mortals[1].kill()
    assert exits.take_ended() == [second]
    exits.drop(second)
    exits.drop(first)
    exits.close()


@pytest.mark.parametrize("pid", [-1, 0, 2**40])
def test_an_impossible_process_id_cannot_be_watched(pid: int) -> None:
    exits = ProcessExits()
    assert exits.watch(pid) is None
    exits.close()


def test_a_watch_that_is_dropped_leaves_nothing_open(mortals: list[Mortal]) -> None:
    with ExitStack() as stack:
        exits = ProcessExits()
        stack.callback(exits.close)
        earlier = pidfds()
        watches = [exits.watch(mortals[0].pid) for _ in range(3)]
        opened = pidfds() - earlier
        assert len(opened) == 3
        mortals[0].kill()
        exits.take_ended()
        for watch in watches:
            assert watch is not None
            exits.drop(watch)
        assert not opened & pidfds()


def pidfds() -> set[Path]:
    """The descriptors by which this process waits for the ends of others."""
    files = (file for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
    return {file for file in files if os.readlink(file) == "anon_inode:[pidfd]"}
