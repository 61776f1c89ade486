"""Invariants: what must hold after every event, and what at rest. A `Violation` names the broken promise."""

from gateway.admission.suspects import MAX_LOSSES_AT_ONE_TOKEN, MAX_LOSSES_IN_ALL
from kv_transfer.consumer.remote_pools import READ_TIMEOUT_S
from kv_transfer.protocol.outgoing import OutgoingState
from simulator.fleet import SimFleet
from simulator.gateway import RequestEnd, SimGateway
from simulator.worker import Worker
from simulator.world import Violation, World
from tests.simulation.scenario import NEWCOMER, Scenario

EVENTS_PER_COSTLY_CHECK = 8
TURNS_PER_COSTLY_CHECK = 4
SLACK_S = 1.0
"""For steps, wake-ups and ordinary delays between cause and effect."""
MAX_STANDSTILL_S = 4.0
"""In a crowded scenario: many times the computing time of a prompt, and several heartbeats."""

MAX_NEWCOMER_S = 1.0
"""Beside a greedy caller: several times what the few tokens take alone, and much less than the greedy one's answers."""


class Invariants:
    """Call it after every event; `check_rest` when everything is over."""

    def __init__(self, world: World, scenario: Scenario, fleet: SimFleet) -> None:
        self._world = world
        self._fleet = fleet
        self._gateways = fleet.gateways
        self._transfer = scenario.transfer
        self._max_lateness_s = scenario.network.max_lateness_s
        self._unread_since: dict[tuple[str, str], float] = {}
        """Since when no consumer keeps a lease alive."""
        self._is_crowded = scenario.is_crowded
        self._tells_of_ends = scenario.reports_exits
        self._standstills: dict[str, tuple[frozenset[str], float]] = {}
        """By prefill worker: the complete prompts that no consumer takes, and since when they are the same."""
        self._gateway_dies_at = scenario.gateway_dies_at
        """When the last gateway dies, if ever."""
        self._is_poisoned = scenario.poison is not None
        self._num_calls = 0
        self._num_turns: dict[str, int] = {}
        """The checked turns of each engine: nothing else changes a scheduler."""

    def __call__(self) -> None:
        self._num_calls += 1
        for gateway in self._gateways:
            _check_gateway(gateway)
        is_costly = self._num_calls % EVENTS_PER_COSTLY_CHECK == 0
        for worker in self._fleet.workers.values():
            if worker.is_dead:
                continue
            if self._num_turns.get(worker.incarnation) != worker.num_turns:
                self._num_turns[worker.incarnation] = worker.num_turns
                _check_scheduler(worker, is_costly=worker.num_turns % TURNS_PER_COSTLY_CHECK == 0)
                _check_blocks_to_write(worker)
            if is_costly:
                self._check_transfers(worker)
            if is_costly and self._tells_of_ends:
                self._check_maps(worker)
            if is_costly and self._gateway_dies_at is not None:
                self._check_no_work_for_ended_gateways(worker)
            if is_costly and self._is_crowded and not worker.is_decode:
                self._check_standstill(worker)

    def check_rest(self) -> None:
        """Faults are over and time has passed: no request waits, nothing is held, every block is free."""
        for gateway in self._gateways:
            self._check_gateway_at_rest(gateway)
        if self._is_poisoned:
            self._check_poison()
        for worker in self._fleet.workers.values():
            _check_scheduler(worker, is_costly=True)
            self._check_transfers(worker)
            blocks, name = worker.scheduler.kv_block_counts(), worker.incarnation
            expect("rest: no request is left", not worker.scheduler.has_requests(), name)
            expect("rest: all blocks are free", blocks.free == blocks.total, f"{name}: {blocks}")
            held = {request_id: hold.kind for request_id, hold in worker.connector.holds.items()}
            expect("rest: nothing is held", not held, f"{name}: {held}")
            endpoint = worker.connector.endpoint
            expect("rest: endpoints are empty", len(endpoint) == 0, f"{name}: {len(endpoint)} hand-overs")
            halves = worker.connector_scheduler
            for maps in (halves._producer._sending, halves._consumer._loading):
                expect("rest: connectors are empty", not maps, f"{name}: {maps}")

    def _check_poison(self) -> None:
        """Checks that a poisoned request costs only a few workers, however often it comes, and harms no other
        request."""
        # At first, a second gateway sees workers end to which it sent nothing. Suspects of both gateways share some
        # workers.
        each = MAX_LOSSES_AT_ONE_TOKEN if len(self._gateways) == 1 else MAX_LOSSES_IN_ALL
        counts, limit = self._world.counts, each * len(self._gateways)
        num_killed, num_stopped = counts["fault poison killed"], counts["path stopped"]
        expect("poison is stopped", num_killed <= limit, f"{num_killed} workers ended")
        expect("poison is stopped", num_stopped > 0, "no request was refused as harmful")
        for gateway in self._gateways:
            for name, client in gateway.clients.items():
                right = (RequestEnd.ERROR,) if name.startswith("poison") else (RequestEnd.DONE,)
                is_right = client.end in (*right, *[RequestEnd.LEFT] * gateway.links.is_dead)
                expect("bystanders lose nothing", is_right, f"{name}: {client.end} {client.error}")

    def check_idle(self) -> None:
        """A while later: no pool of a peer is open, and no timer is left."""
        for worker in self._fleet.workers.values():
            for reader in worker.readers.values():
                expect(
                    "idle: no pool is open",
                    not reader.mapped,
                    f"{worker.incarnation}: {len(reader.mapped)} of {reader.name}",
                )
            deadline = worker.connector.endpoint.next_deadline()
            expect("idle: no timer is set", deadline is None, f"{worker.incarnation}: {deadline}")

    def _check_gateway_at_rest(self, gateway: SimGateway) -> None:
        for client in gateway.clients.values():
            if client.end is None:
                raise Violation("every request ends", f"{client.spec.request_id} has not")
            record = gateway.records[client.spec.request_id]
            total_s = record.ended_at - record.arrived_at
            if client.spec.caller.startswith(NEWCOMER) and total_s > MAX_NEWCOMER_S:
                raise Violation(
                    "one caller cannot take all", f"{client.spec.request_id} took {total_s:.3f} s"
                )
            if self._is_crowded and client.end is RequestEnd.ERROR:
                raise Violation("every request finds room", f"{client.spec.request_id}: {client.error}")
        expect("rest: no timer is set", gateway.dispatcher.next_deadline() is None, gateway.name)
        counted = {name: number for name, number in gateway.router.num_sub_requests.items() if number}
        expect(
            "rest: no sub-request is counted", not counted, f"the router of {gateway.name} counts {counted}"
        )

    def _check_transfers(self, worker: Worker) -> None:
        try:
            worker.connector.endpoint.check_integrity()
        except AssertionError as error:
            raise Violation("integrity of transfers", f"{worker.incarnation}: {error}") from error
        for request_id in worker.connector.holds:
            self._check_hold(worker, request_id)

    def _check_maps(self, worker: Worker) -> None:
        """Pools of ended workers are closed, unless a read is still under way."""
        for pool in (pool for reader in worker.readers.values() for pool in reader.mapped):
            read_s = READ_TIMEOUT_S if pool.under_way else 0.0
            noticed_by = max(pool.owner.died_at, pool.read_at) + read_s + worker.paused_s + SLACK_S
            if pool.owner.is_dead and self._world.now > noticed_by:
                left = f"{worker.incarnation} maps {pool.owner.incarnation}"
                raise Violation(
                    "pools of ended workers are closed", f"{left}, which ended at {pool.owner.died_at:.3f} s"
                )

    def _check_hold(self, worker: Worker, request_id: str) -> None:
        """Nothing is held for longer than its cause lasts, plus the time to notice."""
        hold, now = worker.connector.holds[request_id], self._world.now
        extra_s = worker.paused_s + SLACK_S
        if hold.kind == "leased":
            place = worker.incarnation, request_id
            if self._has_reader(worker, request_id):
                self._unread_since.pop(place, None)
                return
            # A load that began and was aborted within one event renewed the lease, too.
            began_at = self._fleet.workers[hold.transfer.peer.name].connector.began_loads_at
            since = max(
                self._unread_since.setdefault(place, now), began_at.get(hold.transfer.transfer_id, 0.0)
            )
            longest_s = self._transfer.lease_s + self._max_lateness_s
        elif hold.kind == "loading":
            since, longest_s = hold.since, self._transfer.load_timeout_s + READ_TIMEOUT_S
        elif hold.kind == "quarantined":
            since, longest_s = hold.since, READ_TIMEOUT_S
        else:
            return
        if now - since > longest_s + extra_s:
            held = f"{worker.incarnation}: {request_id} is {hold.kind} for {now - since:.3f} s"
            raise Violation("nothing is held too long", held)

    def _check_standstill(self, producer: Worker) -> None:
        """No consumer keeps room for a prompt whose producer cannot compute it while complete prompts there wait."""
        now, transfers = (
            self._world.now,
            producer.connector.endpoint._producer_end._producer._transfers.values(),
        )
        complete = [transfer for transfer in transfers if transfer.first_token is not None]
        is_taken = any(transfer.state is OutgoingState.STREAMING for transfer in complete)
        held = frozenset() if is_taken else frozenset(transfer.key.transfer_id for transfer in complete)
        before, since = self._standstills.get(producer.name, (frozenset(), now))
        if held != before:
            self._standstills[producer.name] = (held, now)
        elif held and now - since > MAX_STANDSTILL_S:
            for transfer in transfers:
                if transfer.is_awaited:
                    waits = f"{transfer.key.transfer_id} for {sorted(held)} on {producer.name}"
                    raise Violation("no circular wait", f"{waits}, for {now - since:.3f} s")

    def _check_no_work_for_ended_gateways(self, worker: Worker) -> None:
        """No worker serves a gateway that died, once the worker could notice."""
        assert self._gateway_dies_at is not None
        noticed_by = self._gateway_dies_at + self._transfer.peer_timeout_s + worker.paused_s + SLACK_S
        if self._world.now > noticed_by and (left := worker.requests.of_client(self._gateways[-1].name)):
            raise Violation("no work for an ended gateway", f"{worker.incarnation}: {left}")

    def _has_reader(self, producer: Worker, request_id: str) -> bool:
        """Whether a running consumer still takes part in this hand-over."""
        transfer = producer.connector.holds[request_id].transfer
        consumer = self._fleet.workers[transfer.peer.name]
        if consumer.is_dead or consumer.incarnation != transfer.peer.incarnation:
            return False
        return any(
            theirs.transfer.transfer_id == transfer.transfer_id
            and theirs.transfer.peer.incarnation == producer.incarnation
            for theirs in consumer.connector.holds.values()
        )


