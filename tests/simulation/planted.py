"""Bugs planted one at a time: the simulation must find each within a minute. Otherwise it proves nothing.

python -m tests.simulation.planted          # a table; exit code 1 if one survives
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from baton.kv_groups import NULL_BLOCK_ID, KVGroups
from baton.messages import session
from baton.messages.request_plane import Heartbeat
from baton.messages.session import GatewaySession, WorkerSessions
from baton.request import EngineRequest, FirstToken
from baton.system.progress import ProgressObserver
from baton.system.standstill import Standstill
from decode_worker.kv_consumer import KVConsumerScheduler
from gateway.admission.shares import CallerShares
from gateway.admission.suspects import Suspects
from gateway.requests.attempt import Attempt, AttemptFailure
from kv_transfer.commands import WithdrawBlocks
from kv_transfer.consumer import endpoint as consumer_endpoint
from kv_transfer.consumer.remote_pools import PoolKey, RemotePools
from kv_transfer.protocol.consumer import Consumer
from kv_transfer.protocol.effects import Effect, Send
from kv_transfer.protocol.incoming import IncomingTransfer
from kv_transfer.protocol.messages import Ack, End, Open, TransferKey
from kv_transfer.protocol.outgoing import OutgoingTransfer
from kv_transfer.protocol.producer import Producer
from scheduler.kv_cache import KVCache
from scheduler.request import Request, RequestStatus
from scheduler.speculation import Speculation
from simulator.connector import SimConnector
from tests.simulation.hunt import TIME_LIMIT_S, Plant, bug, hunt
from worker.kv_connector_scheduler import KVConnectorScheduler

PLANTED: dict[str, Plant] = {}
"""By the bug's name in words."""
NEEDS_WINDOWS: set[str] = set()
"""Names of those that only seeds with sliding windows can find."""


def planted(owner: Any, name: str, *, needs_windows: bool = False) -> Callable[[Callable[..., Any]], None]:
    """A `bug` of the list."""

    def add(broken: Callable[..., Any]) -> None:
        in_words = broken.__name__.replace("_", " ")
        PLANTED[in_words] = bug(owner, name)(broken)
        NEEDS_WINDOWS.update([in_words] * needs_windows)

    return add


@planted(KVConnectorScheduler, "request_finished")
def free_consumers_blocks_on_abort(original: Any, self: Any, request: Request, block_ids: Any) -> bool:
    """The scheduler does not wait until an aborted load is quiet."""
    return original(self, request, block_ids) and bool(request.is_producer)


@planted(KVConnectorScheduler, "request_finished")
def free_producers_blocks_at_the_end(original: Any, self: Any, request: Request, block_ids: Any) -> bool:
    """The scheduler does not wait until the blocks are read."""
    return original(self, request, block_ids) and not request.is_producer


@planted(KVConnectorScheduler, "build_connector_meta")
def start_loads_beside_a_step(original: Any, self: Any, plan: Any) -> Any:
    """A load begins while a step that was planned earlier may still write its blocks."""
    meta = original(self, plan)
    return None if meta is None else replace(meta, at_once=(*meta.at_once, *meta.loads), loads=())


@planted(consumer_endpoint, "_pool_key")
def ignore_incarnations(_original: Any, key: TransferKey, transport: str) -> PoolKey:
    """An open pool is mistaken for the pool of the present worker of the same name."""
    return key.producer.partition("-incarnation")[0], key.producer_rank, transport


@planted(IncomingTransfer, "claim")
def skip_the_checksum(original: Any, self: Any, message: Any, _has_checksums: bool, now: float) -> Any:
    """Damaged blocks are used."""
    return original(self, message, False, now)


@planted(Producer, "__init__")
def let_no_lease_end(original: Any, self: Any, identity: Any, lease_s: float, *args: Any) -> None:
    """Blocks that no consumer will read are kept."""
    original(self, identity, lease_s * 1_000, *args)


@planted(Consumer, "_complete")
def complete_twice(original: Any, self: Consumer, transfer: IncomingTransfer, now: float) -> list[Effect]:
    """A load that has arrived is not forgotten."""
    effects: list[Effect] = original(self, transfer, now)
    if effects:
        self._transfers.add(transfer)
        self._transfers.bind(transfer)
        self._waits.begin(transfer.key, now)
    return effects


@planted(Consumer, "_end_load")
def give_up_loads_before_reads_end(
    original: Any, self: Consumer, transfer: IncomingTransfer, outcome: Any
) -> Any:
    """A load that is given up counts as quiet while a read still writes its blocks."""
    transfer.arriving.clear()
    return original(self, transfer, outcome)


@planted(OutgoingTransfer, "withdraw")
def offer_withdrawn_blocks(_original: Any, self: OutgoingTransfer) -> None:
    """Blocks that were taken back can still be sent."""
    self.version += 1


