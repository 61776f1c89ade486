"""Which way the bytes of a leg go, agreed on from what both ends offer; knows no transport's inside."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ZMQ_TCP = "zmq_tcp"
SHARED_MEMORY = "shared_memory"
CUDA_IPC = "cuda_ipc"
NIXL = "nixl"

SENDS_BYTES = frozenset({ZMQ_TCP})
"""The producer sends the bytes; with all others, the consumer reads them out of the producer's pool."""

SAME_HOST_ONLY = frozenset({SHARED_MEMORY, CUDA_IPC})


@dataclass(frozen=True, slots=True)
class Reach:
    """What one worker offers."""

    host: str
    """Equal on two workers that share a machine's memory, and on no others."""
    transports: tuple[str, ...]
    """Ways it can take, the best first."""
    pools: Mapping[str, bytes] = field(default_factory=dict)
    """How others can read its pool, by transport."""

    def choose(self, host: str, wanted: tuple[str, ...]) -> str | None:
        """The first of a consumer's transports that this worker can serve; None if there is none."""
        for name in wanted:
            is_reachable = host == self.host or name not in SAME_HOST_ONLY
            if is_reachable and name in self.transports and (name in SENDS_BYTES or name in self.pools):
                return name
        return None


class Ways:
    """How a consumer reaches each rank of its producers: in all the ways it has, but those that failed."""

    def __init__(self, transports: tuple[str, ...]) -> None:
        self._transports = transports
        self._failed: dict[str, set[tuple[int, str]]] = {}
        """Rank and transport, by incarnation."""

    def to(self, producer: str, rank: int) -> tuple[str, ...]:
        failed = self._failed.get(producer, set())
        return tuple(name for name in self._transports if (rank, name) not in failed)

    def has_failed(self, producer: str, rank: int, transport: str) -> None:
        self._failed.setdefault(producer, set()).add((rank, transport))

    def forget(self, producer: str) -> None:
        """The next leg from it tries everything again."""
        self._failed.pop(producer, None)
