"""References to KV cache across processes: workers, the meaning of their bytes, and the transfer that carries them."""

from dataclasses import dataclass, fields
from enum import Enum

from baton.errors import WireError
from baton.kv_groups import ONE_GROUP, KVGroups

PROTOCOL_VERSION = 7
"""Version of the KV plane; precedes every message, and increases whenever a message changes."""

HEADS_LAYOUT = "LKHTD"
"""Axes of a block with keys and values: layers, keys and values, heads, tokens, numbers of a head."""
LATENT_LAYOUT = "LTD"
"""Axes of a block with one latent per token, which all heads share: layers, tokens, numbers of a latent."""

MAX_NAME_CHARS = 512
"""Limit for every name and description, so that a message can quote a few of them."""

MAX_RANKS, MAX_BLOCK_SIZE = 2**10, 2**20
"""The most ranks of a worker, and the most tokens of a block. With far larger numbers, a peer's bytes could not even be
counted."""


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One incarnation of a worker. A restart at the same address is a new `incarnation`.

    Published by the worker; no field ever comes from a client.
    """

    name: str
    incarnation: str
    kv_addresses: tuple[str, ...]
    """Addresses of the KV plane, one for each tensor-parallel rank."""
    block_size: int
    """Tokens in one KV block."""

    def __post_init__(self) -> None:
        num_ranks = len(self.kv_addresses)
        if not (1 <= num_ranks <= MAX_RANKS and 1 <= self.block_size <= MAX_BLOCK_SIZE):
            raise WireError(
                f"invalid worker: {num_ranks} ranks and blocks of {self.block_size} tokens; allowed are 1 to "
                f"{MAX_RANKS} ranks, and 1 to {MAX_BLOCK_SIZE} tokens"
            )
        check_names(self.name, self.incarnation, *self.kv_addresses)


class TransferRole(Enum):
    """The end of a hand-over that a request is on."""

    PRODUCER = "producer"
    CONSUMER = "consumer"


class OnLoadFailure(Enum):
    """What a decode worker does if a prompt does not arrive."""

    RECOMPUTE = "recompute"
    """Compute the prompt itself."""
    REPORT = "report"
    """End the request with ErrorKind.KV_LOAD_FAILED; the gateway decides what follows."""


@dataclass(frozen=True, slots=True)
class KVTransferParams:
    """How one request takes part in a hand-over; minted by the gateway, never by a client.

    (transfer_id, attempt) identifies the hand-over on both sides. To name it, both sides need only these values and
    the two incarnations: no address, and no id that only one engine knows.
    """

    role: TransferRole
    transfer_id: str
    attempt: int
    peer: WorkerRef
    on_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE
    """What a consumer does if its prompt does not arrive."""

    def __post_init__(self) -> None:
        check_names(self.transfer_id)


@dataclass(frozen=True, slots=True)
class KVFingerprint:
    """What two pools must agree on before a byte moves between them."""

    protocol_version: int
    model: str
    """Digest of the model's config and weight files. It differs even between two models that were stored at the same
    path."""
    dtype: str
    layout: str
    """Axis order of a block: `HEADS_LAYOUT` or `LATENT_LAYOUT`; see engine/kv_cache.py."""
    num_layers: int
    num_kv_heads: int
    """KV heads of all ranks together."""
    head_dim: int
    block_size: int
    """`block_size` and `num_ranks` may differ between the pools: see kv_transfer/protocol/geometry.py."""
    num_ranks: int
    groups: KVGroups = ONE_GROUP
    """The KV groups of the layers."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.num_ranks < 1:
            raise WireError(f"{self.block_size} tokens in a block, {self.num_ranks} ranks")

    @property
    def num_planes(self) -> int:
        """How many planes the blocks of all KV groups have: two per layer with keys and values, one with latents."""
        return self.num_layers * (2 if "K" in self.layout else 1)

    @property
    def num_divided_heads(self) -> int | None:
        """The number of heads that are divided among the ranks; None: every rank stores all KV."""
        return self.num_kv_heads if "H" in self.layout else None

    def differences(self, other: "KVFingerprint") -> list[str]:
        """Each field that must be equal and differs, as `name: ours != theirs`."""
        return [
            f"{f.name}: {getattr(self, f.name)} != {getattr(other, f.name)}"
            for f in fields(self)
            if f.name not in ("block_size", "num_ranks") and getattr(self, f.name) != getattr(other, f.name)
        ]


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that can be hit from now on. A hash covers all tokens up to its block's end."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks can no longer be hit."""

    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The cache is empty."""


KVEvent = BlocksStored | BlocksRemoved | BlocksCleared
"""A change of a worker's prefix cache. All events, in order, give exactly the set of hashes in the cache."""


def check_names(*names: str) -> None:
    """Raises WireError for a long name: a reply that quotes the name might exceed the size limit."""
    longest = max(map(len, names))
    if longest > MAX_NAME_CHARS:
        raise WireError(f"a name has {longest} characters; at most {MAX_NAME_CHARS} are allowed")
