"""RouteQuery and Placement: the input of the router, and its result."""

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass
from enum import Enum

from baton.errors import RequestError, WorkerUnavailable

BlockHashes = dict[int, list[bytes]]
"""The hashes of a prompt's first blocks, by block size."""

Pair = tuple[str, str]
"""The names of a prefill and a decode worker."""


class Mode(Enum):
    """Where a prompt is computed: by a prefill worker, or by the decode worker itself."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


class NoRoom(RequestError):
    """The request gets no place at present. It may wait: other requests will make room."""


class NoSlot(NoRoom):
    """Decode workers have enough free blocks, but already as many requests as they may have. A slot becomes free when
    one of these requests ends."""


class AwaitsPrompts(NoSlot):
    """Most slots are kept for requests whose prompts prefill workers have not computed yet. Another decode worker
    would not help."""


class NoDecodeWorker(WorkerUnavailable):
    """No decode worker may take the request at present. Clients get a WorkerUnavailable."""


class NoPrefillWorker(WorkerUnavailable):
    """No prefill worker may take the request at present, and it requires one. Clients get a WorkerUnavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """A request that needs a placement: a new one, or one that continues on other workers."""

    token_ids: tuple[int, ...]
    """The prompt and the answer delivered so far: everything to compute before the next token."""
    max_new_tokens: int
    """The largest number of tokens that can follow."""
    cache_salt: str | None = None
    block_hashes: BlockHashes | None = None
    """Known hashes of the first blocks. The router adds the hashes that it computes; with None, it does not
    keep them.
    """
    skip_reading_prefix_cache: bool = False
    """Workers do not use their prefix caches for this request."""
    affinity_key: str | None = None
    """Requests with equal keys get the same workers if these are otherwise equally good."""
    mode: Mode | None = None
    """The mode that the request requires, if any."""
    excluded: Collection[str] = ()
    """Names of workers that must not get this request: they failed it, refused it or gave it back; or it is a suspect,
    and another suspect has its turn there."""
    without_prefill: bool = False
    """Attempts with prefill workers failed too often, so the request must run on a decode worker alone."""
    avoided: Set[Pair] = frozenset()
    """Pairs that probably cannot exchange KV at present. A request that requires a prefill worker gets such a
    pair only if there is no other pair."""
    refusal_at: Callable[[str], RequestError | None] = lambda _: None
    """Why a decode worker with room must not get the request at present; None if it may get it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers of a request. `prefill` is None in local mode. `is_fallback` is true if a hand-over was
    wanted, but not possible.
    """

    mode: Mode
    prefill: str | None
    decode: str
    is_fallback: bool = False
    reason: str = ""
    """Why there is no hand-over, in a few words: `asked for`, `short prompt`, `no prefill worker` ... Empty
    with a hand-over."""
    num_prefill_tokens: int = 0
    """Prompt tokens that the computing worker does not have yet, as far as the router knows."""
    num_transfer_tokens: int = 0
    """Prompt tokens that the decode worker does not have yet, and loads."""
    num_decode_blocks: int = 0
    """How many blocks of the decode worker the prompt and one more token need."""

    @property
    def pair(self) -> Pair | None:
        return None if self.prefill is None else (self.prefill, self.decode)
