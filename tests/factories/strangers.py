"""Connections from which no request comes."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def strangers(port: int | None, number: int, say: bytes = b"") -> Iterator[list[socket.socket]]:
    """They connect, say this and then nothing."""
    with ExitStack() as stack:
        opened = []
        for _ in range(number):
            opened.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60.0)))
            opened[-1].sendall(say)
        yield opened


def is_closed(stranger: socket.socket) -> bool:
    """Whether the server has closed the connection. Reads and drops what the server sent before."""
    stranger.setblocking(False)
    try:
        while stranger.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True
