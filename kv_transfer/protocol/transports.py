"""The choice of a rank transfer's transport from what both ends offer; knows no transport's details."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ZMQ_TCP = "zmq_tcp"
SHARED_MEMORY = "shared_memory"
CUDA_IPC = "cuda_ipc"
NIXL = "nixl"

SENDS_BYTES = frozenset({ZMQ_TCP})
"""Over these transports, the producer sends the bytes. Over all others, the consumer reads the producer's pool."""

SAME_HOST_ONLY = frozenset({SHARED_MEMORY, CUDA_IPC})


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """What one worker offers."""

    host: str
    """Identifies a machine: equal for two workers only if they share its memory."""
    transports: tuple[str, ...]
    """Transports that the worker can use, the best first."""
    pools: Mapping[str, bytes] = field(default_factory=dict)
    """By transport: how other workers can read this worker's pool."""

    def choose(self, host: str, wanted: tuple[str, ...]) -> str | None:
        """The first of a consumer's transports that this worker can serve; None if there is none."""
        for name in wanted:
            is_reachable = host == self.host or name not in SAME_HOST_ONLY
            if is_reachable and name in self.transports and (name in SENDS_BYTES or name in self.pools):
                return name
        return None


RETRY_S = 30.0
"""Time until a failed transport is tried again. Without a retry, the consumer would never use it with this producer
again."""
ONLY_RETRY_S = 1.0
"""The same time if the failed transport is the consumer's only one."""


class TransportChoices:
    """For each rank of a producer: all of the consumer's transports, except those that failed recently."""

    def __init__(self, transports: tuple[str, ...]) -> None:
        self._transports = transports
        self._failed_until: dict[tuple[str, int, str], float] = {}
        """By the producer's incarnation, rank and transport: when the transport may be tried again."""

    def usable_to(self, producer: str, rank: int, now: float) -> tuple[str, ...]:
        """The transports that may be used to this rank now, the best first."""
        until = self._failed_until
        return tuple(name for name in self._transports if now >= until.get((producer, rank, name), now))

    def note_failure(self, producer: str, rank: int, transport: str, now: float) -> None:
        """Remembers the failure, and forgets failures that do not count any more."""
        self._failed_until = {key: when for key, when in self._failed_until.items() if when > now}
        pause_s = RETRY_S if len(self._transports) > 1 else ONLY_RETRY_S
        self._failed_until[producer, rank, transport] = now + pause_s
