"""Acceptor: where files run out it pauses, and says so once a minute."""

import asyncio
import errno
import os
import socket

import pytest

from baton.clock import VirtualClock
from gateway.http import acceptor
from gateway.http.acceptor import LOG_INTERVAL_S, Acceptor
from gateway.http.connection_places import ConnectionPlaces
from gateway.http.protocol import BoundedH11


class Exhausted(socket.socket):
    """Listens, and has no file for a connection."""

    num_attempts = 0

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.bind(("127.0.0.1", 0))
        self.listen()
        self._clock = clock

    def accept(self) -> tuple[socket.socket, object]:
        self.num_attempts += 1
        self._clock.advance(1.0)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def no_protocol(is_refused: bool) -> BoundedH11:
    raise AssertionError("there is no connection")


def acceptor_with(clock: VirtualClock) -> Acceptor:
    return Acceptor(no_protocol, None, ConnectionPlaces(8), pytest.fail, clock)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == acceptor.__name__]


async def test_without_files_it_does_not_try_again_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 3600.0)
    clock = VirtualClock()

    with Exhausted(clock) as listener, socket.create_connection(listener.getsockname()):
        accepting = acceptor_with(clock)
        accepting.start(listener)
        for _ in range(100):  # turns of the event loop, in each of which the socket is readable
            await asyncio.sleep(0)
        assert listener.num_attempts == 1
        accepting.stop_listening()
    (line,) = lines(caplog)
    assert "cannot accept HTTP connections: Too many open files" in line


async def test_a_lack_of_files_is_logged_once_a_minute_with_the_number_of_attempts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.0)
    clock = VirtualClock()

    with Exhausted(clock) as listener, socket.create_connection(listener.getsockname()):
        accepting = acceptor_with(clock)
        accepting.start(listener)
        async with asyncio.timeout(30):
            while listener.num_attempts < 2 * LOG_INTERVAL_S + 2:
                await asyncio.sleep(0)
        accepting.stop_listening()
    assert [line.partition("(")[2].partition(" ")[0] for line in lines(caplog)[:3]] == ["1", "60", "60"]
