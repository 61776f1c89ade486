"""Unreachable: ways that did not lead to a producer's pool, until they are worth another try; knows no message."""

from kv_transfer.protocol.messages import TransferKey

RETRY_S = 30.0
"""A way that failed is tried again after this long: a peer that always has traffic would otherwise lose it for good."""


class Unreachable:
    """By the producer's rank, for as long as the producer has legs."""

    def __init__(self) -> None:
        self._until: dict[tuple[str, int], dict[str, float]] = {}

    def add(self, key: TransferKey, transport: str, now: float) -> None:
        """The leg's producer could not be read in this way."""
        self._until.setdefault((key.producer, key.producer_rank), {})[transport] = now + RETRY_S

    def of(self, key: TransferKey, now: float) -> set[str]:
        """The ways that are not worth trying for this leg."""
        ways = self._until.get((key.producer, key.producer_rank), {})
        return {transport for transport, until in ways.items() if now < until}

    def forget(self, producer: str) -> None:
        """It has no leg any more."""
        for place in [place for place in self._until if place[0] == producer]:
            del self._until[place]
