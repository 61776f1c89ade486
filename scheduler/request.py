"""One request as the scheduler sees it, and the only ways its status may change.

              +--- preempt: to recompute, or to swap in ----+
              v                                             |
(add) --> WAITING / PREEMPTED -- blocks, budget granted --> RUNNING --> FINISHED_
            |      ^                                          STOPPED        EOS or a stop token
            |      | received, postponed, or failed           LENGTH_CAPPED  max_tokens, max_model_len
  blocks    |      | and to be recomputed                     HANDED_OVER    one token sampled; D goes on
  reserved  v      |                                          ABORTED, ERROR, GIVEN_BACK (from every state,
          WAITING_FOR_REMOTE_KVS                                              not only from RUNNING)

(add) --> WAITING_FOR_FSM -- grammar compiled --> WAITING        PREEMPTED -- its step failed --> WAITING
"""

from collections.abc import Iterable
from enum import Enum, auto

from baton.kv import KVTransferParams, OnLoadFailure, TransferRole
from baton.request import FinishReason, FirstToken, OnPreemption, PackedLogprobs
from baton.sampling import SamplingParams
from baton.step import ChunkLogprobs
from scheduler.block_table import BlockTable

QueueKey = tuple[float | str, ...]
"""Waiting requests with lower keys come first."""


class RequestStatus(Enum):
    """The state of a request; see the drawing above.

    Python looks up a member of an Enum slowly. So loops over a step's requests look it up once, before they begin.
    """

    WAITING = auto()
    WAITING_FOR_FSM = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_HANDED_OVER = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()
    FINISHED_GIVEN_BACK = auto()


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_HANDED_OVER: FinishReason.HANDED_OVER,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_GIVEN_BACK: FinishReason.ERROR,
}

_ENDS_ANYWHERE = {
    RequestStatus.FINISHED_ABORTED,
    RequestStatus.FINISHED_ERROR,
    RequestStatus.FINISHED_GIVEN_BACK,
}

_ENDS_WITH_A_TOKEN = {
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_HANDED_OVER,
}

# A token can end a waiting request: a token in flight at its preemption, or one received with its prompt.
LEGAL_MOVES: dict[RequestStatus, set[RequestStatus]] = {
    RequestStatus.WAITING: {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS}
    | _ENDS_WITH_A_TOKEN
    | _ENDS_ANYWHERE,
    RequestStatus.WAITING_FOR_FSM: {RequestStatus.WAITING} | _ENDS_ANYWHERE,
    RequestStatus.WAITING_FOR_REMOTE_KVS: {RequestStatus.WAITING} | _ENDS_ANYWHERE,
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED} | _ENDS_WITH_A_TOKEN | _ENDS_ANYWHERE,
    RequestStatus.PREEMPTED: {RequestStatus.RUNNING, RequestStatus.WAITING}
    | _ENDS_WITH_A_TOKEN
    | _ENDS_ANYWHERE,
}


