"""ZmqChannel over loopback: what is sent is what is read, whatever is left unread."""

import errno
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.clock import Clock, SystemClock, VirtualClock
from kv_transfer.protocol.outgoing import BYTES_PER_TURN
from kv_transfer.transport import zmq_tcp
from kv_transfer.transport.base import Bytes
from kv_transfer.transport.zmq_tcp import IDLE_S, MIN_FRAME_BYTES, ZmqChannel

LARGE = MIN_FRAME_BYTES
REFUSED_IN_A_ROW = 100
KERNEL_BYTES = 64 * 2**20
"""More than the kernel keeps for both ends of a connection."""


def make_channel(clock: Clock | None = None, **options: Any) -> ZmqChannel:
    options = {"max_queued_bytes": 2**27, "dead_s": 60.0, **options}
    return ZmqChannel("127.0.0.1", LARGE, None, clock or SystemClock(), **options)


@pytest.fixture
def producer() -> Iterator[ZmqChannel]:
    channel = make_channel()
    yield channel
    channel.close()


@pytest.fixture
def consumer() -> Iterator[ZmqChannel]:
    channel = make_channel()
    yield channel
    channel.close()


def meet(producer: ZmqChannel, consumer: ZmqChannel) -> bytes:
    """The consumer sends the first message. Returns the name by which the producer reaches it from then on."""
    consumer.send(producer.address, b"hello")
    [arrival] = producer.wait(60.0)
    assert isinstance(arrival.peer, bytes)
    return arrival.peer


def take(consumer: ZmqChannel, num_arrivals: int, unread: tuple[bytes, ...] = ()) -> dict[bytes, list[Bytes]]:
    """The next arrivals by header, with the spans of their payloads. Payloads of headers in `unread` are not read."""
    taken: dict[bytes, list[Bytes]] = {}
    while len(taken) < num_arrivals:
        before = len(taken)
        for arrival in consumer.wait(60.0):
            taken[arrival.header] = [] if arrival.header in unread else list(consumer.read_payload())
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
    producer: ZmqChannel, consumer: ZmqChannel, sizes: list[int], arriving: list[int]
) -> None:
    peer, pool = meet(producer, consumer), random_bytes(sum(sizes))
    producer.send(peer, b"pieces", np.split(pool, np.cumsum(sizes)[:-1]))
    spans = take(consumer, 1)[b"pieces"]
    assert [len(span) for span in spans] == arriving
    assert (np.concatenate(spans) == pool).all()


def test_the_largest_message_that_a_turn_makes_is_not_too_large(
    producer: ZmqChannel, consumer: ZmqChannel
) -> None:
    peer, payload = meet(producer, consumer), random_bytes(BYTES_PER_TURN)
    producer.send(peer, b"full", [payload])
    [arrived] = take(consumer, 1)[b"full"]
    assert (arrived == payload).all()


def test_an_unread_payload_does_not_disturb_the_next_message(
    producer: ZmqChannel, consumer: ZmqChannel
) -> None:
    peer, pool = meet(producer, consumer), random_bytes(3 * LARGE)
    producer.send(peer, b"late", [pool[:LARGE], pool[LARGE : 2 * LARGE]])
    producer.send(peer, b"wanted", [pool[2 * LARGE :]])
    producer.send(peer, b"bare")
    taken = take(consumer, 3, unread=(b"late",))
    assert (np.concatenate(taken[b"wanted"]) == pool[2 * LARGE :]).all()
    assert taken[b"bare"] == []


def test_a_payload_outlives_the_arrival_that_brought_it(producer: ZmqChannel, consumer: ZmqChannel) -> None:
    peer, pieces = meet(producer, consumer), random_bytes(8 * LARGE).reshape(8, LARGE)
    for number, piece in enumerate(pieces):
        producer.send(peer, b"%d" % number, [piece])
    taken = take(consumer, 8)
    for number, piece in enumerate(pieces):
        assert (np.concatenate(taken[b"%d" % number]) == piece).all()


