"""Silence: how long producers have not answered, and how long each may; does not read messages."""

from dataclasses import dataclass

from baton.system.adaptive_timeout import AdaptiveTimeout
from baton.system.standstill import Standstill
from kv_transfer.protocol.messages import TransferKey

ProducerRank = tuple[str, int]
"""Incarnation and rank. Each rank is a process of its own; one may fail while the others run."""

_REMEMBERED_TIMEOUTS = 12
"""A producer that has not been heard for this many times the timeout is forgotten."""


@dataclass(slots=True)
class _Heard:
    """What is known of a producer that has sent something."""

    last_at: float
    timeout: AdaptiveTimeout


class Silence:
    """Counts from a rank transfer's first question, or the producer's last message, but only while this process ran."""

    def __init__(self, heartbeat_s: float, timeout_s: float) -> None:
        self.standstill = Standstill(heartbeat_s)
        """Its owner calls `look` in every heartbeat while rank transfers ask."""
        self._timeout_s = timeout_s
        self._asked_at: dict[TransferKey, float] = {}
        self._heard: dict[ProducerRank, _Heard] = {}
        """Also of producers without a rank transfer at present: the next one need not learn anew."""

    def begin(self, key: TransferKey, now: float) -> None:
        """From now on the rank transfer asks its producer something every heartbeat."""
        self._asked_at[key] = running_s = self.standstill.running(now)
        oldest = running_s - _REMEMBERED_TIMEOUTS * self._timeout_s
        self._heard = {rank: heard for rank, heard in self._heard.items() if heard.last_at > oldest}

    def end(self, key: TransferKey) -> None:
        self._asked_at.pop(key, None)

    def on_message(self, key: TransferKey, now: float) -> None:
        """The rank transfer's producer has sent something."""
        running_s, pause_s = self.standstill.running(now), self.seconds(key, now)
        heard = self._heard.get(_producer_of(key))
        if heard is None:
            heard = self._heard[_producer_of(key)] = _Heard(running_s, AdaptiveTimeout(self._timeout_s))
        heard.timeout.on_message(pause_s, running_s)
        heard.last_at = running_s

    def seconds(self, key: TransferKey, now: float) -> float:
        """How long the producer has been silent, about this rank transfer or any other."""
        heard, since = self._heard.get(_producer_of(key)), self._asked_at[key]
        return self.standstill.running(now) - (since if heard is None else max(since, heard.last_at))

    def limit_s(self, key: TransferKey, now: float) -> float:
        """How long the producer may be silent."""
        heard = self._heard.get(_producer_of(key))
        return self._timeout_s if heard is None else heard.timeout.limit_s(self.standstill.running(now))


def _producer_of(key: TransferKey) -> ProducerRank:
    return key.producer, key.producer_rank
