"""KVProducerScheduler: decides which KV blocks a prefill worker sends, and when, while prompts compute."""

from dataclasses import dataclass

from baton.kv_groups import KVGroups
from baton.step import SchedulerOutput
from kv_transfer.commands import (
    AbortSend,
    BeginSend,
    FinishSend,
    ImmediateCommand,
    NoteStarvation,
    SendBlocks,
    WithdrawBlocks,
)
from scheduler import Request


@dataclass(slots=True)
class Sending:
    """How much of a prompt is sent: the connector has got the command to send its first `num_sent` blocks."""

    num_tokens: int
    block_ids: list[int]
    num_sent: int = 0


class KVProducerScheduler:
    """Turns events of producing requests into commands for the connector's worker half."""

    def __init__(self, block_size: int, groups: KVGroups) -> None:
        self._block_size = block_size
        self._groups = groups
        self._sending: dict[str, Sending] = {}
        self._with_blocks: set[str] = set()
        """Ids of the requests in `_sending` that have KV blocks."""
        self._is_starved = False
        self._commands: list[ImmediateCommand] = []

    def request_added(self, request: Request) -> None:
        """Announces the request as soon as it is queued, so that its consumer does not consider the hand-over lost."""
        assert request.kv_transfer is not None
        request_id, num_tokens = request.request_id, request.num_initial_tokens
        self._sending[request_id] = Sending(num_tokens, [])
        self._commands.append(BeginSend(request_id, request.kv_transfer, num_tokens))

    def request_finished(self, request: Request, block_ids: tuple[int, ...]) -> bool:
        """True if the blocks must stay allocated until every read of them has ended."""
        del self._sending[request.request_id]
        if request.request_id in self._with_blocks and not block_ids:  # preempted since the last plan
            self._commands.append(WithdrawBlocks(request.request_id))
        self._with_blocks.discard(request.request_id)
        if not request.is_handed_over:
            is_held, is_unneeded = bool(block_ids), not (request.is_failed or request.is_given_back)
            self._commands.append(AbortSend(request.request_id, _abort_reason(request), is_unneeded, is_held))
            return is_held
        assert request.first_token is not None
        num_groups = self._groups.num_groups
        num_full = request.num_initial_tokens // self._block_size * num_groups
        num_blocks = -(-request.num_initial_tokens // self._block_size) * num_groups
        tail = block_ids[num_full:num_blocks]
        self._commands.append(FinishSend(request.request_id, num_blocks, tail, request.first_token))
        return True

    def build(self, plan: SchedulerOutput) -> tuple[list[ImmediateCommand], list[SendBlocks]]:
        """Commands since the last step, and the full prompt blocks that this step completes."""
        preempted = plan.preempted_req_ids
        for request_id in [known for known in self._sending if known in preempted]:  # a set has no order
            sending = self._sending[request_id]
            sending.block_ids, sending.num_sent = [], 0
            self._with_blocks.discard(request_id)
            self._commands.append(WithdrawBlocks(request_id))
        completed = self._blocks_completed_by(plan) if self._sending else []
        self._note_starvation()
        commands, self._commands = self._commands, []
        return commands, completed

    def _note_starvation(self) -> None:
        """Reports when starvation begins or ends. Starvation: prompts are queued, but none of them has blocks."""
        is_starved = bool(self._sending) and not self._with_blocks
        if is_starved is not self._is_starved:
            self._is_starved = is_starved
            self._commands.append(NoteStarvation(is_starved))

    def _blocks_completed_by(self, plan: SchedulerOutput) -> list[SendBlocks]:
        """Full prompt blocks that this step completes. After a preemption, all blocks are sent again."""
        cached, num_computed = plan.scheduled_cached_reqs, plan.num_computed_tokens()
        new_block_ids = {new.request_id: new.block_ids for new in plan.scheduled_new_reqs}
        new_block_ids |= zip(cached.request_ids, cached.new_block_ids, strict=True)
        completed = [
            self._progress(
                request_id, block_ids, num_computed[request_id] + plan.num_scheduled_tokens[request_id]
            )
            for request_id, block_ids in new_block_ids.items()
            if request_id in self._sending
        ]
        return [command for command in completed if command is not None]

    def _progress(
        self, request_id: str, new_block_ids: tuple[int, ...], num_computed_tokens: int
    ) -> SendBlocks | None:
        """Adds the request's new blocks. Returns the command to send the blocks that this step fills; None if it fills
        none."""
        sending = self._sending[request_id]
        sending.block_ids += new_block_ids
        self._with_blocks.add(request_id)
        num_known = min(num_computed_tokens, sending.num_tokens)
        first, num_full = sending.num_sent, num_known // self._block_size * self._groups.num_groups
        if num_full <= first:
            return None
        sending.num_sent = num_full
        return SendBlocks(request_id, first, self._needed(sending, first, num_full))

    def _needed(self, sending: Sending, first: int, end: int) -> tuple[int | None, ...]:
        """The ids of the blocks from `first` up to `end`. None stands for a block that no consumer needs, since it lies
        before the sliding window when the prompt is complete."""
        block_ids = sending.block_ids[first:end]
        num_before_window = self._groups.num_rows_before_window(sending.num_tokens, self._block_size)
        num_groups, num_full = self._groups.num_groups, self._groups.num_full
        if first >= num_before_window * num_groups:
            return tuple(block_ids)
        return tuple(
            None if index % num_groups >= num_full and index < num_before_window * num_groups else block_id
            for index, block_id in enumerate(block_ids, first)
        )


def _abort_reason(request: Request) -> str:
    """Why a producer hands nothing over, for the consumer's report."""
    if request.is_given_back:
        return "the prefill worker gave the request back"
    return "the prefill failed" if request.is_failed else "the request ended on the prefill worker"
