"""What travels between gateway and workers about one request, and why a request ends."""

from dataclasses import dataclass
from enum import Enum

from baton.kv import KVTransferParams
from baton.sampling import SamplingParams
from baton.transfer import TransferRecord


class FinishReason(Enum):
    """Why a worker is done with a request. `HANDED_OVER` ends the prefill leg; the decode leg goes on."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDED_OVER = "handed_over"


class ErrorKind(Enum):
    """Whose fault an error is, and so what the reader may do about it."""

    INVALID_REQUEST = "invalid_request"
    """Nobody could serve it; do not try again."""
    OVERLOADED = "overloaded"
    """Another worker, or this one later."""
    INTERNAL = "internal"
    """This worker failed; another one may not."""
    KV_LOAD_FAILED = "kv_load_failed"
    """The prompt did not arrive from the prefill worker; this worker is well."""
    GIVEN_BACK = "given_back"
    """This worker is well, but drains, changes its role or ran out of blocks: the request goes on elsewhere."""


class OnPreemption(Enum):
    """What a worker does with a request that has to give up its blocks to others."""

    RESUME = "resume"
    """It stays here, and goes on when there is room again."""
    GIVE_BACK = "give_back"
    """It ends with ErrorKind.GIVEN_BACK: whoever sent it knows where there is room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One leg of a client's request as a worker receives it.

    `timeout_s` is a duration that starts when the worker reads the message: clocks of two machines
    are never compared. `cache_salt` isolates the prefix cache; equal salts share, different ones never.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: int = 0
    """Lower runs first under the priority policy."""
    timeout_s: float | None = None
    cache_salt: str | None = None
    kv_transfer: KVTransferParams | None = None
    """None: the worker computes the prompt and decodes, all by itself."""
    output_token_ids: tuple[int, ...] = ()
    """What other workers sampled of the answer already. The request goes on behind it as if it had never moved: the
    first token from here has position `len(output_token_ids)`, and `sampling_params` still count from position 0."""
    on_preemption: OnPreemption = OnPreemption.RESUME


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the sampled token's, its rank, and the likeliest tokens', best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first new token as the prefill worker sampled it, which is token 0 unless the request has moved.

    It rides with the hand-over so that nothing is computed twice.
    """

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where one leg of a request spent its time, in seconds of the worker's own clock.

    Prefill leg and local requests: `queue_s` then `prefill_s`. Decode leg: `queue_s` until its blocks were
    reserved, then `transfer_s` until the last block was verified or the transfer failed (this overlaps the prefill
    of the other side), of which `transfer_moving_s` from the first block's arrival on; then `prefill_s` if the prompt
    did not arrive and was computed here. Then `decode_s` to the last token; in it, `first_step_s` until this worker had
    sampled its first token behind a prompt that came from elsewhere.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    transfer_moving_s: float = 0.0
    transfer_bytes: int = 0
    """Of a prompt that arrived whole; else 0."""
    transport: str = ""
    """Which way the blocks came."""
    decode_s: float = 0.0
    first_step_s: float = 0.0
    transfers: tuple[TransferRecord, ...] = ()
    """Hand-overs that are over, counted from the request's arrival here."""


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """News of one request after one step; treated as frozen like every message.

    It is not frozen in earnest because there is one for every token, and making a frozen one takes seven times as long:
    a third of a scheduler step with 256 running requests.

    `first_position` is the output position of `token_ids[0]`: positions make delivery idempotent, since both
    workers of a hand-over report the first new token and the reader keeps whichever comes first.
    """

    request_id: str
    first_position: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request, where one did (EOS counts)."""
    error: str | None = None
    """What happened; set with `FinishReason.ERROR`, and with ABORT where the client did not ask for it."""
    error_kind: ErrorKind = ErrorKind.INTERNAL
    num_cached_tokens: int = 0
    """Prompt tokens this worker took from its own prefix cache."""
    stage_times: StageTimes | None = None
    """Set with this worker's first token, as of then; with the finish; and once more, by itself, when what was handed
    over has been released."""
