"""What the router is asked, and what it answers."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from baton.errors import RequestError


class Mode(Enum):
    """Where a prompt is computed: by a prefill worker, or by the decode worker itself."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """A request that needs a placement: a new one, or one that goes on elsewhere."""

    token_ids: tuple[int, ...]
    """The prompt, and what the client has of the answer: all that is to be computed before the next token."""
    max_new_tokens: int
    """At most this many follow."""
    cache_salt: str | None = None
    mode: Mode | None = None
    """What the request insists on."""
    excluded: Collection[str] = ()
    """Names of workers that failed it."""
    without_prefill: bool = False
    """Prefill workers failed it often enough."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who does what. `prefill` is None in local mode; `is_fallback`: disaggregation was wanted, but not to be had."""

    mode: Mode
    prefill: str | None
    decode: str
    is_fallback: bool = False
    reason: str = ""
    """Why the router chose this mode, in a few words: `asked for`, `short prompt`, `no prefill worker` ..."""
    num_prefill_tokens: int = 0
    """Those that whoever computes the prompt does not have yet, as far as the router knows."""
    num_transfer_tokens: int = 0
    """Those that the decode worker does not have yet and loads."""
    num_decode_blocks: int = 0
    """What the prompt and one token more take on the decode worker."""


class NoRoom(RequestError):
    """Every worker that could take the request is full at present. It may wait: room is made as others end."""
