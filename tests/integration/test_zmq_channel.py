"""ZmqChannel over loopback: what is sent is what is read, whatever happens to the pool meanwhile or is left unread."""

from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.protocol.outgoing import BYTES_PER_TURN
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.zmq_tcp import ZmqChannel

PIECE_NBYTES = 96 * 1024


@pytest.fixture
def giver() -> Iterator[ZmqChannel]:
    channel = ZmqChannel("127.0.0.1", PIECE_NBYTES, None)
    yield channel
    channel.close()


@pytest.fixture
def taker() -> Iterator[ZmqChannel]:
    channel = ZmqChannel("127.0.0.1", PIECE_NBYTES, None)
    yield channel
    channel.close()


def meet(giver: ZmqChannel, taker: ZmqChannel) -> bytes:
    """The consumer speaks first; how the producer reaches it from then on."""
    taker.send(giver.address, b"hello")
    [arrival] = giver.wait(10.0)
    assert isinstance(arrival.peer, bytes)
    return arrival.peer


def take(taker: ZmqChannel, num_arrivals: int, unread: tuple[bytes, ...] = ()) -> dict[bytes, Bytes | None]:
    """The next arrivals by header, with their payloads but for those of `unread`."""
    taken: dict[bytes, Bytes | None] = {}
    while len(taken) < num_arrivals:
        before = len(taken)
        for arrival in taker.wait(10.0):
            taken[arrival.header] = None if arrival.header in unread else taker.read_payload()
        assert len(taken) > before, f"nothing arrived within 10 s after {list(taken)}"
    return taken


def random_pieces(num_pieces: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, (num_pieces, PIECE_NBYTES), dtype=np.uint8)


@pytest.mark.parametrize("num_pieces", [1, 2, BYTES_PER_TURN // PIECE_NBYTES])
def test_pieces_arrive_in_one_span_as_they_were_when_they_were_sent(
    giver: ZmqChannel, taker: ZmqChannel, num_pieces: int
) -> None:
    peer, pool = meet(giver, taker), random_pieces(num_pieces)
    truth = pool.copy()
    giver.send(peer, b"pieces", list(pool))
    pool[:] = 0  # they belong to another request by now
    payload = take(taker, 1)[b"pieces"]
    assert payload is not None
    assert (payload.reshape(truth.shape) == truth).all()


def test_the_largest_message_that_a_turn_makes_is_not_too_large(giver: ZmqChannel, taker: ZmqChannel) -> None:
    peer, payload = meet(giver, taker), np.ones(BYTES_PER_TURN, np.uint8)
    giver.send(peer, b"full", [payload])
    arrived = take(taker, 1)[b"full"]
    assert arrived is not None
    assert (arrived == payload).all()


def test_what_nobody_reads_is_not_in_the_way_of_the_next(giver: ZmqChannel, taker: ZmqChannel) -> None:
    peer, pool = meet(giver, taker), random_pieces(3)
    giver.send(peer, b"late", list(pool[:2]))
    giver.send(peer, b"wanted", [pool[2]])
    giver.send(peer, b"bare")
    taken = take(taker, 3, unread=(b"late",))
    assert taken[b"wanted"] is not None
    assert (taken[b"wanted"] == pool[2]).all()
    assert taken[b"bare"] is None


def test_a_payload_outlives_the_arrival_that_brought_it(giver: ZmqChannel, taker: ZmqChannel) -> None:
    peer, pool = meet(giver, taker), random_pieces(8)
    for number, piece in enumerate(pool):
        giver.send(peer, b"%d" % number, [piece])
    taken = take(taker, 8)
    for number, piece in enumerate(pool):
        payload = taken[b"%d" % number]
        assert payload is not None
        assert (payload == piece).all()
