"""Commands of the connector's scheduler half to its worker half, as values that could cross processes."""

from dataclasses import dataclass

from baton.kv import KVTransferParams
from baton.request import FirstToken


@dataclass(frozen=True, slots=True)
class BeginSend:
    """The engine has queued a request whose prompt it will compute for another worker."""

    request_id: str
    transfer: KVTransferParams
    num_tokens: int


@dataclass(frozen=True, slots=True)
class NoteStarvation:
    """Says whether the engine is starved: prompts for other workers are queued, but none of them has blocks to be
    computed in."""

    is_starved: bool


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """This step fills the blocks `block_ids`: the entries of the prompt's block table from `first_index` on. None
    stands for a block that no consumer needs."""

    request_id: str
    first_index: int
    block_ids: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class WithdrawBlocks:
    """The producing request was preempted: its blocks belong to other requests from this step on."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FinishSend:
    """The prompt is complete; `tail_block_ids` has its last, partly filled block of each KV group, if there is one."""

    request_id: str
    num_blocks: int
    tail_block_ids: tuple[int, ...]
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class AbortSend:
    """The producing request ended without handing over.

    `is_unneeded`: the request itself has ended, so its prompt is not needed any more. `is_held`: the blocks are freed
    only when no transfer reads them any more.
    """

    request_id: str
    reason: str
    is_unneeded: bool
    is_held: bool


@dataclass(frozen=True, slots=True)
class BeginLoad:
    """The engine has queued a request whose prompt another worker computes. That worker should keep the prompt's KV."""

    request_id: str
    transfer: KVTransferParams
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LoadBlocks:
    """The blocks `block_ids` are reserved: the entries of the prompt's block table from `first_index` on. None stands
    for a block that is not needed."""

    request_id: str
    first_index: int
    block_ids: tuple[int | None, ...]
    may_be_postponed: bool = True
    """False: the load continues even if the producer reports that it is stuck (`Opened.is_stuck`). Another rank
    transfer of this hand-over has arrived, so the prompt is complete."""


@dataclass(frozen=True, slots=True)
class AbortLoad:
    """The consuming request ended before its prompt arrived."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUpLoad:
    """The load failed or was postponed on another rank. End it on this rank, too, but keep what has arrived."""

    request_id: str
    reason: str
    is_unneeded: bool
    is_postponed: bool = False


ImmediateCommand = (
    BeginSend | NoteStarvation | WithdrawBlocks | FinishSend | AbortSend | BeginLoad | AbortLoad | GiveUpLoad
)


@dataclass(frozen=True, slots=True)
class KVConnectorMetadata:
    """The commands of one step, grouped by the time at which they may be carried out."""

    at_once: tuple[ImmediateCommand, ...]
    loads: tuple[LoadBlocks, ...]
    """Carried out after all earlier steps, which may still write these blocks for their former request."""
    after: tuple[SendBlocks, ...]
    """Carried out after this step, which fills these blocks."""
