"""The contract between scheduler and model runner: one frozen plan per step, and its results.

A plan is complete: a runner needs nothing else, so a runner can be in another process, or be a fake of twenty
lines.
"""

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any

from baton.request import FirstToken, PackedLogprobs, RequestOutput, TokenLogprobs
from baton.sampling import SamplingParams
from baton.transfer import TransferRecord


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """Everything a runner must know about a request that is new to it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    """Tokens already sampled: on other workers, or here before the runner had to forget the request."""
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    """Includes EOS; masked until `min_tokens`."""
    block_ids: tuple[int, ...]
    num_computed_tokens: int
    is_loaded: bool = False
    """The KV of its computed tokens came from another worker."""


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """What changed for requests the runner knows, as parallel tuples in scheduling order."""

    request_ids: tuple[str, ...] = ()
    new_block_ids: tuple[tuple[int, ...], ...] = ()
    num_computed_tokens: tuple[int, ...] = ()
    resumed_num_tokens: Mapping[str, int] = field(default_factory=dict)
    """The requests that resume after a preemption. For each one: how many of its tokens are still valid, since a token
    in flight may have been discarded.

    The requests' `new_block_ids` replace the old table instead of extending it.
    """

    @property
    def resumed_request_ids(self) -> Set[str]:
        return self.resumed_num_tokens.keys()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: which requests run, how many tokens of each, in which blocks."""

    scheduled_new_reqs: tuple[NewRequestData, ...]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: Mapping[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: frozenset[str]
    finished_req_ids: frozenset[str]
    """The runner forgets these requests: since the previous plan they finished, or must begin anew."""
    kv_connector_metadata: Any = None
    """Commands from the connector's scheduler half to its worker half; opaque to all others."""
    swap_out: tuple[tuple[int, int], ...] = ()
    """Pairs (block, host block). Before anything else in this step, each block is copied to its host block. The
    requests of these blocks were preempted."""
    swap_in: tuple[tuple[int, int], ...] = ()
    """Pairs (host block, block). After `swap_out`, before the step computes, each host block is copied to its block.
    The requests of these blocks are resumed."""
    step: int = 0
    """The number of this plan among the plans of its scheduler."""
    scheduled_spec_decode_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By request: the drafts that this step verifies. They are the last of its `num_scheduled_tokens` tokens."""
    forced_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By request: tokens that follow the sampled token of the last step, and were forced instead of sampled; see
    ModelRunnerOutput. The runner appends them even if the request is not in this step."""

    @property
    def is_empty(self) -> bool:
        """Whether the step has nothing to compute or copy, and no preemption. The runner may still have requests to
        forget."""
        return not (self.num_scheduled_tokens or self.preempted_req_ids)

    def num_computed_tokens(self) -> dict[str, int]:
        """By request of this step: the number of its tokens that were computed before."""
        cached = self.scheduled_cached_reqs
        num_computed = dict(zip(cached.request_ids, cached.num_computed_tokens, strict=True))
        return num_computed | {new.request_id: new.num_computed_tokens for new in self.scheduled_new_reqs}


NON_FINITE = "the model computed logits that are not finite"


@dataclass(frozen=True, slots=True)
class ChunkLogprobs:
    """Prompt logprobs of consecutive tokens of one request, from one step."""

    first_position: int
    """The position of the first of these tokens in the prompt, at least 1."""
    logprobs: PackedLogprobs


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Sampled tokens by request; a request whose prompt is incomplete sampled nothing and is absent."""

    sampled_token_ids: Mapping[str, list[int]]
    """With drafts: the accepted drafts, up to the first rejected one, and one more sampled token."""
    logprobs: Mapping[str, list[TokenLogprobs]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    """Requests that cannot continue, and why: their structured output can no longer be matched."""
    non_finite: Set[str] = frozenset()
    """Requests whose logits were not finite: none of their tokens, and nothing that they cached, can be trusted."""
    draft_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Drafts for the tokens that follow the sampled ones. A later step verifies them."""
    forced_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The tokens after those sampled, where the request's grammar leaves no choice."""
    unforeseeable: Set[str] = frozenset()
    """Requests that sampled a token, and whose next step may return several tokens or new drafts. So the output of
    their next step must be known before a further step is planned. Requests with drafts may be left out."""
    prompt_logprobs: Mapping[str, ChunkLogprobs] = field(default_factory=dict)
    """For requests that ask for prompt logprobs: the prompt logprobs of each token whose predecessor is in this
    step."""
    worn: Mapping[str, str] = field(default_factory=dict)
    """Requests that only a newly compiled grammar can continue, and why: their compiled grammar is at a limit."""


@dataclass(frozen=True, slots=True)
class ReceivedKV:
    """Every block of a remote prompt arrived and was verified. No transfer writes to these blocks any more."""

    request_id: str
    first_token: FirstToken
    num_bytes: int
    elapsed_s: float
    """Time from asking the producer for the blocks until its `End` arrived; overlaps the prefill."""
    moving_s: float
    """The part of `elapsed_s` after the first block arrived."""
    transport: str = ""


@dataclass(frozen=True, slots=True)
class FailedKV:
    """A remote prompt will not arrive; no transfer writes to its blocks any more.

    The first `num_valid_blocks` blocks of the load were verified in order and may be kept.
    """

    request_id: str
    num_valid_blocks: int
    reason: str
    is_unneeded: bool = False
    """The producer ended the request itself: it was cancelled, or its first token was the whole answer. Its prompt must
    not be recomputed."""
    is_postponed: bool = False
    """The load is postponed. `KVConnectorOutput.can_load` names the request once the load may begin again."""


@dataclass(frozen=True, slots=True)
class KVConnectorOutput:
    """Events from the connector's worker half. Events are hints: unknown and repeated ones are ignored."""

    finished_sending: tuple[str, ...] = ()
    """Finished prefills whose leased blocks were read, released or expired."""
    finished_recving: tuple[ReceivedKV, ...] = ()
    failed_recving: tuple[FailedKV, ...] = ()
    quiesced: tuple[str, ...] = ()
    """Aborted loads whose quarantined blocks will not be written any more."""
    transfers: Mapping[str, TransferRecord] = field(default_factory=dict)
    """Records of hand-overs, by request; each comes with the event that the blocks were read, arrived or failed."""
    can_load: tuple[str, ...] = ()
    """Postponed loads that wait for room again: their prompts are now complete, or lost."""
    unwanted: tuple[str, ...] = ()
    """Producers whose prompts no consumer will load any more."""

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))

    def __add__(self, later: "KVConnectorOutput") -> "KVConnectorOutput":
        return KVConnectorOutput(
            self.finished_sending + later.finished_sending,
            self.finished_recving + later.finished_recving,
            self.failed_recving + later.failed_recving,
            self.quiesced + later.quiesced,
            {**self.transfers, **later.transfers},
            self.can_load + later.can_load,
            self.unwanted + later.unwanted,
        )


class ClientOutputs(defaultdict[str, list[RequestOutput]]):
    """The outputs of one step, or of one change between two steps, by client (a gateway)."""

    def __init__(self) -> None:
        super().__init__(list)
