"""Reads that fail, or never report their end: loads end, their blocks are quiet, and the next try is fair."""

import pytest

from baton.kv import KVFingerprint
from kv_transfer.commands import AbortLoad
from kv_transfer.consumer.remote_pools import READ_TIMEOUT_S, RemotePools
from kv_transfer.cuda import copy_kernel
from kv_transfer.pool import RankPool
from kv_transfer.protocol.effects import Failed, Received
from kv_transfer.protocol.transports import (
    CUDA_IPC,
    ONLY_RETRY_S,
    RETRY_S,
    SHARED_MEMORY,
    ZMQ_TCP,
    TransportChoices,
)
from kv_transfer.transport.base import Bytes, PoolReader, ReadDone, RemotePool, Runs, TransportError
from tests.factories.endpoints import Fabric
from tests.factories.hand_overs import begin, prefill_at_once
from tests.factories.pool_readers import any_pieces, make_runs
from tests.factories.transfer import KEY, Wire, make_key, start

NUM_TOKENS = 64
SCATTERED = (1, 3, 5, 7)
"""Blocks that do not adjoin are read in a run each."""


class FragilePool:
    """A pool whose first reads fail, and that fails for good with them."""

    def __init__(self, pool: RemotePool, reader: "FragileReader") -> None:
        self._pool = pool
        self._reader = reader
        self._has_failed = False

    @property
    def owner_pid(self) -> int | None:
        return self._pool.owner_pid

    def read(self, runs: Runs) -> int:
        if self._has_failed:
            raise TransportError("the connection broke before")
        number = self._pool.read(runs)
        if self._reader.num_failures:
            self._reader.num_failures -= 1
            self._has_failed = True
            self._reader.broken.add(number)
        return number

    def close(self) -> None:
        self._reader.closed.append("pool")
        self._pool.close()
        if self._reader.cannot_close:
            raise TransportError("the pool cannot be closed")


class FragileReader:
    """A SharedMemoryReader with reads that fail, or that never report their end."""

    name = SHARED_MEMORY
    poll_interval_s: float | None = None

    def __init__(self, reader: PoolReader) -> None:
        self._reader = reader
        self.num_failures = 0
        self.is_silent = False
        self.cannot_close = False
        self.broken: set[int] = set()
        self.closed: list[str] = []
        self.num_opened = 0

    def describe(self) -> bytes | None:
        return self._reader.describe()

    def open(self, description: bytes) -> RemotePool:
        self.num_opened += 1
        return FragilePool(self._reader.open(description), self)

    def poll(self) -> list[ReadDone]:
        if self.is_silent:
            return []
        return [
            ReadDone(done.number, "the connection broke") if done.number in self.broken else done
            for done in self._reader.poll()
        ]

    def close(self) -> None:
        self.closed.append("reader")
        self._reader.close()
        if self.cannot_close:
            raise TransportError("the reader cannot be closed")


class FragileFabric(Fabric):
    """Shared memory read by FragileReaders; then TCP."""

    def __init__(self) -> None:
        super().__init__(SHARED_MEMORY, ZMQ_TCP)
        self.readers: list[FragileReader] = []

    def make_pool(
        self, block_nbytes: int, fingerprint: KVFingerprint, rank: int
    ) -> tuple[Bytes, RankPool, dict[str, PoolReader]]:
        blocks, pool, readers = super().make_pool(block_nbytes, fingerprint, rank)
        self.readers.append(FragileReader(readers[SHARED_MEMORY]))
        return blocks, pool, {SHARED_MEMORY: self.readers[-1]}


@pytest.mark.parametrize("room", [1, 2, 3])
def test_c46_no_copy_that_was_queued_writes_blocks_whose_load_has_failed(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_kernel, "MAX_RUNS", 1)  # several launches for one read
    fabric = Fabric(CUDA_IPC)
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode, NUM_TOKENS, "r", SCATTERED)
    driver = fabric.drivers[1]
    driver.is_slow, driver.room = True, room
    prefill_at_once(prefill, NUM_TOKENS)
    fabric.advance(0.01)
    [failed] = decode.output().failed_recving
    assert "out of memory" in failed.reason
    decode.blocks[0][:] = 0x2A  # the scheduler gave them to others
    driver.run()
    assert (decode.blocks[0] == 0x2A).all()


def test_c32_a_device_that_is_lost_ends_the_loads_that_it_was_copying() -> None:
    fabric = Fabric(CUDA_IPC)
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode, NUM_TOKENS, "r", SCATTERED)
    fabric.drivers[1].is_slow = True
    prefill_at_once(prefill, NUM_TOKENS)
    fabric.advance(0.01)
    decode.command(AbortLoad("r", "the client left"))
    fabric.deliver()
    assert decode.output().quiesced == (), "it is being copied"
    fabric.drivers[1].failure = "an illegal memory access was encountered (700)"
    fabric.advance(0.01)
    assert decode.output().quiesced == ("r",)
    fabric.assert_at_rest()


@pytest.mark.parametrize("is_aborted", [True, False])
def test_c48_a_read_that_never_reports_its_end_is_given_up_with_its_pool(is_aborted: bool) -> None:
    fabric = FragileFabric()
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode, NUM_TOKENS, "r", SCATTERED)
    fabric.readers[1].is_silent = True
    prefill_at_once(prefill, NUM_TOKENS)
    fabric.deliver()
    if is_aborted:
        decode.command(AbortLoad("r", "the client left"))
    fabric.advance(READ_TIMEOUT_S - 0.1)
    assert not decode.output(), "its bytes may still be on their way"
    fabric.advance(0.1)
    news = decode.output()
    assert [*news.quiesced, *(failed.request_id for failed in news.failed_recving)] == ["r"]
    assert fabric.readers[1].closed == ["pool"]
    fabric.readers[1].is_silent = False  # its late report has no reader any more
    fabric.advance(1.0)
    assert not decode.output()
    fabric.assert_at_rest()


