"""Silence: for how long producers have not answered; knows no message."""

from kv_transfer.protocol.messages import TransferKey

ProducerRank = tuple[str, int]
"""Incarnation and rank. Each rank is a process of its own, of which one may be gone while the others talk on."""


class Silence:
    """Counts from a leg's first question, or from the producer's last word, and only while we were awake ourselves."""

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._asked_at: dict[TransferKey, float] = {}
        self._heard_at: dict[ProducerRank, float] = {}
        self._awake_at = 0.0

    def begin(self, key: TransferKey, now: float) -> None:
        """From now on the leg asks its producer something every heartbeat."""
        self._asked_at[key] = now

    def end(self, key: TransferKey) -> None:
        self._asked_at.pop(key, None)

    def heard(self, key: TransferKey, now: float) -> None:
        """The leg's producer has said something."""
        self._heard_at[_producer_of(key)] = now

    def forget(self, producer: str) -> None:
        """None of its ranks has a leg any more."""
        self._heard_at = {rank: when for rank, when in self._heard_at.items() if rank[0] != producer}

    def seconds(self, key: TransferKey, now: float) -> float:
        """For how long the leg's producer has said nothing, about this leg or any other."""
        asked_at = self._asked_at[key]
        return now - max(asked_at, self._heard_at.get(_producer_of(key), asked_at))

    def stay_awake(self, now: float) -> None:
        """To be called every heartbeat while legs ask. Where it was not, this process stood still, and heard nobody."""
        slept_s = now - self._awake_at - self._heartbeat_s
        self._awake_at = now
        if slept_s > 0.0:
            self._asked_at = {key: min(now, when + slept_s) for key, when in self._asked_at.items()}
            self._heard_at = {rank: min(now, when + slept_s) for rank, when in self._heard_at.items()}


def _producer_of(key: TransferKey) -> ProducerRank:
    return key.producer, key.producer_rank
