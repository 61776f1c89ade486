"""Waits: when a consumer asks its producers again, and when it stops waiting for them; does not read messages."""

from collections.abc import Iterator

from baton.system.standstill import Standstill
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.protocol.timers import Timers

ProducerRank = tuple[str, int]
"""Incarnation and rank. Each rank is a process of its own; one may fail while the others run."""


class Waits:
    """What each rank transfer waits for. Time in which this process stood still is neither a producer's silence nor
    part of a load's time.
    """

    def __init__(self, heartbeat_s: float) -> None:
        self._heartbeat_s = heartbeat_s
        self._standstill = Standstill(heartbeat_s)
        self._questions: Timers[TransferKey] = Timers()
        self._deadlines: Timers[TransferKey] = Timers(self._standstill)
        self._due_at: dict[TransferKey, float] = {}
        """Deadlines of loads, also while they are postponed; these times and those below exclude standstills."""
        self._asked_at: dict[TransferKey, float] = {}
        self._last_message_at: dict[ProducerRank, float] = {}

    def begin(self, key: TransferKey, now: float) -> None:
        """From now on the rank transfer asks its producer something every heartbeat, unless pieces arrive."""
        self._asked_at[key] = self._standstill.running(now)

    def ask_later(self, key: TransferKey, now: float) -> None:
        """The next question is due in a heartbeat."""
        self._questions.set(key, now + self._heartbeat_s)

    def begin_load(self, key: TransferKey, timeout_s: float, now: float) -> None:
        """The load may take this long, including the time for which it is postponed."""
        self._due_at[key] = self._standstill.running(now) + timeout_s
        self._deadlines.set(key, now + timeout_s)

    def resume_load(self, key: TransferKey, now: float) -> None:
        """A postponed load waits again, for the rest of its time."""
        self._deadlines.set(key, now + self._due_at[key] - self._standstill.running(now))

    def on_message(self, key: TransferKey, now: float) -> None:
        """The rank transfer's producer has sent something."""
        self._last_message_at[_producer_of(key)] = self._standstill.running(now)

    def pause(self, key: TransferKey) -> None:
        """The rank transfer waits for nothing from its producer."""
        self._questions.cancel(key)
        self._deadlines.cancel(key)

    def end(self, key: TransferKey, is_last: bool) -> None:
        """The rank transfer has ended; `is_last`: so has every other from this producer, on any rank."""
        self.pause(key)
        self._due_at.pop(key, None)
        self._asked_at.pop(key, None)
        if is_last:
            self._last_message_at = {
                rank: when for rank, when in self._last_message_at.items() if rank[0] != key.producer
            }

    def pop_overdue(self, now: float) -> list[TransferKey]:
        """Loads whose time is up. Must be called in every heartbeat, which also notices standstills."""
        return list(self._deadlines.pop_due(now))

    def pop_questions(self, now: float) -> Iterator[tuple[TransferKey, float]]:
        """Rank transfers whose next question is due, and for how long their producers have been silent, about them or
        any other. To be consumed at once.
        """
        for key in list(self._questions.pop_due(now)):
            asked_at = self._asked_at[key]
            last_at = max(asked_at, self._last_message_at.get(_producer_of(key), asked_at))
            yield key, self._standstill.running(now) - last_at

    def next(self) -> float | None:
        """When a question or a deadline is due."""
        times = (self._questions.next(), self._deadlines.next())
        return min((when for when in times if when is not None), default=None)


def _producer_of(key: TransferKey) -> ProducerRank:
    return key.producer, key.producer_rank
