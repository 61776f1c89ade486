"""Bugs put in on purpose, one at a time: the simulation has to find each within a minute, or it proves nothing.

python -m tests.simulation.planted          # a table; exit code 1 if one survives
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any
from unittest.mock import patch

from baton.messages import session
from baton.messages.request_plane import Heartbeat
from baton.messages.session import GatewaySession, WorkerSessions
from baton.request import EngineRequest, FirstToken
from baton.system.standstill import Standstill
from gateway.requests import request_state
from gateway.requests.attempt import Attempt, AttemptFailure, sub_requests
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
from scheduler.request import Request
from simulator.connector import SimConnector
from tests.simulation.run import Result
from tests.simulation.runs import results
from worker.kv_connector import KVConnectorScheduler

TIME_LIMIT_S = 60.0

Patch = AbstractContextManager[Any]
Plant = Callable[[], Patch]


def free_consumers_blocks_on_abort() -> Patch:
    """The scheduler does not wait until a load that was given up is quiet."""
    original = KVConnectorScheduler.request_finished

    def request_finished(self: KVConnectorScheduler, request: Any, block_ids: tuple[int, ...]) -> bool:
        return original(self, request, block_ids) and bool(request.is_producer)

    return patch.object(KVConnectorScheduler, "request_finished", request_finished)


def free_producers_blocks_at_the_end() -> Patch:
    """The scheduler does not wait until the blocks are read."""
    original = KVConnectorScheduler.request_finished

    def request_finished(self: KVConnectorScheduler, request: Any, block_ids: tuple[int, ...]) -> bool:
        return original(self, request, block_ids) and not request.is_producer

    return patch.object(KVConnectorScheduler, "request_finished", request_finished)


def ignore_incarnations() -> Patch:
    """A pool that is open is taken for that of whoever has the same name now."""

    def pool_key(key: TransferKey, transport: str) -> PoolKey:
        return key.producer.partition("-life")[0], key.producer_rank, transport

    return patch.object(consumer_endpoint, "_pool_key", pool_key)


def skip_the_checksum() -> Patch:
    return patch.object(Consumer, "wants_checksums", lambda _self, _key: False)


def let_no_lease_end() -> Patch:
    original = Producer.__init__

    def init(self: Producer, identity: Any, lease_s: float, *args: Any) -> None:
        original(self, identity, lease_s * 1_000, *args)

    return patch.object(Producer, "__init__", init)


def complete_twice() -> Patch:
    """A load that has arrived is not forgotten."""
    original = Consumer._complete

    def complete(self: Consumer, transfer: IncomingTransfer, now: float) -> list[Effect]:
        effects = original(self, transfer, now)
        if effects:
            self._transfers.add(transfer)
            self._transfers.bind(transfer)
            self._silence.begin(transfer.key, now)
        return effects

    return patch.object(Consumer, "_complete", complete)


def offer_withdrawn_blocks() -> Patch:
    def withdraw(self: OutgoingTransfer) -> None:
        self.version += 1

    return patch.object(OutgoingTransfer, "withdraw", withdraw)


def keep_the_pools_of_the_dead() -> Patch:
    """Until nothing has come from them for a while."""
    return patch.object(RemotePools, "close_orphaned", lambda _self, _is_read: None)


def trust_acks_of_older_versions() -> Patch:
    original = Producer._on_ack

    def on_ack(self: Producer, transfer: OutgoingTransfer, message: Ack) -> list[Effect]:
        return original(self, transfer, replace(message, version=transfer.version))

    return patch.object(Producer, "_on_ack", on_ack)


def trust_opens_of_older_versions() -> Patch:
    original = OutgoingTransfer.reopen

    def reopen(self: OutgoingTransfer, message: Open, peer: Any, transport: str) -> None:
        versions = (self.version,) * len(message.received)
        original(self, replace(message, received_versions=versions), peer, transport)

    return patch.object(OutgoingTransfer, "reopen", reopen)


def say_end_before_the_last_ack() -> Patch:
    """Nobody knows yet whether the pool was read in time."""

    def end(self: Producer, transfer: OutgoingTransfer) -> list[Effect]:
        if transfer.first_token is None or transfer.is_end_sent:
            return []
        transfer.is_end_sent = True
        return [Send(transfer.peer, End(transfer.key, transfer.num_pieces, transfer.first_token))]

    return patch.object(Producer, "_end", end)


def hand_over_another_token() -> Patch:
    """Token 0 is not the one that was sampled."""
    original = Producer.finish

    def finish(self: Producer, leg: Any, first_token: FirstToken, now: float) -> list[Effect]:
        return original(self, leg, FirstToken(first_token.token_id + 1, None), now)

    return patch.object(Producer, "finish", finish)


def hit_blocks_before_they_arrive() -> Patch:
    original = KVCache.open_table

    def open_table(self: KVCache, request: Request, num_tokens: int, *args: Any, **options: Any) -> bool:
        return original(self, request, num_tokens, *args, **{**options, "cache_up_to": None})

    return patch.object(KVCache, "open_table", open_table)


def end_a_lease_twice() -> Patch:
    def end_hold(self: KVCache, request_id: str) -> bool:
        blocks = self._leased.get(request_id) or self._quarantined.pop(request_id, None)
        if blocks is None:
            return False
        self._pool.free(reversed(blocks))
        return True

    return patch.object(KVCache, "end_hold", end_hold)


def go_on_before_blocks_are_given_back() -> Patch:
    """The engine does not wait until withdrawn blocks are not sent any more."""

    def post(self: SimConnector, commands: Sequence[Any]) -> None:
        self._commands += commands
        is_withdrawn = any(isinstance(command, WithdrawBlocks) for command in self._commands)
        self._world.after(0.05 if is_withdrawn else 0.0, self._execute, self._process)

    return patch.object(SimConnector, "_post", post)


def overlook_lost_sessions() -> Patch:
    """The gateway goes on waiting for what a worker has ended."""
    original = GatewaySession.note_heartbeat

    def note_heartbeat(self: GatewaySession, heartbeat: Heartbeat) -> None:
        original(self, heartbeat)

    return patch.object(GatewaySession, "note_heartbeat", note_heartbeat)


def overlook_lost_orders() -> Patch:
    return patch.object(session, "_gap", lambda _session, _hello: None)


def never_say_that_we_are_stuck() -> Patch:
    """Prompts wait on the one end for those that wait for their room on the other."""
    return patch.object(Producer, "_is_stuck", lambda _self: False)


def keep_room_for_what_is_stuck() -> Patch:
    return patch.object(Consumer, "_postpone", lambda *_args: [])


def go_on_behind_too_few_tokens() -> Patch:
    """A request that moves is computed from its last token but one."""

    def forgetful(request: EngineRequest, *args: Any) -> list[tuple[str, EngineRequest]]:
        return sub_requests(replace(request, output_token_ids=request.output_token_ids[:-1]), *args)

    return patch.object(request_state, "sub_requests", forgetful)


def overlook_losses_while_it_moves() -> Patch:
    """A request is placed on workers, and hears of their losses only once they have said something."""
    original = Attempt.on_lost

    def on_lost(self: Attempt, worker: str, reason: str, **options: bool) -> AttemptFailure | None:
        return original(self, worker, reason, **options) if self._is_decoding else None

    return patch.object(Attempt, "on_lost", on_lost)


def count_sub_requests_of_ended_attempts() -> Patch:
    """The router takes workers for busy with what they were relieved of."""

    def close(self: Attempt) -> list[str]:
        left = sorted(self.open_workers)
        self._uncounted.clear()
        return left

    return patch.object(Attempt, "close", close)


def work_on_for_a_gateway_that_died() -> Patch:
    """Nobody takes what its requests bring, and nobody ends them."""
    original = WorkerSessions.end

    def end(self: WorkerSessions, peer: bytes) -> bool:
        original(self, peer)
        return False

    return patch.object(WorkerSessions, "end", end)


def count_a_standstill_as_silence() -> Patch:
    """A worker that was stopped takes the time for its readers' silence, and frees what they are about to read."""
    original = Standstill.look

    def look(self: Standstill, now: float) -> float:
        original(self, now)
        self.total_s = 0.0
        return 0.0

    return patch.object(Standstill, "look", look)


