"""Silence: how long producers have not answered; does not read messages."""

from baton.system.standstill import Standstill
from kv_transfer.protocol.messages import TransferKey

ProducerRank = tuple[str, int]
"""Incarnation and rank. Each rank is a process of its own; one may fail while the others run."""


class Silence:
    """Counts from a rank transfer's first question, or the producer's last message, but only while this process ran."""

    def __init__(self, heartbeat_s: float) -> None:
        self.standstill = Standstill(heartbeat_s)
        """Its owner calls `look` in every heartbeat while rank transfers ask."""
        self._asked_at: dict[TransferKey, float] = {}
        self._last_message_at: dict[ProducerRank, float] = {}

    def begin(self, key: TransferKey, now: float) -> None:
        """From now on the rank transfer asks its producer something every heartbeat."""
        self._asked_at[key] = self.standstill.running(now)

    def end(self, key: TransferKey) -> None:
        self._asked_at.pop(key, None)

    def on_message(self, key: TransferKey, now: float) -> None:
        """The rank transfer's producer has sent something."""
        self._last_message_at[_producer_of(key)] = self.standstill.running(now)

    def forget(self, producer: str) -> None:
        """No rank of this producer has a rank transfer any more."""
        self._last_message_at = {
            rank: when for rank, when in self._last_message_at.items() if rank[0] != producer
        }

    def seconds(self, key: TransferKey, now: float) -> float:
        """How long the producer has been silent, about this rank transfer or any other."""
        asked_at = self._asked_at[key]
        return self.standstill.running(now) - max(
            asked_at, self._last_message_at.get(_producer_of(key), asked_at)
        )


def _producer_of(key: TransferKey) -> ProducerRank:
    return key.producer, key.producer_rank
