"""Waits: when a consumer asks its producers again, and when it stops waiting for them; does not read messages."""

from dataclasses import dataclass

from baton.system.adaptive_timeout import AdaptiveTimeout
from baton.system.standstill import Standstill
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.protocol.timers import Timers

ProducerRank = tuple[str, int]
"""Incarnation and rank. Each rank is its own process; one may fail while the others run."""

_REMEMBERED_TIMEOUTS = 12
"""A producer that was silent for this many times the timeout is forgotten."""


@dataclass(slots=True)
class _KnownProducer:
    """What is known of a producer that has sent something."""

    last_message_at: float
    timeout: AdaptiveTimeout


class Waits:
    """The next question and the deadline of each rank transfer.

    A standstill of this process does not count as a producer's silence, nor as part of a load's time.
    """

    def __init__(self, heartbeat_s: float, timeout_s: float) -> None:
        """`timeout_s`: the longest that a producer may be silent."""
        self._heartbeat_s = heartbeat_s
        self._timeout_s = timeout_s
        self._standstill = Standstill(heartbeat_s)
        self._questions: Timers[TransferKey] = Timers()
        self._deadlines: Timers[TransferKey] = Timers(self._standstill)
        self._due_at: dict[TransferKey, float] = {}
        """Deadlines of loads; a postponed load keeps its own. These times and those below exclude standstills."""
        self._asked_at: dict[TransferKey, float] = {}
        self._known: dict[ProducerRank, _KnownProducer] = {}
        """What is known of each rank of a producer, even of ranks without a current rank transfer. The next rank
        transfer of such a rank uses this knowledge."""

    def begin(self, key: TransferKey, now: float) -> None:
        """Begins the rank transfer. Its producer's silence counts from now on. `ask_later` sets the first question."""
        self._asked_at[key] = running_s = self._standstill.running(now)
        oldest = running_s - _REMEMBERED_TIMEOUTS * self._timeout_s
        self._known = {rank: known for rank, known in self._known.items() if known.last_message_at > oldest}

    def ask_later(self, key: TransferKey, now: float) -> None:
        """Sets the next question one heartbeat from now."""
        self._questions.set(key, now + self._heartbeat_s)

    def begin_load(self, key: TransferKey, timeout_s: float, now: float) -> None:
        """Starts a load's deadline. A load that was postponed has only the rest of its time."""
        self._due_at.setdefault(key, self._standstill.running(now) + timeout_s)
        self.resume_load(key, now)

    def resume_load(self, key: TransferKey, now: float) -> None:
        """Lets a load's deadline run again after `pause`, for the rest of its time."""
        self._deadlines.set(key, now + self._due_at[key] - self._standstill.running(now))

    def on_message(self, key: TransferKey, now: float) -> None:
        """Notes that the rank transfer's producer has sent something."""
        running_s = self._standstill.running(now)
        pause_s = self._silent_s(key, running_s)
        new = _KnownProducer(running_s, AdaptiveTimeout(self._timeout_s))
        producer = self._known.setdefault(_producer_of(key), new)
        producer.timeout.on_message(pause_s, running_s)
        producer.last_message_at = running_s

    def pause(self, key: TransferKey) -> None:
        """Stops the question and the deadline, since the rank transfer waits for nothing from its producer."""
        self._questions.cancel(key)
        self._deadlines.cancel(key)

    def end(self, key: TransferKey) -> None:
        """Forgets a rank transfer that has ended."""
        self.pause(key)
        self._due_at.pop(key, None)
        self._asked_at.pop(key, None)

    def pop_overdue(self, now: float) -> list[TransferKey]:
        """Removes and returns overdue loads. Call it every heartbeat: it also notices standstills."""
        return self._deadlines.pop_due(now)

    def pop_questions(self, now: float) -> list[tuple[TransferKey, float, float]]:
        """Rank transfers whose next question is due, with their producer's silence and its limit.

        A message about any rank transfer of the producer ends its silence.
        """
        running_s, due = self._standstill.running(now), []
        for key in self._questions.pop_due(now):
            producer = self._known.get(_producer_of(key))
            limit_s = self._timeout_s if producer is None else producer.timeout.limit_s(running_s)
            due.append((key, self._silent_s(key, running_s), limit_s))
        return due

    def next(self) -> float | None:
        """The time of the next question or deadline."""
        times = (self._questions.next(), self._deadlines.next())
        return min((when for when in times if when is not None), default=None)

    def _silent_s(self, key: TransferKey, running_s: float) -> float:
        producer, asked_at = self._known.get(_producer_of(key)), self._asked_at[key]
        return running_s - (asked_at if producer is None else max(asked_at, producer.last_message_at))


def _producer_of(key: TransferKey) -> ProducerRank:
    return key.producer, key.producer_rank
