"""What a state machine wants done, as values; whoever drives it (a thread, a test, a simulation) does it."""

from dataclasses import dataclass

from baton.request import FirstToken
from kv_transfer.protocol.messages import ToConsumer, ToProducer, TransferKey

Peer = bytes | str
"""How the transport reaches the other end: the identity of who connected to us, or the address we connected to."""


@dataclass(frozen=True, slots=True)
class Send:
    peer: Peer
    message: ToProducer | ToConsumer


@dataclass(frozen=True, slots=True)
class SendBlock:
    """Send local block `block_id` as block `index` of the prompt."""

    peer: Peer
    key: TransferKey
    index: int
    block_id: int
    with_checksum: bool


@dataclass(frozen=True, slots=True)
class Freed:
    """Producer: nobody will read this request's blocks any more."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Received:
    """Consumer: every block of the request is verified."""

    request_id: str
    first_token: FirstToken
    num_blocks: int
    elapsed_s: float
    moving_s: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Consumer: the rest will not come; the first `num_valid_blocks` of the load are verified."""

    request_id: str
    num_valid_blocks: int
    reason: str
    is_cancelled: bool


@dataclass(frozen=True, slots=True)
class Quiesced:
    """Consumer: the load was given up and nothing writes its blocks any more."""

    request_id: str


Effect = Send | SendBlock | Freed | Received | Failed | Quiesced
