"""Where workers listen and what they tell others: whatever `network` says, the published address can be dialled."""

import asyncio
import errno
import re
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq

from baton.clock import SystemClock
from baton.config import NetworkConfig
from baton.errors import ConfigError
from baton.messages.request_plane import TO_GATEWAY, TO_WORKER, Heartbeat, Hello
from baton.system.addresses import addresses_of, connect, listen
from baton.system.curve import secure_client
from baton.system.hosts import WILDCARDS
from cluster.control_api.zmq_carrier import ZmqCarrier
from kv_transfer.transport.zmq_tcp import ZmqChannel
from tests.factories.gateway import gateway_with
from tests.factories.hosts import BIND_HOSTS
from tests.factories.request_plane import STATUS, RecordingEngine
from tests.factories.security import KEYS
from worker.request_plane import RequestServer

TIMEOUT_S = 10.0
NOBODYS = "203.0.113.77"  # RFC 5737: an address that no machine has


def host_of(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")


@pytest.mark.parametrize("bind_host", BIND_HOSTS)
def test_a_kv_plane_is_reached_where_it_says(bind_host: str) -> None:
    clock = SystemClock()
    producer = ZmqChannel(bind_host, 64, KEYS.kv, clock, max_queued_bytes=64, dead_s=60.0)
    consumer = ZmqChannel("127.0.0.1", 64, KEYS.kv, clock, max_queued_bytes=64, dead_s=60.0)
    try:
        assert host_of(producer.address) not in WILDCARDS
        consumer.send(producer.address, b"header")
        headers = []
        for _ in range(100):  # the handshake also ends a wait
            headers += [arrival.header for arrival in producer.wait(TIMEOUT_S / 100)]
            list(consumer.wait(0.0))
            if headers:
                break
        assert headers == [b"header"]
    finally:
        consumer.close()
        producer.close()


@pytest.mark.parametrize("bind_host", BIND_HOSTS)
def test_a_request_plane_is_reached_where_it_says(bind_host: str) -> None:
    server = RequestServer(
        NetworkConfig(bind_host=bind_host), KEYS.request, "incarnation-1", lambda: STATUS, SystemClock()
    )
    server.start(RecordingEngine())
    try:
        assert host_of(server.address) not in WILDCARDS
        with zmq.Context() as context, context.socket(zmq.DEALER) as gateway:
            gateway.setsockopt(zmq.LINGER, 0)
            secure_client(gateway, KEYS.request)
            connect(gateway, server.address)
            gateway.send(TO_WORKER.encode(Hello("incarnation-1", "g", 1, None, 0)))
            assert gateway.poll(int(TIMEOUT_S * 1000))
            assert TO_GATEWAY.decode(gateway.recv()) == Heartbeat(STATUS, 1, 0)
    finally:
        server.stop()


@pytest.mark.parametrize(("host", "in_url"), [("node-1.example", "node-1.example"), ("fd00::7", "[fd00::7]")])
def test_what_is_advertised_is_published_as_it_stands(host: str, in_url: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        assert re.fullmatch(rf"tcp://{re.escape(in_url)}:[1-9]\d*", listen(listener, "127.0.0.1", host))


@pytest.mark.parametrize(
    ("addresses", "published"),
    [
        (["2001:db8::7"], "[2001:db8::7]"),
        (["2001:db8::7", "2001:db8::8"], "[2001:db8::7]"),
        (["2001:db8::7", "192.0.2.7"], "node.example"),
        (["192.0.2.7"], "node.example"),
        (["::1"], "node.example"),  # from the file of this host
        (["fe80::7%eth0"], "node.example"),
        (["fe80::7", "2001:db8::7"], "[2001:db8::7]"),
    ],
)
def test_a_name_that_has_only_ipv6_addresses_is_published_as_an_address(
    addresses: list[str], published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ would look for IPv4 addresses of the name."""
    families = [socket.AF_INET6 if ":" in address else socket.AF_INET for address in addresses]
    found = [
        (family, socket.SOCK_STREAM, 6, "", (address, 0))
        for family, address in zip(families, addresses, strict=True)
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        address = listen(listener, "127.0.0.1", "node.example")
    assert re.fullmatch(rf"tcp://{re.escape(published)}:[1-9]\d*", address)


@pytest.mark.parametrize("bind_host", [NOBODYS, "no-such-interface", "2001:db8::77"])
def test_a_place_that_this_machine_does_not_have_is_named(bind_host: str) -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as listener,
        pytest.raises(ConfigError, match=rf"network\.bind_host: cannot listen on '{re.escape(bind_host)}'"),
    ):
        listen(listener, bind_host, None)


def test_a_machine_without_a_free_port_is_told_so() -> None:
    listener = Mock(bind_to_random_port=Mock(side_effect=zmq.ZMQError(errno.EADDRINUSE)))
    with pytest.raises(ConfigError, match=r"network\.bind_host: no port of '127\.0\.0\.1' is free"):
        listen(listener, "127.0.0.1", None)


def test_a_machine_without_a_route_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.system.addresses._own_address", lambda _: None)
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as listener,
        pytest.raises(ConfigError, match=r"Baton cannot tell its address; set network\.advertise_host"),
    ):
        listen(listener, "0.0.0.0", None)


def test_a_server_listens_on_all_addresses_of_a_name_that_this_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(host: str, *_arguments: object, **_options: object) -> list[tuple[object, ...]]:
        addresses = {
            "both": ["127.0.0.1", "127.0.0.2", "127.0.0.1"],
            "elsewhere": [NOBODYS],
            "half": [NOBODYS, "127.0.0.2"],
        }
        if host not in addresses:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in addresses[host]]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert addresses_of("both") == ["127.0.0.1", "127.0.0.2"]
    assert addresses_of("half") == ["127.0.0.2"]
    assert addresses_of("elsewhere") == ["elsewhere"], "the attempt to listen there says why not"
    assert addresses_of("unknown") == ["unknown"]
    with monkeypatch.context() as patches:
        patches.setattr(socket, "socket", Mock(side_effect=OSError(errno.EAFNOSUPPORT, "no such family")))
        assert addresses_of("both") == ["both"], "as IPv6 in a kernel without it"


async def test_a_port_that_is_in_use_on_one_address_of_a_name_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.grpc.server.addresses_of", lambda _host: ["127.0.0.1", "127.0.0.2"])
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    with socket.create_server(("127.0.0.2", port)):
        free.close()
        with pytest.raises(ConfigError, match=rf"gateway\.grpc_port: cannot listen on 127\.0\.0\.2:{port}"):
            async with gateway_with(folder, {}, {}, grpc_port=port):
                raise AssertionError("it started")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("families", "is_ipv6"),
    [
        ([socket.AF_INET], False),
        ([socket.AF_INET6], True),
        ([socket.AF_INET6, socket.AF_INET], False),
    ],
)
async def test_a_fleet_is_found_by_a_name_of_either_family_once_the_name_is_known(
    families: list[socket.AddressFamily], is_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name may be that of a Service in an IPv6 cluster, which may have no address yet."""
    connected, tries = asyncio.Event(), 0

    def found(*_: object, **__: object) -> list[tuple[object, ...]]:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise socket.gaierror("it is not known yet")
        return [(family, socket.SOCK_STREAM, 6, "", ()) for family in families]

    monkeypatch.setattr("cluster.control_api.zmq_carrier._RECONNECT_MAX_MS", 1)
    monkeypatch.setattr(socket, "getaddrinfo", found)
    async with ZmqCarrier("fleet.invalid:1", None, NetworkConfig()) as carrier:
        monkeypatch.setattr(carrier._socket, "connect", lambda _address: connected.set())
        await connected.wait()
        assert carrier._socket.getsockopt(zmq.IPV6) == is_ipv6
    assert tries == 2
