"""A link between two healthy workers is cut, which no gateway sees: few requests wait for it."""

from functools import partial

import pytest

from baton.config import KVTransferConfig, SchedulerConfig
from baton.worker import WorkerRole
from gateway.requests.record import RequestRecord
from gateway.requests.retry import LoadFailurePolicy
from gateway.routing.avoided_pairs import FIRST_PAUSE_S, AvoidedPairs
from kv_transfer.protocol.transports import ZMQ_TCP
from simulator.fleet import SimFleet
from simulator.gateway import RequestEnd, RequestSpec, SimGateway
from simulator.network import Network, NetworkFaults
from simulator.pools import ReadFaults, SharedPools
from simulator.worker import Site, WorkerSpec
from simulator.world import World

PEER_TIMEOUT_S = 5.0
EVERY_S = 1.0
NUM_REQUESTS = 50
MAX_MODEL_LEN = 48
CUT = ("p0", "d0")


def play(policy: LoadFailurePolicy, cut_s: float, num_requests: int = NUM_REQUESTS) -> SimGateway:
    """One request a second. Every other request would go to the pair whose link is cut."""
    world = World(seed=1)
    network = Network(world, NetworkFaults())
    network.partitions = dict.fromkeys([CUT, CUT[::-1]], cut_s)
    transfer = KVTransferConfig(peer_timeout_s=PEER_TIMEOUT_S)
    site = Site(world, transfer, network, SharedPools(world, ReadFaults(), True), may_damage_reads=False)
    gateway = SimGateway(world, policy, MAX_MODEL_LEN)
    fleet = SimFleet(site, [_worker(name) for name in ("p0", "p1", "d0", "d1")], [gateway])
    for number in range(num_requests):
        spec = RequestSpec(
            f"r{number}", (number, *range(20)), 4, number * EVERY_S, None, None, None, None, priority=0
        )
        world.at(spec.arrives_at, partial(fleet.arrive, spec, number), is_plane=False)
    world.run(until=num_requests * EVERY_S + 100.0)
    assert gateway.ended == {RequestEnd.DONE: num_requests}
    return gateway


def paid(gateway: SimGateway) -> list[str]:
    """Requests that waited for the link's timeout."""
    return [request_id for request_id, record in gateway.records.items() if _total_s(record) > PEER_TIMEOUT_S]


@pytest.mark.parametrize("policy", ["retry", "recompute"])
def test_c42_few_requests_pay_for_a_link_that_the_gateway_does_not_see(
    policy: LoadFailurePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only requests that were sent before the first failure was known, and one request that tries the pair again."""
    gateway = play(policy, cut_s=1e9)
    assert 1 <= len(paid(gateway)) <= 4
    assert len(gateway.dispatcher.avoided_pairs) == 1
    monkeypatch.setattr(AvoidedPairs, "at", lambda *_: frozenset())
    assert len(paid(play(policy, cut_s=1e9))) >= 20, "without the pause"


def test_a_link_that_works_again_is_used_again() -> None:
    gateway = play("retry", cut_s=10.0, num_requests=60)
    assert len(gateway.dispatcher.avoided_pairs) == 0
    last = [record for record in gateway.records.values() if _arrival_s(record) > FIRST_PAUSE_S + 10.0]
    pairs = [record.attempts[0].placement.pair for record in last]
    assert CUT in pairs, "it has its share of requests"
    assert all(_total_s(record) < PEER_TIMEOUT_S for record in last)


def _worker(name: str) -> WorkerSpec:
    scheduler = SchedulerConfig(
        num_blocks=100, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN
    )
    role = WorkerRole.DECODE if name.startswith("d") else WorkerRole.PREFILL
    return WorkerSpec(
        name=name,
        role=role,
        scheduler=scheduler,
        host=name,
        transports=(ZMQ_TCP,),
        window_bytes=2**26,
        model="model",
        step_s=(0.001, 0.004),
        max_command_delay_s=0.0,
        max_waiting=100,
        clock_offset_s=0.0,
        reads_at_once=True,
    )


def _arrival_s(record: RequestRecord) -> float:
    return int(record.request_id[1:]) * EVERY_S


def _total_s(record: RequestRecord) -> float:
    assert record.finish is not None
    return record.finish.timing.total_s
