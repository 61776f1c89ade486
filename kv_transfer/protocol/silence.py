"""Silence: for how long producers have not answered; knows no message."""

from baton.system.standstill import Standstill
from kv_transfer.protocol.messages import TransferKey

ProducerRank = tuple[str, int]
"""Incarnation and rank. Each rank is a process of its own, of which one may be gone while the others talk on."""


class Silence:
    """Counts from a leg's first question, or from the producer's last word, and only while we were awake ourselves."""

    def __init__(self, heartbeat_s: float) -> None:
        self.standstill = Standstill(heartbeat_s)
        """To be looked at in every heartbeat while legs ask."""
        self._asked_at: dict[TransferKey, float] = {}
        self._heard_at: dict[ProducerRank, float] = {}

    def begin(self, key: TransferKey, now: float) -> None:
        """From now on the leg asks its producer something every heartbeat."""
        self._asked_at[key] = self.standstill.running(now)

    def end(self, key: TransferKey) -> None:
        self._asked_at.pop(key, None)

    def heard(self, key: TransferKey, now: float) -> None:
        """The leg's producer has said something."""
        self._heard_at[_producer_of(key)] = self.standstill.running(now)

    def forget(self, producer: str) -> None:
        """None of its ranks has a leg any more."""
        self._heard_at = {rank: when for rank, when in self._heard_at.items() if rank[0] != producer}

    def seconds(self, key: TransferKey, now: float) -> float:
        """For how long the leg's producer has said nothing, about this leg or any other."""
        asked_at = self._asked_at[key]
        return self.standstill.running(now) - max(asked_at, self._heard_at.get(_producer_of(key), asked_at))


def _producer_of(key: TransferKey) -> ProducerRank:
    return key.producer, key.producer_rank
