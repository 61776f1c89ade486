"""A channel without a network. It records what is sent, and receives what a test says."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from kv_transfer.protocol.effects import Peer
from kv_transfer.protocol.messages import (
    TO_CONSUMER,
    TO_PRODUCER,
    ToConsumer,
    ToProducer,
    TransferKey,
    Unreadable,
)
from kv_transfer.transport.base import Bytes


class RecordingChannel:
    """Keeps the latest messages sent. Their recipients must be able to read them."""

    address = "tcp://us:1"
    num_dropped = 0

    def __init__(self) -> None:
        self.payload: list[Bytes] = []
        self.seen: deque[TransferKey] = deque(maxlen=40)
        """Keys that appeared on the wire: an eavesdropper knows these."""
        self.sent: deque[ToProducer | ToConsumer] = deque(maxlen=40)

    def send(self, peer: Peer, header: bytes, payload: Sequence[Bytes] = ()) -> bool:
        codec: Any = TO_PRODUCER if isinstance(peer, str) else TO_CONSUMER
        message = codec.decode(header)
        self.sent.append(message)
        if not isinstance(message, Unreadable):
            self.seen.append(message.key)
        return True

    def read_payload(self) -> Iterator[Bytes]:
        return iter(self.payload)
