"""RouteQuery and Placement: what the router is asked, and its answer."""

from collections.abc import Collection, Set
from dataclasses import dataclass
from enum import Enum

from baton.errors import RequestError

BlockHashes = dict[int, list[bytes]]
"""The hashes of a prompt's first blocks, by block size."""

Pair = tuple[str, str]
"""The names of a prefill and a decode worker."""


class Mode(Enum):
    """Where a prompt is computed: by a prefill worker, or by the decode worker itself."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """A request that needs a placement: a new one, or one that continues on other workers."""

    token_ids: tuple[int, ...]
    """The prompt and the answer delivered so far: everything to compute before the next token."""
    max_new_tokens: int
    """Most tokens that can follow."""
    cache_salt: str | None = None
    block_hashes: BlockHashes | None = None
    """Of its first tokens, as far as they are known; the router adds to them. None: they are forgotten at once."""
    skip_reading_prefix_cache: bool = False
    """Workers compute or load all of it, whatever they have cached."""
    affinity_key: str | None = None
    """Equal keys get the same workers where nothing else decides."""
    mode: Mode | None = None
    """The mode that the request requires, if any."""
    excluded: Collection[str] = ()
    """Names of workers that failed this request."""
    without_prefill: bool = False
    """Prefill workers failed it too often."""
    avoided: Set[Pair] = frozenset()
    """Pairs that cannot exchange KV at present. A request that requires a prefill worker gets one of them if there is
    no other pair."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of a request. `prefill` is None in local mode; `is_fallback`: disaggregation was wanted, but
    unavailable.
    """

    mode: Mode
    prefill: str | None
    decode: str
    is_fallback: bool = False
    reason: str = ""
    """Why there is no hand-over, in a few words: `asked for`, `short prompt`, `no prefill worker` ..."""
    num_prefill_tokens: int = 0
    """Prompt tokens that the computing worker does not have yet, as far as the router knows."""
    num_transfer_tokens: int = 0
    """Prompt tokens that the decode worker does not have yet and loads."""
    num_decode_blocks: int = 0
    """Blocks that the prompt and one more token take on the decode worker."""

    @property
    def pair(self) -> Pair | None:
        return None if self.prefill is None else (self.prefill, self.decode)


class NoRoom(RequestError):
    """Every worker that could take the request is full. The request may wait: other requests will make room."""
