"""NixlReader: reads pools through NIXL, over RDMA or within a host; knows no block and no protocol.

It has two agents. Peers read our pool through one agent, which has a thread to answer their connections. We
read their pools through the other agent, which advances when we poll it. NIXL can end a stuck read only by
ending the read's agent. Then every current read ends with an error, and the next read begins with a new
agent. Peers that read our pool do not notice, since they read it through the other agent. While no new agent can be
created, no pool can be opened or read.

How reads end with NIXL 1.5.1 (UCX), as measured on one host:

    the owner's process is killed        an error at once, whenever it happens
    the owner's process is stopped       the bytes arrive; a first read does not end, as the owner does not answer
    NIXL is asked to cancel a read       it confirms at once, but the bytes may still be written later
    the reading agent is ended           nothing is written any more
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from baton.clock import Clock
from kv_transfer.transport.base import ReadDone, Runs, TransportError
from kv_transfer.transport.nixl_agent import NixlAgent, NixlError, NixlMemory, has_rdma, load_nixl
from kv_transfer.transport.nixl_description import Description, decode, encode, this_host

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_INTERVAL_S = 0.001

MAX_PEERS = 256
"""The most connections to keep. They are kept since pools are opened again, and since UCX leaks a socket at both ends
of each closed connection."""

CLOSE_WAIT_S = 0.1
"""How long `NixlPool.close` waits for the pool's reads before it ends the reading agent. Copying 1 GiB takes about this
time."""


class NixlPool:
    """A peer's pool. After the first failed read of the pool, nothing but `close` is possible."""

    owner_pid = None
    """None, since UCX decides which memory of a peer is mapped, and for how long. `close` does not unmap this
    memory."""

    def __init__(self, reader: "NixlReader", description: Description) -> None:
        self.description = description
        self.failure: str | None = None
        """Why the pool cannot be read any more; None if it can be read."""
        self._reader = reader

    def read(self, runs: Runs) -> int:
        """Begins to copy. On one host this copies at memory speed, without holding Python's lock."""
        return self._reader.begin(self, runs)

    def close(self) -> None:
        """Current reads have ended when this returns; they have CLOSE_WAIT_S to complete."""
        self._reader.forget(self)


@dataclass(frozen=True, slots=True)
class Read:
    handle: int
    pool: NixlPool


