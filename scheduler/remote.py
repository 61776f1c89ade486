"""RemotePrompts: the scheduler's part of a hand-over, on P and on D.

A hand-over transfers the KV of a request's initial tokens: its prompt and, after a move, the output sampled on other
workers. Only requests with `kv_transfer` take part, except in `free_or_hold`, which frees the blocks of any ended
request. The connector moves the bytes. The scheduler knows only the connector's six calls (KVConnector), which
`worker.kv_connector_scheduler` implements.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from baton.request import FirstToken, RequestOutput
from baton.step import FailedKV, KVConnectorOutput, ReceivedKV, SchedulerOutput
from scheduler.block_pool import Block
from scheduler.kv_cache import KVCache
from scheduler.queue import WaitingQueue
from scheduler.request import Request, RequestStatus


class KVConnector(Protocol):
    """Except for `build_connector_meta` and `update_connector_output`, calls concern only requests with `kv_transfer`.

    No call blocks, and no call raises because of a peer. `worker/host.py` connects the scheduler and the
    connector.
    """

    def request_added(self, request: Request) -> None:
        """Called when the request is queued; the request may get blocks much later."""
        ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """How many initial tokens beyond `num_computed_tokens` (a whole number of blocks) can be loaded.

        The number is more than 0. None: it is not known yet, so the scheduler asks again in the next step. The call
        changes nothing, so it may be repeated.
        After a load has started, the call comes again only if that load was postponed.
        """
        ...

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[int, ...], num_external_tokens: int
    ) -> None:
        """Called when blocks are reserved for a load of `num_external_tokens` > 0 tokens. The load must fill
        `block_ids`."""
        ...

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Receives the output of the worker half, before the scheduler acts on it."""
        ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Commands of this step for the worker half, or None. Does not change the plan.

        Called at the end of every `schedule()`. For a producer, the connector reads from the plan which
        blocks this step will complete.
        """
        ...

    def request_finished(self, request: Request, block_ids: tuple[int, ...]) -> bool:
        """Called when the request has ended, for any reason; `block_ids` are all the blocks it holds.

        True: a transfer may still read or write the blocks. They are freed when `KVConnectorOutput` names the
        request. False: the scheduler frees the blocks now, if there are any.
        """
        ...


class RemotePrompts:
    """Knows the current loads, and the arrived prompts that wait for their first step. Releases blocks of ended
    requests."""

    def __init__(self, connector: KVConnector | None, kv: KVCache, counters: Counter[str]) -> None:
        self._connector = connector
        self._kv = kv
        self._counters = counters
        self.loading: dict[str, Request] = {}
        """Requests in WAITING_FOR_REMOTE_KVS; only this class changes it."""
        self.received = WaitingQueue()
        """Requests whose prompt has arrived, and that wait for a slot."""

    def announce(self, request: Request) -> None:
        """Announces a queued request to the connector, and so to the other worker."""
        if request.kv_transfer is not None:
            assert self._connector is not None, "hand-overs need a connector"
            self._connector.request_added(request)

    def num_tokens_to_load(self, request: Request, num_hit_tokens: int) -> int | None:
        """See KVConnector.get_num_new_matched_tokens."""
        assert self._connector is not None
        return self._connector.get_num_new_matched_tokens(request, num_hit_tokens)

    def start_load(self, request: Request, hits: list[Block], num_remote_tokens: int, num_spare: int) -> bool:
        """Reserves blocks for all initial tokens and one further token, and starts the load.

        With the block of the further token, an arrived prompt can always run its first step. Returns False, and
        changes nothing, if fewer than `num_spare` blocks would be left free.
        """
        assert self._connector is not None
        num_hit_tokens, num_initial = self._kv.num_tokens_in(hits), request.num_initial_tokens
        if not self._kv.open_table(
            request,
            num_initial + 1,
            hits,
            cache_up_to=num_hit_tokens,
            num_spare=num_spare,
            num_ready=num_initial,
        ):
            return False
        num_blocks = self._kv.num_blocks_for(num_hit_tokens + num_remote_tokens)
        blocks_to_fill = self._kv.block_ids(request)[len(hits) : num_blocks]
        self._connector.update_state_after_alloc(request, blocks_to_fill, num_remote_tokens)
        request.move_to(RequestStatus.WAITING_FOR_REMOTE_KVS)
        request.may_load, request.num_hit_tokens = False, num_hit_tokens
        self.loading[request.request_id] = request
        self._counters["kv_prompt_loads_started"] += 1
        return True

    def receive(self, received: ReceivedKV) -> Request | None:
        """Ends a successful load. Returns its request, which has all initial tokens now; None if unknown."""
        request = self._end_load(received.request_id)
        if request is None:
            return None
        self._counters["kv_prompt_loads_done"] += 1
        request.num_computed_tokens = request.num_initial_tokens
        self._kv.cache_received(request, request.num_initial_tokens)
        request.move_to(RequestStatus.WAITING)
        self.received.push(request)
        return request

    def fail(self, failure: FailedKV) -> Request | None:
        """Ends a load that failed or was postponed. Returns its request, or None if unknown.

        The request holds no KV blocks, so other requests never wait for it. Verified blocks stay in the
        prefix cache for its next admission.
        """
        request = self._end_load(failure.request_id)
        if request is None:
            return None
        self._counters[f"kv_prompt_loads_{_counter_suffix(failure)}"] += 1
        request.may_load = failure.is_postponed
        num_valid_tokens = request.num_hit_tokens + failure.num_valid_blocks * self._kv.block_size
        self._kv.cache_received(request, num_valid_tokens)
        self._kv.free(request)
        request.move_to(RequestStatus.WAITING)
        return request

    def keep_first_token(self, request: Request, output: RequestOutput) -> None:
        """Stores the only token that a producer samples. It is sent after the last block."""
        logprobs = output.logprobs[0] if output.logprobs else None
        request.first_token = FirstToken(output.token_ids[0], logprobs)

    def free_or_hold(self, request: Request) -> None:
        """Frees the blocks of an ended request, or holds them until `end_holds` names the request."""
        is_loading = self.loading.pop(request.request_id, None) is not None
        must_hold = False
        if self._connector is not None and request.kv_transfer is not None:
            must_hold = self._connector.request_finished(request, self._kv.block_ids(request))
        if not must_hold:
            self._kv.free(request)
        elif request.is_producer:
            self._kv.lease(request)
        else:
            num_hit_blocks = self._kv.num_blocks_for(request.num_hit_tokens) if is_loading else 0
            self._kv.quarantine(request, num_hit_blocks=num_hit_blocks)

    def loaded_behind_hits(self) -> list[str]:
        """Requests whose prompt is arriving or has arrived, and whose first blocks are prefix-cache hits."""
        requests = [*self.loading.values(), *self.received]
        return [request.request_id for request in requests if request.num_hit_tokens]

    def end_holds(self, request_ids: Iterable[str]) -> None:
        """Frees the blocks held for these requests, since no transfer uses them any more."""
        for request_id in request_ids:
            if not self._kv.end_hold(request_id):
                self._counters["kv_unknown_completions"] += 1

    def _end_load(self, request_id: str) -> Request | None:
        """Ends a load, and returns its request. None for a late report, which ends a quarantine or is only counted."""
        request = self.loading.pop(request_id, None)
        if request is None:
            self.end_holds([request_id])
        return request


def _counter_suffix(failure: FailedKV) -> str:
    """The last part of this failure's counter name."""
    if failure.is_postponed:
        return "postponed"
    return "not_needed" if failure.is_unneeded else "failed"
