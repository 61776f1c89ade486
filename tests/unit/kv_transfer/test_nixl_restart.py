"""NixlReader when its reading agent must be ended: how reads end, also if no new agent can be created.

Needs no NIXL: the library's agent is a fake here.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from baton.clock import VirtualClock
from kv_transfer.transport import nixl, nixl_agent
from kv_transfer.transport.base import TransportError
from kv_transfer.transport.nixl import CLOSE_WAIT_S, NixlReader
from kv_transfer.transport.nixl_agent import NixlAgent, NixlError, NixlMemory
from tests.factories.pool_readers import make_runs

NBYTES = 4096
RUN = make_runs((0, 0, 8))


class Ucx:
    """What all agents of a test have in common."""

    def __init__(self) -> None:
        self.num_alive = 0
        self.num_made = 0
        self.is_exhausted = False
        """No agent can be set up."""
        self.is_broken = False
        """Reads fail, and NIXL does not say whether they go on."""
        self.is_silent = False
        """Reads do not end."""


class FakeAgent:
    """Reads end when they are polled for."""

    def __init__(self, ucx: Ucx) -> None:
        if ucx.is_exhausted:
            raise NixlError(RuntimeError("no UCX resources"))
        ucx.num_made += 1
        ucx.num_alive += 1
        self._ucx = ucx
        self._is_alive = True
        self._handles: set[int] = set()
        self.name = f"agent {ucx.num_made}"

    def metadata(self) -> bytes:
        return b"metadata"

    def connect(self, _metadata: bytes) -> None:
        assert self._is_alive

    def disconnect(self, _peer: str) -> None:
        assert self._is_alive

    def prepare(self, *_: object) -> int:
        assert self._is_alive
        self._handles.add(len(self._handles))
        return len(self._handles) - 1

    def start(self, handle: int) -> bool:
        assert handle in self._handles
        if self._ucx.is_broken:
            raise NixlError(RuntimeError("backend error"))
        return False

    def advance(self, handle: int) -> bool:
        assert handle in self._handles
        if self._ucx.is_broken:
            raise NixlError(RuntimeError("backend error"))
        return not self._ucx.is_silent

    def release(self, handle: int) -> None:
        assert self._is_alive
        self._handles.remove(handle)

    def close(self) -> None:
        assert not self._handles, "reads are released before their agent ends"
        self._is_alive = False
        self._ucx.num_alive -= 1


@pytest.fixture
def ucx(monkeypatch: pytest.MonkeyPatch) -> Ucx:
    ucx = Ucx()
    monkeypatch.setattr(nixl, "NixlAgent", lambda _memory, **_: FakeAgent(ucx))
    monkeypatch.setattr(nixl, "load_nixl", lambda: (None, "1.5.1"))
    monkeypatch.setattr(nixl, "has_rdma", lambda: False)
    return ucx


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def reader(ucx: Ucx, clock: VirtualClock) -> NixlReader:
    assert ucx.num_made == 0
    return NixlReader(NixlMemory.of(np.zeros(NBYTES, np.uint8)), clock)


def errors_of(reader: NixlReader) -> dict[int, str | None]:
    return {done.number: done.error for done in reader.poll()}


@pytest.mark.parametrize("breaks", ["as it begins", "under way"])
def test_c42_where_no_new_agent_can_be_had_reads_end_with_an_error_and_no_other_begins(
    ucx: Ucx, reader: NixlReader, breaks: str
) -> None:
    pool = reader.open(reader.describe())
    before = [pool.read(RUN), pool.read(RUN)]
    ucx.is_exhausted = ucx.is_broken = True
    numbers = [*before, pool.read(RUN)] if breaks == "as it begins" else before
    errors = errors_of(reader)
    assert errors.keys() == set(numbers)
    assert all("backend error" in str(error) for error in errors.values())
    with pytest.raises(TransportError, match="backend error"):
        pool.read(RUN)
    for _ in range(2):
        with pytest.raises(TransportError, match="no UCX resources"):
            reader.open(reader.describe())
        assert reader.poll() == []
    pool.close()
    assert ucx.num_alive == 1, "the serving agent is none of a reader's business"
    reader.close()
    assert ucx.num_alive == 0


def test_reading_begins_again_as_soon_as_it_can(ucx: Ucx, reader: NixlReader) -> None:
    pool = reader.open(reader.describe())
    ucx.is_exhausted = ucx.is_broken = True
    assert errors_of(reader) == {}
    number = pool.read(RUN)
    assert errors_of(reader).keys() == {number}
    ucx.is_exhausted = ucx.is_broken = False
    reopened = reader.open(reader.describe())
    number = reopened.read(RUN)
    assert errors_of(reader) == {number: None}
    assert ucx.num_alive == 2
    with pytest.raises(TransportError, match="backend error"):
        pool.read(RUN)


def test_c46_a_read_of_a_closed_pool_is_over_also_where_no_new_agent_can_be_had(
    ucx: Ucx, clock: VirtualClock, reader: NixlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, other = reader.open(reader.describe()), reader.open(reader.describe())
    numbers = {pool.read(RUN), other.read(RUN)}
    ucx.is_silent = ucx.is_exhausted = True
    advance = FakeAgent.advance

    def wait(agent: FakeAgent, handle: int) -> bool:
        clock.advance(CLOSE_WAIT_S / 4)
        return advance(agent, handle)

    monkeypatch.setattr(FakeAgent, "advance", wait)
    pool.close()
    assert ucx.num_alive == 1, "the agent that wrote our pool is ended"
    assert errors_of(reader).keys() == numbers
    with pytest.raises(TransportError, match="no UCX resources"):
        other.read(RUN)


def test_a_closed_reader_opens_and_reads_nothing(ucx: Ucx, reader: NixlReader) -> None:
    description = reader.describe()
    pool = reader.open(description)
    pool.read(RUN)
    reader.close()
    reader.close()
    assert ucx.num_alive == 0
    for use in (lambda: reader.open(description), lambda: pool.read(RUN)):
        with pytest.raises(TransportError, match="no longer reads"):
            use()
    pool.close()
    assert ucx.num_made == 2


class LibraryAgent:
    """The library's agent, as NixlAgent sees it. This one does not give memory back."""

    num_alive = 0

    def __init__(self, *_: object) -> None:
        LibraryAgent.num_alive += 1

    def __del__(self) -> None:
        LibraryAgent.num_alive -= 1

    def createBackend(self, *_: object) -> int:  # noqa: N802 - the library's name
        return 1

    def registerMem(self, *_: object) -> None:  # noqa: N802 - the library's name
        pass

    def deregisterMem(self, *_: object) -> None:  # noqa: N802 - the library's name
        raise RuntimeError("it is in use")


def test_an_agent_that_cannot_give_memory_back_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = SimpleNamespace(
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=LibraryAgent,
        nixlRegDList=lambda *parts: parts,
        DRAM_SEG=0,
    )
    monkeypatch.setattr(nixl_agent, "load_nixl", lambda: (library, "1.5.1"))
    agent = NixlAgent(NixlMemory.of(np.zeros(NBYTES, np.uint8)), has_progress_thread=False)
    assert LibraryAgent.num_alive == 1
    agent.close()
    assert LibraryAgent.num_alive == 0


def test_reads_move_on_in_the_context_of_the_device(ucx: Ucx, clock: VirtualClock) -> None:
    """UCX calls CUDA on the thread that polls, and does not check that it has a context."""
    calls: list[int] = []
    reader = NixlReader(NixlMemory(1 << 40, NBYTES, "VRAM", 0), clock, lambda: calls.append(ucx.num_made))
    assert calls == [0], "before the first agent registers the memory"
    for use in (lambda: reader.open(reader.describe()).read(RUN), reader.poll):
        calls.clear()
        use()
        assert calls