PLANTED: dict[str, Plant] = {
    plant.__name__.replace("_", " "): plant
    for plant in (
        free_consumers_blocks_on_abort,
        free_producers_blocks_at_the_end,
        ignore_incarnations,
        skip_the_checksum,
        let_no_lease_end,
        complete_twice,
        offer_withdrawn_blocks,
        trust_acks_of_older_versions,
        trust_opens_of_older_versions,
        say_end_before_the_last_ack,
        hand_over_another_token,
        hit_blocks_before_they_arrive,
        end_a_lease_twice,
        go_on_before_blocks_are_given_back,
        overlook_lost_sessions,
        overlook_lost_orders,
        never_say_that_we_are_stuck,
        keep_room_for_what_is_stuck,
        go_on_behind_too_few_tokens,
        overlook_losses_while_it_moves,
        count_sub_requests_of_ended_attempts,
        work_on_for_a_gateway_that_died,
        count_a_standstill_as_silence,
        keep_the_pools_of_the_dead,
    )
}


@dataclass(frozen=True, slots=True)
class Hunt:
    """How long it took to find a bug; `found` is None if it survived."""

    num_seeds: int
    elapsed_s: float
    found: Result | None


def hunt(plant: Plant, num_jobs: int, time_limit_s: float = TIME_LIMIT_S) -> Hunt:
    """Plays seeds from 0 on with the bug in place."""
    begun, num_seeds = time.monotonic(), 0
    with plant(), closing(results(count(), num_jobs)) as played:
        for result in played:
            num_seeds += 1
            elapsed_s = time.monotonic() - begun
            if result.violation is not None or elapsed_s > time_limit_s:
                return Hunt(num_seeds, elapsed_s, result if result.violation is not None else None)
    raise AssertionError("there is always another seed")


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
        outcome = hunt(plant, args.jobs, args.limit)
        violation = outcome.found.violation if outcome.found else None
        found_by = violation.invariant if violation else "NOBODY"
        print(f"{name:<38} | {outcome.num_seeds:>6} | {outcome.elapsed_s:>7.1f} | {found_by}", flush=True)
        num_survivors += violation is None
    return 1 if num_survivors else 0


if __name__ == "__main__":
    sys.exit(main())