def test_c33_a_peer_that_reads_nothing_does_not_fill_our_memory() -> None:
    producer = make_channel(max_queued_bytes=64 * LARGE)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.RCVHWM, 1)  # else ZMQ reads a lot on its behalf
        peer.connect(producer.address)
        peer.send(b"hello")
        [arrival] = producer.wait(60.0)
        pool = random_bytes(2 * LARGE)
        was_sent: list[bool] = []
        while not was_sent or any(
            was_sent[-REFUSED_IN_A_ROW:]
        ):  # room appears for a while, as the kernel takes bytes
            was_sent.append(producer.send(arrival.peer, b"pieces", np.split(pool, 2)))
            if not was_sent[-1]:
                time.sleep(0.001)
            assert sum(was_sent) * len(pool) < 64 * LARGE + KERNEL_BYTES
        assert was_sent[0]
        assert producer.num_dropped == was_sent.count(False)
        producer.close()  # although ZMQ still has some of it


def test_c33_a_peer_that_reads_is_sent_all_of_it(producer: ZmqChannel, consumer: ZmqChannel) -> None:
    peer, pool = meet(producer, consumer), random_bytes(BYTES_PER_TURN)
    for number in range(64):
        assert producer.send(peer, b"%d" % number, [pool])
        [arrived] = take(consumer, 1)[b"%d" % number]
        assert (arrived == pool).all()
    assert producer.num_dropped == 0


@pytest.fixture
def producers() -> Iterator[list[ZmqChannel]]:
    channels = [make_channel() for _ in range(5)]
    yield channels
    for channel in channels:
        channel.close()


def headers(channel: ZmqChannel) -> list[bytes]:
    return [arrival.header for arrival in channel.wait(60.0)]


def test_c42_room_for_another_peer_is_not_made_while_one_is_listened_to(
    producers: list[ZmqChannel], consumer: ZmqChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_tcp, "MAX_PEERS", 2)
    first, second, third = producers[:3]
    for producer in (first, second):
        producer.send(meet(producer, consumer), b"pieces")
    time.sleep(1.0)  # both have arrived
    peers = []
    for arrival in consumer.wait(60.0):
        peers.append(arrival.peer)
        consumer.send(arrival.peer, b"thanks")
        consumer.send(third.address, b"hello")
    assert sorted(map(str, peers)) == sorted([first.address, second.address])
    assert [headers(each)[0] for each in (first, second, third)] == [b"thanks", b"thanks", b"hello"]


def test_what_was_said_to_more_peers_than_are_kept_still_arrives(
    producers: list[ZmqChannel], consumer: ZmqChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_tcp, "MAX_PEERS", 2)
    for producer in producers:
        consumer.send(producer.address, b"hello")
    assert list(consumer.wait(0.0)) == []
    assert [headers(producer) for producer in producers] == [[b"hello"]] * 5


def listen() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(60.0)
    return server


def accept(server: socket.socket) -> socket.socket:
    connection, _ = server.accept()
    return connection


def is_open(connection: socket.socket, timeout_s: float) -> bool:
    """Reads what comes until the other end closes the connection, or the time is over."""
    connection.settimeout(timeout_s)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return True
    return False


def test_an_unused_connection_is_closed_and_opened_again_when_needed() -> None:
    clock = VirtualClock()
    consumer = make_channel(clock)
    with listen() as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        consumer.send(address, b"hello")
        with accept(server) as connection:
            clock.advance(IDLE_S - 1)
            list(consumer.wait(0.0))
            consumer.send(address, b"still here")
            clock.advance(IDLE_S - 1)
            list(consumer.wait(0.0))
            assert is_open(connection, 0.2)
            clock.advance(1.0)
            list(consumer.wait(0.0))
            assert not is_open(connection, 10.0)
        consumer.send(address, b"hello again")
        accept(server).close()
    consumer.close()


def test_c48_an_idle_channel_wakes_to_close_unused_connections_and_then_sleeps() -> None:
    clock = VirtualClock()
    consumer = make_channel(clock, idle_s=0.1)
    with listen() as server:
        consumer.send(f"tcp://127.0.0.1:{server.getsockname()[1]}", b"hello")
        with accept(server) as connection:
            assert list(consumer.wait(None)) == []
            clock.advance(0.1)
            began = time.monotonic()
            assert list(consumer.wait(0.3)) == []
            assert time.monotonic() - began >= 0.3
            assert not is_open(connection, 10.0)
    consumer.close()


