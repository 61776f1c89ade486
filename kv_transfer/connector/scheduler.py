"""KVConnectorScheduler: the half of the connector that the scheduler asks; decides nothing about bytes.

Satisfies the scheduler's `KVConnector` Protocol without knowing the scheduler.
"""

from dataclasses import dataclass
from typing import Protocol

from baton.kv import KVTransferParams
from baton.request import FirstToken
from baton.step import KVConnectorOutput, SchedulerOutput
from kv_transfer.connector.commands import (
    AbortLoad,
    AbortSend,
    BeginLoad,
    BeginSend,
    FinishSend,
    KVConnectorMetadata,
    LoadBlocks,
    NoteStarvation,
    OrderAtOnce,
    SendBlocks,
    WithdrawBlocks,
)


class TransferRequest(Protocol):
    """What a hand-over needs to know of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_initial_tokens(self) -> int:
        """What it came with, prompt and output: all of that is handed over."""
        ...

    @property
    def kv_transfer(self) -> KVTransferParams | None: ...
    @property
    def is_producer(self) -> bool: ...
    @property
    def is_consumer(self) -> bool: ...
    @property
    def is_handed_over(self) -> bool: ...
    @property
    def is_failed(self) -> bool: ...
    @property
    def is_given_back(self) -> bool: ...
    @property
    def first_token(self) -> FirstToken | None: ...


@dataclass(slots=True)
class Sending:
    """A producer's progress: blocks before `num_sent` were ordered out."""

    num_tokens: int
    block_ids: list[int]
    num_sent: int = 0