@planted(Producer, "_on_ack")
def trust_acks_of_older_versions(
    original: Any, self: Any, transfer: OutgoingTransfer, message: Ack
) -> list[Effect]:
    """Blocks that were withdrawn meanwhile count as received."""
    return original(self, transfer, replace(message, version=transfer.version))  # type: ignore[no-any-return]


@planted(OutgoingTransfer, "reopen")
def trust_opens_of_older_versions(
    original: Any, self: OutgoingTransfer, message: Open, peer: Any, transport: str
) -> None:
    """Blocks that were withdrawn meanwhile count as received."""
    versions = (self.version,) * len(message.received)
    original(self, replace(message, received_versions=versions), peer, transport)


@planted(Producer, "_end")
def say_end_before_the_last_ack(_original: Any, _self: Any, transfer: OutgoingTransfer) -> list[Effect]:
    """It is not known yet whether the pool was read in time."""
    if transfer.first_token is None or transfer.is_end_sent:
        return []
    transfer.is_end_sent = True
    end = End(transfer.key, transfer.version, transfer.num_pieces, transfer.first_token)
    return [Send(transfer.peer, end)]


@planted(Producer, "finish")
def hand_over_another_token(
    original: Any, self: Any, transfer: Any, first_token: FirstToken, now: float
) -> list[Effect]:
    """Token 0 is not the one that was sampled."""
    return original(self, transfer, FirstToken(first_token.token_id + 1, None), now)  # type: ignore[no-any-return]


@planted(KVCache, "open_table")
def hit_blocks_before_they_arrive(original: Any, *args: Any, **options: Any) -> bool:
    """The prefix cache offers blocks whose load has only begun."""
    return bool(original(*args, **{**options, "cache_up_to": None}))


@planted(Speculation, "_drop_wrong_drafts")
def keep_rejected_drafts_in_the_prefix_cache(
    original: Any, self: Speculation, request: Request, num_drafts: int, num_sampled: int
) -> None:
    """A request that ends with the step that rejects its drafts counts their places as computed."""
    num_computed_tokens = request.num_computed_tokens
    original(self, request, num_drafts, num_sampled)
    if request.num_tokens + num_sampled >= request.max_num_tokens:
        request.num_computed_tokens = num_computed_tokens


@planted(Speculation, "append_forced")
def count_forced_tokens_as_computed(
    original: Any, self: Speculation, request: Request, forced: tuple[int, ...], num_taken: int
) -> None:
    """As if they were right drafts: nothing writes their KV."""
    original(self, request, forced, num_taken)
    if request.status is RequestStatus.RUNNING:
        request.num_computed_tokens += max(0, num_taken)


@planted(Speculation, "begin")
def plan_past_first_tokens(original: Any, self: Speculation, request: Request) -> None:
    """A request with a grammar is planned ahead until the runner has said that tokens may be forced."""
    original(self, request)
    request.is_unforeseeable = False


@planted(KVCache, "end_hold")
def end_a_lease_twice(_original: Any, self: KVCache, request_id: str) -> bool:
    """The blocks of a lease are freed, and leased on."""
    blocks = self._leased.get(request_id) or self._quarantined.pop(request_id, None)
    if blocks is None:
        return False
    self._pool.free(reversed(blocks))
    return True


@planted(KVGroups, "num_rows_before_window", needs_windows=True)
def give_back_rows_that_are_still_read(original: Any, *counts: Any) -> int:
    """A window ends one row later than it does."""
    num_before_window: int = original(*counts)
    return num_before_window + (num_before_window > 0)


@planted(KVGroups, "needed_entries", needs_windows=True)
def swap_too_little_of_the_window(original: Any, self: KVGroups, *counts: int) -> list[int]:
    """The first block that a window still reaches is neither copied out nor copied back."""
    entries: list[int] = original(self, *counts)
    windowed = (entry for entry in entries if entry % self.num_groups >= self.num_full)
    first = next(windowed, None)
    return [entry for entry in entries if entry != first]


@planted(KVConsumerScheduler, "update_state_after_alloc", needs_windows=True)
def load_too_little_of_the_window(
    original: Any, self: Any, request: Request, block_ids: tuple[int, ...], num_tokens: int
) -> None:
    """The first block that a window still reaches is not loaded."""
    if NULL_BLOCK_ID in block_ids:
        after = len(block_ids) - block_ids[::-1].index(NULL_BLOCK_ID)
        first = min(len(block_ids) - 1, after + self._num_groups - 1)
        block_ids = (*block_ids[:first], NULL_BLOCK_ID, *block_ids[first + 1 :])
    original(self, request, block_ids, num_tokens)


@planted(KVCache, "lease", needs_windows=True)
def lease_too_little_of_the_window(original: Any, self: KVCache, request: Request) -> None:
    """The first blocks that a window still reaches are freed while a consumer still reads them."""
    if request.block_table is not None and self.groups.num_windowed:
        self._free_before_window(request.block_table, request.num_computed_tokens + self.block_size)
    original(self, request)