class NixlReader:
    """Reads pools through NIXL. A process has one reader, which belongs to the transfer thread.

    A peer may also be this process itself. ConfigError if NIXL is not installed.
    """

    name = "nixl"

    def __init__(
        self, memory: NixlMemory, clock: Clock, make_current: Callable[[], None] = lambda: None
    ) -> None:
        """TransportError if UCX cannot be set up here.

        If the memory is on a device, `make_current` makes the device's context current in the calling thread. UCX calls
        CUDA on every thread that advances reads. If the thread then has no context, UCX ends the process.
        """
        _, self._version = load_nixl()
        self._make_current = make_current
        make_current()
        self._memory = memory
        self._clock = clock
        self._host, self._has_rdma = this_host(), has_rdma()
        self._serving = _new_agent(memory, has_progress_thread=True)
        self._reading: NixlAgent | None = _new_agent(memory, has_progress_thread=False)
        """The agent that reads. None after a restart, until a read needs an agent again."""
        self._is_closed = False
        self._pools: set[NixlPool] = set()
        self._connected: dict[str, Description] = {}
        """Peers that the reading agent knows, by their agents' names, in order of connection."""
        self._reads: dict[int, Read] = {}
        self._done: list[ReadDone] = []
        self._numbers = count()

    @property
    def poll_interval_s(self) -> float | None:
        return POLL_INTERVAL_S

    def describe(self) -> bytes:
        """A description with which peers can open our pool. A peer that has it could also write our pool."""
        memory = self._memory
        description = Description(
            nixl_version=self._version,
            host=self._host,
            pid=os.getpid(),
            has_rdma=self._has_rdma,
            address=memory.address,
            nbytes=memory.nbytes,
            is_on_device=memory.kind == "VRAM",
            device=memory.device,
            agent=self._serving.name,
            metadata=self._serving.metadata(),
        )
        return encode(description)

    def open(self, description: bytes) -> NixlPool:
        """TransportError if that pool cannot be reached from here, or the description is invalid. Takes some 10 ms."""
        theirs = decode(description)
        if theirs.nixl_version != self._version:
            raise TransportError(
                f"the peer has NIXL {theirs.nixl_version}, but this worker has "
                f"{self._version}; install the same version"
            )
        theirs.check_reachable(self._host, self._has_rdma)
        if self._connected.get(theirs.agent, theirs) != theirs:
            raise TransportError(
                f"the peer describes its pool by agent {theirs.agent}, which is already known with another description"
            )
        pool = NixlPool(self, theirs)
        self._connect(pool)
        self._pools.add(pool)
        return pool

    def poll(self) -> list[ReadDone]:
        """Advances reads, and returns the reads that ended since the last call."""
        for number in list(self._reads):
            if number in self._reads:  # else it ended with its agent
                self._advance(number)
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Ends every read, and stops other workers from reading our pool."""
        if self._is_closed:
            return
        self._is_closed = True
        self._end_reading("this worker is stopping")
        self._pools.clear()
        self._serving.close()

    def begin(self, pool: NixlPool, runs: Runs) -> int:
        """See `NixlPool.read`."""
        theirs = pool.description
        runs.check_within(theirs.nbytes, self._memory.nbytes)
        if pool.failure is not None:
            raise TransportError(pool.failure)
        runs = runs.coalesced()
        number = next(self._numbers)
        if not runs.lengths.any():
            self._done.append(ReadDone(number, None))
            return number
        self._connect(pool)
        agent = self._agent()
        handle = _translated(
            lambda: agent.prepare(theirs.agent, theirs.memory, runs.remote, runs.local, runs.lengths)
        )
        self._reads[number] = Read(handle, pool)
        try:
            if agent.start(handle):
                self._finish(number, None)
        except NixlError as error:
            self._fail(number, error)
        return number

    def forget(self, pool: NixlPool) -> None:
        """See `NixlPool.close`."""
        deadline = self._clock.now() + CLOSE_WAIT_S
        while numbers := [number for number, read in self._reads.items() if read.pool is pool]:
            if self._clock.now() >= deadline:
                self._restart("a read from a closed pool did not end")
                break
            self._advance(numbers[0])
        pool.failure = "the pool is closed"
        self._pools.discard(pool)

    def _agent(self) -> NixlAgent:
        """The agent that reads. TransportError if there is none and none can be created."""
        if self._is_closed:
            raise TransportError("this worker no longer reads through NIXL")
        self._make_current()
        if self._reading is None:
            self._reading = _new_agent(self._memory, has_progress_thread=False)
        return self._reading

    def _connect(self, pool: NixlPool) -> None:
        """Connects the reading agent to the peer, unless it is connected already."""
        theirs, reading = pool.description, self._agent()
        if theirs.agent in self._connected:
            return
        _translated(lambda: reading.connect(theirs.metadata))
        self._connected[theirs.agent] = theirs
        if len(self._connected) > MAX_PEERS:
            in_use = {other.description.agent for other in (pool, *self._pools)}
            for agent in [agent for agent in self._connected if agent not in in_use][:1]:
                self._disconnect(agent)

    def _disconnect(self, agent: str) -> None:
        if self._connected.pop(agent, None) is not None:
            with suppress(NixlError):  # it may already be gone
                self._agent().disconnect(agent)

    def _advance(self, number: int) -> None:
        try:
            if self._agent().advance(self._reads[number].handle):
                self._finish(number, None)
        except NixlError as error:
            self._fail(number, error)

    def _finish(self, number: int, error: str | None) -> None:
        """Reports that a read has ended, and no longer writes our pool."""
        handle = self._reads.pop(number).handle
        with suppress(NixlError):
            assert self._reading is not None, "reads must end before their agent"
            self._reading.release(handle)
        self._done.append(ReadDone(number, error))

    def _fail(self, number: int, error: NixlError) -> None:
        """Handles a failed read. If the connection was cut, all reads over it have ended. After any other error, NIXL
        does not say whether the read continues, so the agent is restarted."""
        pool = self._reads[number].pool
        agent = pool.description.agent
        pool.failure = f"NIXL cannot read the pool of process {pool.description.pid}: {error}"
        self._finish(number, pool.failure)
        if not error.is_disconnect:
            self._restart(pool.failure)
            return
        for other, read in list(self._reads.items()):
            if read.pool.description.agent == agent:
                self._finish(other, pool.failure)
        self._disconnect(agent)

    def _restart(self, reason: str) -> None:
        """Ends every current read by ending the reading agent; the next read begins with a new one."""
        logger.warning("restarting the NIXL agent, %d reads are lost: %s", len(self._reads), reason)
        self._end_reading(f"the NIXL agent was restarted: {reason}")

    def _end_reading(self, reason: str) -> None:
        for number in list(self._reads):
            self._finish(number, reason)
        self._connected.clear()
        if self._reading is not None:
            self._reading.close()
            self._reading = None


def _new_agent(memory: NixlMemory, *, has_progress_thread: bool) -> NixlAgent:
    return _translated(lambda: NixlAgent(memory, has_progress_thread=has_progress_thread))


def _translated(call: Callable[[], T]) -> T:
    """Translates NIXL's errors into TransportError."""
    try:
        return call()
    except NixlError as error:
        raise TransportError(f"NIXL: {error}") from error