def test_c48_a_connection_is_closed_if_no_file_is_left_for_its_monitor(
    consumer: ZmqChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dealers: list[zmq.Socket[bytes]] = []
    socket_of = zmq.Context.socket

    def socket_while_files_last(context: zmq.Context[Any], kind: int) -> Any:
        if kind == zmq.PAIR:
            raise zmq.ZMQError(errno.EMFILE)
        dealers.append(socket_of(context, kind))
        return dealers[-1]

    with listen() as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with monkeypatch.context() as few_files:
            few_files.setattr(zmq.Context, "socket", socket_while_files_last)
            assert not consumer.send(address, b"hello")
        were_closed = [dealer.closed for dealer in dealers]
        for dealer in dealers:
            dealer.close()
        assert (were_closed, consumer.num_dropped) == ([True], 1)
        assert consumer.send(address, b"hello")
        accept(server).close()


def test_what_arrives_between_short_waits_is_found(producer: ZmqChannel, consumer: ZmqChannel) -> None:
    """ZeroMQ itself counts whole milliseconds."""
    assert list(producer.wait(0.0001)) == []
    consumer.send(producer.address, b"hello")
    end = time.monotonic() + 60.0
    headers: list[bytes] = []
    while not headers and time.monotonic() < end:
        headers = [arrival.header for arrival in producer.wait(0.0001)]
    assert headers == [b"hello"]


def test_c48_a_peer_that_is_gone_is_tried_again_ever_more_seldom(
    consumer: ZmqChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_tcp, "RECONNECT_MS", 10)
    monkeypatch.setattr(zmq_tcp, "MAX_RECONNECT_MS", 80)
    with listen() as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    consumer.send(address, b"hello")
    dealer = consumer._connections[address].socket
    dealer.disable_monitor()  # the channel's own monitor reports other events
    with dealer.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED, "inproc://retries") as monitor:
        pauses_ms = []
        for _ in range(6):
            assert monitor.poll(10_000)
            pauses_ms.append(recv_monitor_message(monitor)["value"])
        dealer.disable_monitor()
    assert pauses_ms[-1] >= 80, pauses_ms


def refuse_once(consumer: ZmqChannel, address: str) -> None:
    """Waits for one more failed attempt to connect to the address."""
    connection, end = consumer._connections[address], time.monotonic() + 60.0
    num_before = connection.num_refusals
    while connection.num_refusals == num_before:
        assert time.monotonic() < end
        assert list(consumer.wait(0.1)) == []


@pytest.mark.parametrize("has_listened", [True, False])
def test_c42_a_peer_is_gone_after_two_failed_attempts_to_connect(
    consumer: ZmqChannel, monkeypatch: pytest.MonkeyPatch, has_listened: bool
) -> None:
    monkeypatch.setattr(zmq_tcp, "RECONNECT_MS", 10)
    with listen() as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        if has_listened:
            consumer.send(address, b"hello")
            accept(server).close()
    if not has_listened:
        consumer.send(address, b"hello")
    refuse_once(consumer, address)
    assert consumer.collect_gone() == (
        set() if consumer._connections[address].num_refusals < 2 else {address}
    )
    refuse_once(consumer, address)
    assert consumer.collect_gone() == {address}
    assert consumer.collect_gone() == set()


def test_c42_a_peer_that_comes_back_is_not_gone(
    consumer: ZmqChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_tcp, "RECONNECT_MS", 1000)  # it comes back before the second attempt
    with listen() as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    consumer.send(address, b"hello")
    refuse_once(consumer, address)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(address)
        identity, header = router.recv_multipart()
        router.send_multipart([identity, b"here"])
        assert (header, headers(consumer)) == (b"hello", [b"here"])
        assert consumer._connections[address].num_refusals == 0
    assert consumer.collect_gone() == set()