class KVConnectorScheduler:
    """Turns what happens to requests into orders for the worker half, collected until the next step."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._sending: dict[str, Sending] = {}
        self._computing: set[str] = set()
        """Producers that have blocks."""
        self._is_starved = False
        self._waiting_to_load: set[str] = set()
        self._postponed: set[str] = set()
        """Of those that wait to load, the ones whose load was put off and cannot go on yet."""
        self._loading: set[str] = set()
        self._orders: list[OrderAtOnce] = []
        self._loads: list[LoadBlocks] = []

    def request_added(self, request: TransferRequest) -> None:
        """Both ends announce themselves as soon as they are queued, so that neither takes the other for lost."""
        request_id, num_tokens = request.request_id, request.num_initial_tokens
        assert request.kv_transfer is not None
        if request.is_producer:
            self._sending[request_id] = Sending(num_tokens, [])
            self._orders.append(BeginSend(request_id, request.kv_transfer, num_tokens))
        else:
            self._waiting_to_load.add(request_id)
            self._orders.append(BeginLoad(request_id, request.kv_transfer, num_tokens))

    def get_num_new_matched_tokens(
        self, request: TransferRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The whole rest of the prompt, once; after a failed load or a preemption there is nothing to load.

        "Not known yet" only while the load is put off. Else the request itself says that its producer computes the
        whole prompt, so there is nothing to look up. Room is reserved before a block of it exists, and what becomes
        of the producer, or whether it ever took the request, is told as the end of the load.
        """
        if request.request_id in self._postponed:
            return None, False
        if request.request_id not in self._waiting_to_load:
            return 0, False
        return request.num_initial_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: tuple[int, ...], num_external_tokens: int
    ) -> None:
        first_index = (request.num_initial_tokens - num_external_tokens) // self._block_size
        self._waiting_to_load.remove(request.request_id)
        self._loading.add(request.request_id)
        self._loads.append(LoadBlocks(request.request_id, first_index, block_ids))

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Loads that arrived or failed are not under way any more; those that were put off wait again."""
        postponed = {load.request_id for load in output.failed_recving if load.is_postponed} & self._loading
        self._waiting_to_load |= postponed
        self._postponed |= postponed
        self._postponed.difference_update(output.can_load)
        self._loading.difference_update(load.request_id for load in output.finished_recving)
        self._loading.difference_update(load.request_id for load in output.failed_recving)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        """The orders since the last step, and the blocks that this one will fill."""
        preempted = scheduler_output.preempted_req_ids
        for request_id in [known for known in self._sending if known in preempted]:  # in order, unlike a set
            self._sending[request_id].num_sent = 0
            self._computing.discard(request_id)
            self._orders.append(WithdrawBlocks(request_id))
        after = self._blocks_filled_by(scheduler_output) if self._sending else []
        self._note_starvation()
        if not self._orders and not self._loads and not after:
            return None
        metadata = KVConnectorMetadata(tuple(self._orders), tuple(self._loads), tuple(after))
        self._orders, self._loads = [], []
        return metadata

    def request_finished(self, request: TransferRequest, block_ids: tuple[int, ...]) -> bool:
        """Producers hold their blocks until nobody reads them, consumers until nobody writes them."""
        if request.is_producer:
            return self._finish_sending(request, block_ids)
        is_waiting, is_loading = (
            request.request_id in self._waiting_to_load,
            request.request_id in self._loading,
        )
        self._waiting_to_load.discard(request.request_id)
        self._postponed.discard(request.request_id)
        self._loading.discard(request.request_id)
        if is_waiting or is_loading:
            self._orders.append(AbortLoad(request.request_id, "the request ended on the decode worker"))
        return is_loading

    def _finish_sending(self, request: TransferRequest, block_ids: tuple[int, ...]) -> bool:
        del self._sending[request.request_id]
        self._computing.discard(request.request_id)
        if not request.is_handed_over:
            is_held, is_cancelled = bool(block_ids), not (request.is_failed or request.is_given_back)
            self._orders.append(AbortSend(request.request_id, _why_aborted(request), is_cancelled, is_held))
            return is_held
        assert request.first_token is not None
        num_full = request.num_initial_tokens // self._block_size
        num_blocks = -(-request.num_initial_tokens // self._block_size)
        tail = block_ids[num_full:num_blocks]
        self._orders.append(FinishSend(request.request_id, num_blocks, tail, request.first_token))
        return True

    def _note_starvation(self) -> None:
        """Tells changes only, so nothing where a prompt gets blocks as soon as nobody else computes."""
        is_starved = bool(self._sending) and not self._computing
        if is_starved is not self._is_starved:
            self._is_starved = is_starved
            self._orders.append(NoteStarvation(is_starved))

    def _blocks_filled_by(self, plan: SchedulerOutput) -> list[SendBlocks]:
        """Full prompt blocks that this step completes; after a preemption, all of them anew."""
        cached = plan.scheduled_cached_reqs
        filled = [
            self._progress(plan, new.request_id, new.block_ids, new.num_computed_tokens, is_fresh=True)
            for new in plan.scheduled_new_reqs
        ] + [
            self._progress(
                plan, request_id, block_ids, num_computed, request_id in cached.resumed_request_ids
            )
            for request_id, block_ids, num_computed in zip(
                cached.request_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
            )
        ]
        return [order for order in filled if order is not None]

    def _progress(
        self,
        plan: SchedulerOutput,
        request_id: str,
        block_ids: tuple[int, ...],
        num_computed: int,
        is_fresh: bool,
    ) -> SendBlocks | None:
        sending = self._sending.get(request_id)
        if sending is None:
            return None
        if is_fresh:
            sending.block_ids = []
        sending.block_ids += block_ids
        self._computing.add(request_id)
        num_known = min(num_computed + plan.num_scheduled_tokens[request_id], sending.num_tokens)
        first, num_full = sending.num_sent, num_known // self._block_size
        if num_full <= first:
            return None
        sending.num_sent = num_full
        return SendBlocks(request_id, first, tuple(sending.block_ids[first:num_full]))


def _why_aborted(request: TransferRequest) -> str:
    """A producer that hands nothing over, in the consumer's words."""
    if request.is_given_back:
        return "the prefill worker gave the request back"
    return "the prefill failed" if request.is_failed else "the request ended on the prefill worker"
