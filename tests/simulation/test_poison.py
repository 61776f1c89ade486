"""Behaviour 56: no innocent request counts as one that ends workers, either under constant random kills, or beside the
poison of another gateway."""

import random
from functools import partial

import pytest

from baton.config import KVTransferConfig, SchedulerConfig
from baton.worker import WorkerRole
from gateway.admission.suspects import MAX_LOSSES_AT_ONE_TOKEN, Suspects
from kv_transfer.protocol.transports import ZMQ_TCP
from simulator.fleet import SimFleet
from simulator.gateway import RequestEnd, RequestSpec, SimGateway
from simulator.model import KILLS_WORKERS
from simulator.network import Network, NetworkFaults
from simulator.pools import ReadFaults, SharedPools
from simulator.worker import Site, WorkerSpec
from simulator.world import Violation, World
from tests.simulation import run

WORKERS = ("p0", "p1", "d0", "d1")
NUM_STREAMS, DURATION_S = 120, 60.0


def play(seed: int, kill_every_s: float, num_poisons: int = 0) -> tuple[World, SimGateway]:
    """Streams of some seconds. A random worker is killed from time to time, and its successor starts at once."""
    world, rng = World(seed, max_events=10**7), random.Random(seed)
    network = Network(world, NetworkFaults())
    pools = SharedPools(world, ReadFaults(), True)
    site = Site(
        world, KVTransferConfig(peer_timeout_s=1.0, lease_s=2.0), network, pools, may_damage_reads=False
    )
    gateway = SimGateway(world, "retry", 48)
    fleet = SimFleet(site, [_worker(name) for name in WORKERS], [gateway])
    for number in range(NUM_STREAMS):
        prompt = (number, *range(rng.randrange(20)))
        arrives_at = rng.uniform(0.0, DURATION_S)
        spec = RequestSpec(f"r{number}", prompt, 25, arrives_at, None, None, None, None, priority=0)
        world.at(arrives_at, partial(fleet.arrive, spec, number), is_plane=False)
    for number in range(num_poisons):
        spec = RequestSpec(
            f"poison{number}", (KILLS_WORKERS, 7), 9, 5.0 * number, None, None, None, None, 0, "m"
        )
        world.at(spec.arrives_at, partial(fleet.arrive, spec, number), is_plane=False)
    for number in range(1, int(DURATION_S / kill_every_s) if kill_every_s else 0):
        world.at(number * kill_every_s, lambda: _kill(fleet, rng.choice(WORKERS)), is_plane=False)
    world.run(until=DURATION_S + 60.0)
    return world, gateway


def _kill(fleet: SimFleet, name: str) -> None:
    worker = fleet.workers[name]
    if not worker.is_dead:
        worker.runner.on_killed()


def _worker(name: str) -> WorkerSpec:
    config = SchedulerConfig(
        num_blocks=200, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=48
    )
    role = WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE
    step_s = (0.05, 0.2)
    return WorkerSpec(name, role, config, "host", (ZMQ_TCP,), 2**26, "model", step_s, 0.0, 100, 0.0, False)


@pytest.mark.parametrize("seed", range(2))
def test_c56_random_kills_make_no_innocent_a_poison(seed: int) -> None:
    """One of four workers is killed every 1.5 s."""
    world, gateway = play(seed, kill_every_s=1.5)
    assert gateway.ended == {RequestEnd.DONE: NUM_STREAMS}
    assert world.counts["path lost"] > NUM_STREAMS // 3


def test_c56_only_what_is_compared_with_other_losses_keeps_innocents_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Suspects, "_num_lost_without", lambda *_: 0)
    with pytest.raises(Violation, match="only poison is stopped"):
        play(3, kill_every_s=0.4)


@pytest.mark.parametrize("seed", [3303, 7223])
def test_c56_no_innocent_is_taken_for_the_poison_of_another_gateway(seed: int) -> None:
    """In these seeds, an innocent request of one gateway is on each worker that the other gateway's poison ends."""
    result = run.play(seed)
    assert result.violation is None, result.replay
    assert result.counts["fault poison killed"] > MAX_LOSSES_AT_ONE_TOKEN
    assert result.counts["path suspect refused"]


def test_c56_two_accidents_that_meet_one_request_look_like_its_fault() -> None:
    """In this seed, a request is alone in a step where one worker's device fails, then in one that computes NaN. Both
    devices work before and after, so their checks pass."""
    result = run.play(4502)
    assert result.violation is None, result.replay
    assert result.counts["path stopped"] == 1


def test_c56_a_poison_that_comes_again_ends_few_workers_in_all() -> None:
    world, gateway = play(1, kill_every_s=0.0, num_poisons=10)
    assert world.counts["fault poison killed"] == MAX_LOSSES_AT_ONE_TOKEN
    assert gateway.ended == {RequestEnd.DONE: NUM_STREAMS, RequestEnd.ERROR: 10}
