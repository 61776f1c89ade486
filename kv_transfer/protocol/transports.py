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
