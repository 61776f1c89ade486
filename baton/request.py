"""What travels between gateway and workers about one request, and why a request ends."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from enum import Enum

from baton.errors import WireError
from baton.kv import KVTransferParams
from baton.sampling import SamplingParams
from baton.transfer import TransferRecord


class FinishReason(Enum):
    """Why a worker is done with a request. `HANDED_OVER` ends the prefill request; the decode request continues."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDED_OVER = "handed_over"


class ErrorKind(Enum):
    """Whose fault an error is. The kind decides what the gateway may do."""

    INVALID_REQUEST = "invalid_request"
    """No worker could serve the request; do not retry."""
    OVERLOADED = "overloaded"
    """Retry on another worker, or on this one later."""
    INTERNAL = "internal"
    """This worker failed. Another worker may succeed."""
    STEP_FAILED = "step_failed"
    """This worker can compute other requests, but not this one: its steps fail, or its logits are not finite.
    If a second worker reports the same, the request is at fault."""
    KV_LOAD_FAILED = "kv_load_failed"
    """The prompt did not arrive from the prefill worker; this worker is healthy."""
    GIVEN_BACK = "given_back"
    """This worker drains, changes its role or lacks blocks, its device or an earlier step failed, or its compiled
    grammar is at a limit. The request is not to blame. It continues on another worker, or here once there is room."""


class OnPreemption(Enum):
    """What a worker does with a request that must give up its blocks to other requests."""

    RESUME = "resume"
    """The request stays here, and continues when there is room again."""
    GIVE_BACK = "give_back"
    """The request ends with ErrorKind.GIVEN_BACK, and the gateway places it where there is room."""