@planted(KVCache, "quarantine", needs_windows=True)
def quarantine_full_attention_alone(
    original: Any, self: KVCache, request: Request, num_hit_blocks: int
) -> None:
    """Blocks of groups with a window are freed while a transfer may still write them."""
    blocks, null = request.block_table.blocks if request.block_table else [], self._pool.null
    for index in range(num_hit_blocks, len(blocks)):
        if index % self.groups.num_groups >= self.groups.num_full and blocks[index] is not null:
            self._pool.free([blocks[index]])
            blocks[index] = null
    original(self, request, num_hit_blocks)


@planted(SimConnector, "_post")
def go_on_before_blocks_are_given_back(_original: Any, self: SimConnector, commands: Sequence[Any]) -> None:
    """The engine does not wait until withdrawn blocks are no longer sent."""
    self._commands += commands
    is_withdrawn = any(isinstance(command, WithdrawBlocks) for command in self._commands)
    self._world.after(0.05 if is_withdrawn else 0.0, self._execute, self._process)


@planted(GatewaySession, "note_heartbeat")
def overlook_lost_sessions(original: Any, self: GatewaySession, heartbeat: Heartbeat) -> None:
    """The gateway goes on waiting for what a worker has ended."""
    original(self, heartbeat)


@planted(session, "_gap")
def overlook_lost_commands(_original: Any, _session: Any, _hello: Any) -> None:
    """The worker does not notice that a command is missing."""


@planted(Producer, "_is_stuck")
def never_report_being_stuck(_original: Any, _self: Any) -> bool:
    """Prompts on one end wait for those that wait for their room on the other."""
    return False


@planted(Consumer, "_postpone")
def keep_room_for_what_is_stuck(_original: Any, *_args: Any) -> list[Effect]:
    """A consumer does not give back the room of a prompt that its producer cannot compute."""
    return []


@planted(Attempt, "split")
def go_on_behind_too_few_tokens(
    original: Any, self: Attempt, request: EngineRequest, transfer_id: str
) -> Any:
    """A request that moves is computed from its last token but one."""
    return original(self, replace(request, output_token_ids=request.output_token_ids[:-1]), transfer_id)


@planted(Attempt, "on_lost")
def overlook_losses_while_it_moves(
    original: Any, self: Attempt, *args: str, **options: bool
) -> AttemptFailure | None:
    """A placed request notices the loss of a worker only once its decode worker has sent something."""
    return original(self, *args, **options) if self._is_decoding else None


@planted(Attempt, "close")
def count_sub_requests_of_ended_attempts(_original: Any, self: Attempt) -> list[str]:
    """The router counts requests that have ended, so it takes idle workers for busy."""
    left = sorted(self.open_workers)
    self._uncounted.clear()
    return left


@planted(WorkerSessions, "end")
def work_on_for_an_ended_gateway(original: Any, self: WorkerSessions, peer: bytes) -> bool:
    """The requests of a gateway that has ended are never ended themselves."""
    original(self, peer)
    return False


@planted(Standstill, "look")
def count_a_standstill_as_silence(original: Any, self: Standstill, now: float) -> float:
    """A worker that was stopped counts this time as silence of its readers, and frees blocks that they are about to
    read."""
    original(self, now)
    self.total_s = 0.0
    return 0.0


@planted(ProgressObserver, "look")
def trust_heartbeats_alone(_original: Any, *_args: Any) -> None:
    """A worker whose device computes for ever is never noticed."""


@planted(RemotePools, "close_orphaned")
def keep_the_pools_of_ended_workers(_original: Any, *_args: Any) -> None:
    """The pools of ended workers stay open until the idle timeout."""


@planted(CallerShares, "_is_shared")
def one_caller_takes_all(_original: Any, *_args: Any) -> bool:
    """A caller may hold everything while others are there."""
    return False


@planted(Suspects, "refusal")
def forget_poison(_original: Any, *_args: Any) -> None:
    """A request that ended its workers is served again when it comes again."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=TIME_LIMIT_S, help="seconds for each bug")
    parser.add_argument("--only", default="", help="bugs whose name contains this")
    args = parser.parse_args()
    num_survivors = 0
    print(f"{'bug':<38} | {'seeds':>6} | {'seconds':>7} | found by")
    for name, plant in PLANTED.items():
        if args.only not in name:
            continue
        outcome = hunt(plant, args.jobs, args.limit, needs_windows=name in NEEDS_WINDOWS)
        violation = outcome.found.violation if outcome.found else None
        found_by = violation.invariant if violation else "nothing"
        print(f"{name:<38} | {outcome.num_seeds:>6} | {outcome.elapsed_s:>7.1f} | {found_by}", flush=True)
        num_survivors += violation is None
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
