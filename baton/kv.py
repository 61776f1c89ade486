"""References to KV cache across processes: who is who, what the bytes mean, and which transfer carries them."""

from dataclasses import dataclass, fields
from enum import Enum

from baton.errors import WireError

PROTOCOL_VERSION = 3

MAX_NAME_CHARS = 512
"""Of anything that is named or described; what quotes a few of them still fits into a message."""


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One life of one worker process. A restart at the same address is a new `incarnation`.

    Published by the worker; nothing of it ever comes from a client.
    """

    name: str
    incarnation: str
    kv_addresses: tuple[str, ...]
    """Where the KV plane of each of its tensor-parallel ranks listens."""
    block_size: int
    """Tokens in one of its KV blocks."""

    def __post_init__(self) -> None:
        if not self.kv_addresses or self.block_size < 1:
            num_ranks = len(self.kv_addresses)
            raise WireError(f"a worker of {num_ranks} ranks and blocks of {self.block_size} tokens")
        check_names(self.name, self.incarnation, *self.kv_addresses)


class TransferRole(Enum):
    """Which end of a hand-over a request is on."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class OnLoadFailure(Enum):
    """What a decode worker does about a prompt that does not arrive."""

    RECOMPUTE = "recompute"
    """Compute it itself."""
    REPORT = "report"
    """End the request with ErrorKind.KV_LOAD_FAILED: whoever sent it knows what to do."""


@dataclass(frozen=True, slots=True)
class KVTransferParams:
    """How one request takes part in a hand-over; minted by the gateway, never by a client.

    (transfer_id, attempt) names the hand-over on both sides; together with `peer.incarnation` nothing
    is ever correlated by an address or by an id that only one engine knows.
    """

    role: TransferRole
    transfer_id: str
    attempt: int
    peer: WorkerRef
    on_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE
    """For a consumer whose prompt does not arrive."""

    def __post_init__(self) -> None:
        check_names(self.transfer_id)


@dataclass(frozen=True, slots=True)
class KVFingerprint:
    """What two pools must agree on before a byte moves between them."""

    protocol_version: int
    model: str
    """Digest of the model's config and weight files, so that two fine-tunes at one path differ."""
    dtype: str
    layout: str
    """Axis order of a block, e.g. `LKTHD`; see engine/kv_cache.py."""
    num_layers: int
    num_kv_heads: int
    """Of all ranks together."""
    head_dim: int
    block_size: int
    """Need not be equal, nor need the next: see kv_transfer/protocol/geometry.py."""
    num_ranks: int

    def differences(self, other: "KVFingerprint") -> list[str]:
        """Each field that must be equal and is not, as `name: ours != theirs`."""
        return [
            f"{f.name}: {getattr(self, f.name)} != {getattr(other, f.name)}"
            for f in fields(self)
            if f.name not in ("block_size", "num_ranks") and getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """These can be hit from now on. A hash stands for everything up to its block's end, so it needs no parent."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These can be hit no more."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """Nothing can be hit any more."""


KVEvent = BlocksStored | BlocksRemoved | BlocksCleared
"""What changed in a worker's prefix cache. Replayed in order, events give exactly the set of hashes it holds."""


def check_names(*names: str) -> None:
    """WireError if one is so long that an answer which quotes it might be too large to be sent."""
    longest = max(map(len, names))
    if longest > MAX_NAME_CHARS:
        raise WireError(f"a name of {longest} characters; at most {MAX_NAME_CHARS} are allowed")