SUSPECT_TURN_S = 10.0
"""How long other suspects wait for a suspect whose answer does not grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prefill, decode or local request as a worker receives it.

    `timeout_s` is a duration that starts when the worker reads the message: clocks of two machines are never
    compared. `cache_salt` isolates the prefix cache: only requests with equal salts share it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: int = 0
    """Lower values run first under the priority policy."""
    timeout_s: float | None = None
    cache_salt: str | None = None
    kv_transfer: KVTransferParams | None = None
    """None: the worker computes the prompt and decodes, all by itself."""
    output_token_ids: tuple[int, ...] = ()
    """Tokens of the answer that other workers have already sampled. The request continues after them as if it had never
    moved. The first token that this worker samples has position `len(output_token_ids)`; `sampling_params` still count
    from position 0."""
    on_preemption: OnPreemption = OnPreemption.RESUME
    caller: int = 0
    """A number for the caller, which hides the name. Callers take turns if work waits on a worker."""
    skip_reading_prefix_cache: bool = False
    """The request uses no blocks of a worker's prefix cache. Its own blocks are stored there as always."""
    is_suspect: bool = False
    """Workers have ended under this request. A worker begins one suspect at a time."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The token at one position, with its log-probability and rank. It is the sampled token, or the prompt's own.

    `top`: the likeliest tokens at this position, with their log-probabilities.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """TokenLogprobs at consecutive positions of a prompt, as three columns.

    All positions have the same number of likeliest tokens.

    A prompt may have 100,000 positions. One object for each would take 40 MiB, and half a second to encode or decode.
    """

    token_ids: bytes = b""
    """uint32: at each position its own token, then the likeliest tokens."""
    logprobs: bytes = b""
    """float32: the log-probability of each of these tokens."""
    ranks: bytes = b""
    """uint32: the rank of each position's own token."""

    def __post_init__(self) -> None:
        num_bytes, num_ranks = len(self.token_ids), len(self.ranks)
        is_whole = num_bytes % num_ranks == 0 if num_ranks and num_bytes else num_bytes == num_ranks
        if num_ranks % 4 or len(self.logprobs) != num_bytes or not is_whole:
            raise WireError(
                f"{num_bytes}, {len(self.logprobs)} and {num_ranks} bytes are not columns of one table"
            )

    @classmethod
    def of(cls, positions: Iterable[TokenLogprobs]) -> "PackedLogprobs":
        token_ids, logprobs, ranks = array("I"), array("f"), array("I")
        for each in positions:
            token_ids.extend((each.token_id, *(token_id for token_id, _ in each.top)))
            logprobs.extend((each.logprob, *(logprob for _, logprob in each.top)))
            ranks.append(each.rank)
        return cls(token_ids.tobytes(), logprobs.tobytes(), ranks.tobytes())

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def __iter__(self) -> Iterator[TokenLogprobs]:
        token_ids = memoryview(self.token_ids).cast("I").tolist()
        logprobs = memoryview(self.logprobs).cast("f").tolist()
        width = len(self.token_ids) // max(1, len(self.ranks))
        for own, rank in zip(
            range(0, len(token_ids), width or 1), memoryview(self.ranks).cast("I"), strict=True
        ):
            others = slice(own + 1, own + width)
            top = tuple(zip(token_ids[others], logprobs[others], strict=True))
            yield TokenLogprobs(token_ids[own], logprobs[own], rank, top)

    def __getitem__(self, positions: slice) -> "PackedLogprobs":
        """The log-probabilities at these positions, which must be consecutive."""
        first, end, _ = positions.indices(len(self))
        width = len(self.token_ids) // max(1, len(self))
        of_tokens = slice(first * width, end * width)
        return PackedLogprobs(
            self.token_ids[of_tokens], self.logprobs[of_tokens], self.ranks[4 * first : 4 * end]
        )

    def __add__(self, later: "PackedLogprobs") -> "PackedLogprobs":
        return PackedLogprobs(
            self.token_ids + later.token_ids, self.logprobs + later.logprobs, self.ranks + later.ranks
        )


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first new token as the prefill worker sampled it: token 0 unless the request has moved.

    The token arrives with the hand-over, so that the decode worker need not compute it again.
    """

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where one request on one worker spent its time, in seconds of the worker's own clock.

    Prefill and local requests: `queue_s`, then `prefill_s`. Decode requests: `queue_s` until the blocks were
    reserved, then `transfer_s` until the prompt had arrived or the transfer failed. `transfer_s` overlaps the
    prefill on the other side; `transfer_moving_s` is the part of it after the first block arrived. `prefill_s`
    follows if the prompt did not arrive and was computed here. `decode_s` lasts to the last token. If the prompt
    arrived, `decode_s` includes `first_step_s`, the time until this worker sampled its first token.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    transfer_moving_s: float = 0.0
    transfer_bytes: int = 0
    """Bytes of the prompt's KV if all of it arrived; else 0."""
    transport: str = ""
    """The transport that carried the blocks."""
    decode_s: float = 0.0
    first_step_s: float = 0.0
    transfers: tuple[TransferRecord, ...] = ()
    """Hand-overs that have ended, with times counted from the request's arrival here."""


@dataclass(slots=True)
class RequestOutput:
    """What one step produced for one request; treated as frozen like every message.

    The class is not actually frozen: there is one object for every token, and a frozen dataclass takes seven
    times as long to create. With 256 running requests, that is a third of a scheduler step. For the same reason,
    the fields of a usual step may be given by position: keywords would cost another tenth of the step.

    `first_position` is the output position of `token_ids[0]`. Positions make delivery idempotent: both workers of a
    hand-over report the first new token, and the reader keeps whichever arrives first.
    """

    request_id: str
    first_position: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    _: KW_ONLY
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended the request, if one did (EOS counts)."""
    error: str | None = None
    """What happened; set with `FinishReason.ERROR`, and with ABORT if the client did not request the abort."""
    error_kind: ErrorKind = ErrorKind.INTERNAL
    num_cached_tokens: int = 0
    """Prompt tokens this worker took from its own prefix cache."""
    num_draft_tokens: int = 0
    """Drafts that the step verified for the request."""
    num_accepted_draft_tokens: int = 0
    """How many of these drafts were accepted."""
    stage_times: StageTimes | None = None
    """Set in the output with this worker's first token, and in the output that ends the request. Sent once
    more, without tokens, when the handed-over blocks have been released."""
    prompt_logprobs: PackedLogprobs | None = None
    """Log-probabilities of the prompt's tokens but the first, if the request asked for them. They come with token 0,
    from the worker that computed the prompt."""
