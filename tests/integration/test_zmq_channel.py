"""ZmqChannel over loopback: what is sent is what is read, whatever is left unread."""

from collections.abc import Iterator

import numpy as np
import pytest

from kv_transfer.protocol.outgoing import BYTES_PER_TURN
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.zmq_tcp import MIN_FRAME_BYTES, ZmqChannel

LARGE = MIN_FRAME_BYTES


@pytest.fixture
def giver() -> Iterator[ZmqChannel]:
    channel = ZmqChannel("127.0.0.1", LARGE, 64 * LARGE, None)
    yield channel
    channel.close()


@pytest.fixture
def taker() -> Iterator[ZmqChannel]:
    channel = ZmqChannel("127.0.0.1", LARGE, 64 * LARGE, None)
    yield channel
    channel.close()


def meet(giver: ZmqChannel, taker: ZmqChannel) -> bytes:
    """The consumer speaks first; how the producer reaches it from then on."""
    taker.send(giver.address, b"hello")
    [arrival] = giver.wait(10.0)
    assert isinstance(arrival.peer, bytes)
    return arrival.peer


def take(taker: ZmqChannel, num_arrivals: int, unread: tuple[bytes, ...] = ()) -> dict[bytes, list[Bytes]]:
    """The next arrivals by header, with the spans of their payloads but for those of `unread`."""
    taken: dict[bytes, list[Bytes]] = {}
    while len(taken) < num_arrivals:
        before = len(taken)
        for arrival in taker.wait(10.0):
            taken[arrival.header] = [] if arrival.header in unread else list(taker.read_payload())
        assert len(taken) > before, f"nothing arrived within 10 s after {list(taken)}"
    return taken


def random_bytes(num_bytes: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)


@pytest.mark.parametrize(
    ("sizes", "arriving"),
    [
        ([1000], [1000]),
        ([1000, 2000, 3000], [6000]),
        ([LARGE, LARGE + 1], [LARGE, LARGE + 1]),
        ([1000, 2000, LARGE, 3000, LARGE, LARGE, 4000, 5000], [3000, LARGE, 3000, LARGE, LARGE, 9000]),
    ],
)
def test_large_spans_have_frames_of_their_own_and_small_ones_share_one(
    giver: ZmqChannel, taker: ZmqChannel, sizes: list[int], arriving: list[int]
) -> None:
    peer, pool = meet(giver, taker), random_bytes(sum(sizes))
    giver.send(peer, b"pieces", np.split(pool, np.cumsum(sizes)[:-1]))
    spans = take(taker, 1)[b"pieces"]
    assert [len(span) for span in spans] == arriving
    assert (np.concatenate(spans) == pool).all()


def test_the_largest_message_that_a_turn_makes_is_not_too_large(giver: ZmqChannel, taker: ZmqChannel) -> None:
    peer, payload = meet(giver, taker), random_bytes(BYTES_PER_TURN)
    giver.send(peer, b"full", [payload])
    [arrived] = take(taker, 1)[b"full"]
    assert (arrived == payload).all()


def test_what_nobody_reads_is_not_in_the_way_of_the_next(giver: ZmqChannel, taker: ZmqChannel) -> None:
    peer, pool = meet(giver, taker), random_bytes(3 * LARGE)
    giver.send(peer, b"late", [pool[:LARGE], pool[LARGE : 2 * LARGE]])
    giver.send(peer, b"wanted", [pool[2 * LARGE :]])
    giver.send(peer, b"bare")
    taken = take(taker, 3, unread=(b"late",))
    assert (np.concatenate(taken[b"wanted"]) == pool[2 * LARGE :]).all()
    assert taken[b"bare"] == []


def test_a_payload_outlives_the_arrival_that_brought_it(giver: ZmqChannel, taker: ZmqChannel) -> None:
    peer, pieces = meet(giver, taker), random_bytes(8 * LARGE).reshape(8, LARGE)
    for number, piece in enumerate(pieces):
        giver.send(peer, b"%d" % number, [piece])
    taken = take(taker, 8)
    for number, piece in enumerate(pieces):
        assert (np.concatenate(taken[b"%d" % number]) == piece).all()


def test_c33_a_peer_that_reads_nothing_does_not_fill_our_memory(taker: ZmqChannel) -> None:
    giver = ZmqChannel("127.0.0.1", LARGE, 64 * LARGE, None)
    peer, pool = meet(giver, taker), random_bytes(64 * LARGE)
    was_sent = [giver.send(peer, b"pieces", [pool[:LARGE], pool[LARGE : 2 * LARGE]]) for _ in range(1000)]
    assert was_sent[0]
    assert not was_sent[-1]
    assert giver.num_dropped == was_sent.count(False)
    giver.close()  # although ZMQ still has some of it


def test_c33_a_peer_that_reads_is_sent_all_of_it(giver: ZmqChannel, taker: ZmqChannel) -> None:
    peer, pool = meet(giver, taker), random_bytes(BYTES_PER_TURN)
    for number in range(64):
        assert giver.send(peer, b"%d" % number, [pool])
        [arrived] = take(taker, 1)[b"%d" % number]
        assert (arrived == pool).all()
    assert giver.num_dropped == 0