def test_c48_a_read_that_ended_while_this_rank_stood_still_has_not_failed() -> None:
    fabric = FragileFabric()
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode, NUM_TOKENS, "r", SCATTERED)
    fabric.readers[1].is_silent = True
    prefill_at_once(prefill, NUM_TOKENS)
    fabric.deliver()
    fabric.clock.advance(10 * READ_TIMEOUT_S)
    fabric.advance(0.0)
    fabric.readers[1].is_silent = False
    fabric.advance(1.0)
    assert [received.request_id for received in decode.output().finished_recving] == ["r"]
    assert fabric.readers[1].closed == []


def test_c42_a_failed_transport_rests_even_if_no_hand_over_is_left() -> None:
    """On a quiet pair, each hand-over ends before the next begins. A try may take READ_TIMEOUT_S."""
    fabric = FragileFabric()
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    fabric.readers[1].num_failures = 1
    choices = []
    for number in range(4):
        name = f"r{number}"
        begin(fabric, prefill, decode, NUM_TOKENS, name)
        prefill_at_once(prefill, NUM_TOKENS, name)
        fabric.deliver()
        [received] = decode.output().finished_recving
        choices.append(received.transport)
        assert decode.holds(NUM_TOKENS)
        assert len(fabric.connectors[1].endpoint) == 0
        fabric.advance(RETRY_S / 2)
    assert choices == [ZMQ_TCP, ZMQ_TCP, SHARED_MEMORY, SHARED_MEMORY]
    assert fabric.readers[1].num_opened >= 2, "its pool is opened anew"


def test_c42_an_only_transport_rests_for_a_moment() -> None:
    wire = Wire()
    start(wire, 1)
    wire.at_consumer(wire.consumer.on_unreachable(KEY, ZMQ_TCP, "gone", wire.clock.now()))
    wire.deliver()
    for name in ("at once", "later"):
        key = make_key(name)
        wire.begin_send(key, 16, name)
        wire.begin_load(key, 16, name)
        wire.ready(0, 1, name)
        wire.finish_send(name)
        wire.load(0, 1, name)
        wire.deliver()
        wire.advance(ONLY_RETRY_S)
    ends = [each for each in wire.notifications if isinstance(each, Failed | Received)]
    assert [type(end) for end in ends] == [Failed, Failed, Received]


def test_failures_of_transports_are_forgotten() -> None:
    choices = TransportChoices((SHARED_MEMORY, ZMQ_TCP))
    for number in range(3):
        choices.note_failure(f"p-{number}", 0, SHARED_MEMORY, now=float(number))
    assert choices.usable_to("p-2", 0, now=RETRY_S) == (ZMQ_TCP,)
    assert (
        choices.usable_to("p-2", 1, now=RETRY_S)
        == choices.usable_to("p-0", 0, now=RETRY_S)
        == (SHARED_MEMORY, ZMQ_TCP)
    )
    choices.note_failure("p-3", 0, SHARED_MEMORY, now=RETRY_S + 1)
    assert len(choices._failed_until) == 2


@pytest.mark.parametrize("cannot_close", [False, True])
def test_an_endpoint_that_is_closed_closes_its_pools_and_then_its_readers(cannot_close: bool) -> None:
    fabric = FragileFabric()
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    begin(fabric, prefill, decode, NUM_TOKENS, "r", SCATTERED)
    prefill_at_once(prefill, NUM_TOKENS)
    fabric.deliver()
    for reader in fabric.readers:
        reader.cannot_close = cannot_close
    prefill.connector.shutdown()
    decode.connector.shutdown()
    assert [reader.closed for reader in fabric.readers] == [["reader"], ["pool", "reader"]]


def test_a_pool_that_failed_and_is_out_of_reach_by_now_is_not_read() -> None:
    fabric = FragileFabric()
    fabric.add("p0")
    reader = fabric.readers[0]
    description = reader.describe()
    assert description is not None
    pools = RemotePools({SHARED_MEMORY: reader}, fabric.clock)
    key = ("p0-incarnation", 0, SHARED_MEMORY)
    pools.open(key, description)
    reader.num_failures = 1
    pools.read(key, any_pieces(), make_runs((0, 0, 1)))
    assert [error is None for _, error in pools.finished()] == [False]
    with pytest.raises(TransportError):
        pools.open(key, b"nothing of the kind")
    with pytest.raises(TransportError, match="not open"):
        pools.read(key, any_pieces(), make_runs((0, 0, 1)))
    assert reader.closed == ["pool"]


def test_c42_a_failed_transport_is_tried_again_later_even_under_constant_traffic() -> None:
    fabric = FragileFabric()
    prefill, decode = fabric.add("p0"), fabric.add("d0")
    fabric.readers[1].num_failures = 1
    begin(fabric, prefill, decode, NUM_TOKENS, "r0")
    choices: list[str] = []
    for number in range(20):  # one begins before the last one ends
        begin(fabric, prefill, decode, NUM_TOKENS, f"r{number + 1}")
        prefill_at_once(prefill, NUM_TOKENS, f"r{number}")
        fabric.advance(RETRY_S / 10)
        choices += [received.transport for received in decode.output().finished_recving]
    assert choices == [ZMQ_TCP] * 11 + [SHARED_MEMORY] * 9
    assert fabric.readers[1].num_opened == 2