def expect(invariant: str, holds: bool, message: str) -> None:
    if not holds:
        raise Violation(invariant, message)


def _check_gateway(gateway: SimGateway) -> None:
    dispatcher, num_ended = gateway.dispatcher, gateway.ended.total()
    num_known = dispatcher.num_queued + dispatcher.num_in_flight + num_ended
    if num_known != len(gateway.clients) or len(gateway.records) != num_ended:
        known = (
            f"{num_known} of {len(gateway.clients)} are known, {len(gateway.records)} of {num_ended} recorded"
        )
        raise Violation(f"conservation at the {gateway.name}", known)


def _check_scheduler(worker: Worker, *, is_costly: bool) -> None:
    """Blocks and requests are conserved; a costly check accounts for each of them."""
    blocks = worker.scheduler.kv_block_counts()
    if min(blocks.referenced, blocks.free, blocks.leased, blocks.quarantined) < 0:
        raise Violation("conservation of blocks", f"{worker.incarnation}: {blocks}")
    known = worker.scheduler.request_ids
    if len(known) != len(served := worker.requests.request_ids) or not served >= set(known):
        raise Violation("conservation at a worker", f"{worker.incarnation}: {known} != {served}")
    if is_costly:
        try:
            worker.scheduler.check_integrity()
        except AssertionError as error:
            raise Violation("integrity of the scheduler", f"{worker.incarnation}: {error}") from error


def _check_blocks_to_write(worker: Worker) -> None:
    """No block is free, or another request's, while a transfer may still write it.

    Without this check, such a bug shows only if the block has a new owner, whose KV is written and then overwritten.
    """
    kv, to_write = worker.scheduler._kv, worker.connector.blocks_to_write()
    for request_id, block_ids in to_write.items():
        table = kv._tables.get(request_id)
        held = {block.block_id for block in (table.blocks if table else kv._quarantined.get(request_id, ()))}
        expect(
            "blocks that may still be written are not free",
            block_ids <= held,
            f"{worker.incarnation}: {request_id} gave up {sorted(block_ids - held)}",
        )
    is_kept = set().union(*to_write.values())
    for reader in worker.readers.values():
        read_into = reader.blocks_under_way()
        expect(
            "blocks that may still be written are not free",
            read_into <= is_kept,
            f"{worker.incarnation}: {reader.name} still writes {sorted(read_into - is_kept)}",
        )