class Request:
    """A request's progress: steps raise `num_computed_tokens` to `num_tokens`, in prefill and decode."""

    __slots__ = (
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "block_table",
        "cache_salt",
        "client_id",
        "first_token",
        "is_consumer",
        "is_finished",
        "is_producer",
        "is_unforeseeable",
        "kv_transfer",
        "max_num_tokens",
        "may_load",
        "next_hash_at",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_futile_preemptions",
        "num_hit_tokens",
        "num_initial_tokens",
        "num_output_placeholders",
        "num_prompt_tokens",
        "num_tokens_at_preemption",
        "on_preemption",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "queue_key",
        "request_id",
        "sampling_params",
        "skip_reading_prefix_cache",
        "spec_token_ids",
        "status",
        "stop_token_ids",
        "swapped_block_ids",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...] | list[int],
        sampling_params: SamplingParams,
        *,
        arrival_time: float = 0.0,
        priority: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        client_id: str = "",
        cache_salt: str | None = None,
        kv_transfer: KVTransferParams | None = None,
        output_token_ids: Iterable[int] = (),
        on_preemption: OnPreemption = OnPreemption.RESUME,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        """`output_token_ids` were sampled on other workers; the request continues after them."""
        assert prompt_token_ids, f"request {request_id} has an empty prompt"
        self.request_id = request_id
        self.prompt_token_ids = tuple(prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.sampling_params = sampling_params
        self.stop_token_ids = sampling_params.stop_ids(eos_token_ids)
        self.arrival_time = arrival_time
        self.priority = priority
        self.client_id = client_id
        self.cache_salt = cache_salt
        self.kv_transfer = kv_transfer
        role = kv_transfer.role if kv_transfer is not None else None
        self.is_producer = role is TransferRole.PRODUCER
        """This worker computes the initial tokens for another worker, and the request stops after one new token."""
        self.is_consumer = role is TransferRole.CONSUMER
        """The KV of its initial tokens comes from another worker."""
        self.on_preemption = on_preemption

        has_grammar = sampling_params.structured_output is not None
        self.status = RequestStatus.WAITING_FOR_FSM if has_grammar else RequestStatus.WAITING
        self.is_finished = False
        self.all_token_ids: list[int] = [*self.prompt_token_ids, *output_token_ids]
        self.num_initial_tokens = len(self.all_token_ids)
        """Number of initial tokens: the prompt, and output sampled on other workers. A producer computes the
        initial tokens and hands them over; a consumer receives them. The first new token follows them."""
        wants_prompt_logprobs = sampling_params.prompt_logprobs is not None and self.num_output_tokens == 0
        self.prompt_logprobs = PackedLogprobs() if wants_prompt_logprobs and not self.is_consumer else None
        """Log-probabilities of the prompt's tokens, as far as they are computed; the first token has none. None: they
        are not wanted, or were reported."""
        self.skip_reading_prefix_cache = skip_reading_prefix_cache or self.prompt_logprobs is not None
        """Also true if log-probabilities of the prompt are wanted, since all of the prompt must then be computed."""
        self.max_num_tokens = self.num_prompt_tokens + sampling_params.max_tokens
        """The request ends at this number of prompt and output tokens, or earlier. The scheduler lowers it to
        what fits the engine."""
        if self.is_producer:
            self.max_num_tokens = min(self.max_num_tokens, self.num_initial_tokens + 1)
        self.num_computed_tokens = 0
        """Tokens whose KV is in the request's blocks, or will be after all planned steps."""
        self.num_output_placeholders = 0
        """Tokens that current steps will sample: they have a position, but no id yet."""
        self.spec_token_ids: tuple[int, ...] = ()
        """Drafts: guesses of its next tokens, which its next step verifies; see Speculation."""
        self.is_unforeseeable = False
        """Its next sampling step may return several tokens, or drafts for the step after it; see
        Speculation."""
        self.was_admitted = False
        """The request got blocks at least once, to compute or to load its prompt."""
        self.num_cached_tokens = 0
        """Prompt tokens found in this worker's prefix cache at first admission."""
        self.num_hit_tokens = 0
        """How many tokens, from the first on, its latest load left out as prefix-cache hits; set by RemotePrompts."""
        self.num_futile_preemptions = 0
        """Preemptions in a row, without a token sampled in between."""
        self.num_tokens_at_preemption = 0
        self.may_load = self.is_consumer
        """Its initial tokens come from another worker, and their load has not started or was postponed."""
        self.block_hashes: list[bytes] = []
        """One hash per full block of `all_token_ids`, computed when the block's last token arrives."""
        self.next_hash_at = 0
        """The number of tokens that makes the next block full."""
        self.block_table: BlockTable | None = None
        """Its blocks on the device; written by KVCache."""
        self.swapped_block_ids: tuple[int, ...] = ()
        """While preempted: host blocks with the KV of its first `num_computed_tokens` tokens; written by
        SwapSpace."""
        self.queue_key: QueueKey = ()
        """Its place in the queue: a key of `Order`, written by Admission and Preemption."""
        self.first_token: FirstToken | None = None
        """On the producer: the first new token, which is handed over with the prompt."""

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_prefilling(self) -> bool:
        """Some of its initial tokens are not computed yet."""
        return self.num_computed_tokens < self.num_initial_tokens

    @property
    def is_handed_over(self) -> bool:
        return self.status is RequestStatus.FINISHED_HANDED_OVER

    @property
    def is_failed(self) -> bool:
        return self.status is RequestStatus.FINISHED_ERROR

    @property
    def is_given_back(self) -> bool:
        return self.status is RequestStatus.FINISHED_GIVEN_BACK

    @property
    def must_report_failure(self) -> bool:
        """Whether the request must fail if its prompt does not arrive. Otherwise, this worker computes the prompt."""
        return self.kv_transfer is not None and self.kv_transfer.on_failure is OnLoadFailure.REPORT

    def add_prompt_logprobs(self, latest: ChunkLogprobs) -> None:
        """Adds log-probabilities of the prompt. After a preemption, they replace those of the same tokens."""
        if self.prompt_logprobs is None:
            return
        num_before = latest.first_position - 1
        assert num_before <= len(self.prompt_logprobs), (
            f"{self.request_id}: log-probabilities of some prompt tokens are missing"
        )
        self.prompt_logprobs = self.prompt_logprobs[:num_before] + latest.logprobs

    def count_preemption(self) -> None:
        is_futile = self.num_tokens == self.num_tokens_at_preemption
        self.num_futile_preemptions = self.num_futile_preemptions + 1 if is_futile else 0
        self.num_tokens_at_preemption = self.num_tokens

    def move_to(self, status: RequestStatus) -> None:
        """Changes the status; no other code does. An illegal change is a bug in Baton."""
        allowed = LEGAL_MOVES.get(self.status, set())
        assert status in allowed, (
            f"request {self.request_id} cannot go from {self.status.name} to {status.name}"
        )
        self.status = status
        self.is_finished = status in FINISH_REASONS
