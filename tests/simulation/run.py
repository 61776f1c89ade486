"""Plays a seed: from its first event, through its faults, to rest. The same seed is the same run, byte for byte."""

import logging
import math
import multiprocessing
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice

from simulator.fleet import SimFleet
from simulator.gateway import SimGateway
from simulator.network import Network
from simulator.pools import SharedPools
from simulator.worker import Site
from simulator.world import Violation, World
from tests.simulation.faults import Faults
from tests.simulation.invariants import Invariants
from tests.simulation.scenario import MAX_MODEL_LEN, Scenario, make_scenario

SEEDS_PER_JOB = 8
JOBS_AHEAD = 4
"""For each process: few, so that little is played in vain when a run stops early."""

MAX_CALM_S = 120.0
"""Enough for every deadline to pass, one after the other."""
CALM_STEP_S = 1.0
IDLE_S = 32.0


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a seed; `violation` is None if every promise was kept."""

    seed: int
    digest: str
    num_events: int
    counts: "Counter[str]"
    violation: Violation | None

    @property
    def replay(self) -> str:
        return f"python -m tests.simulation --seed {self.seed} --verbose"


def play(seed: int, *, is_verbose: bool = False) -> Result:
    scenario, world = make_scenario(seed), World(seed, is_verbose)
    logging.disable(logging.CRITICAL)
    violation: Violation | None = None
    try:
        _play(scenario, world)
    except Violation as broken:
        violation = broken
    finally:
        logging.disable(logging.NOTSET)
    return Result(seed, world.digest(), world.num_events, world.counts, violation)


def results(seeds: Iterable[int], num_jobs: int) -> Generator[Result, None, None]:
    """Every seed's result, in order. Processes are forked, so patches of this process apply there, too."""
    if num_jobs == 1:
        yield from map(play, seeds)
        return
    waiting, chunk = iter(seeds), SEEDS_PER_JOB * JOBS_AHEAD * num_jobs
    with multiprocessing.get_context("fork").Pool(num_jobs) as pool:
        ahead = pool.imap(play, list(islice(waiting, chunk)), SEEDS_PER_JOB)
        while batch := list(islice(waiting, chunk)):
            behind, ahead = ahead, pool.imap(play, batch, SEEDS_PER_JOB)
            yield from behind
        yield from ahead


def _play(scenario: Scenario, world: World) -> None:
    pools = SharedPools(world, scenario.read_faults, scenario.reports_exits)
    network = Network(world, scenario.network)
    site = Site(world, scenario.transfer, network, pools, may_damage_reads=scenario.is_checked)
    names = ["gateway", "second gateway"][: scenario.num_gateways]
    knows_room = not scenario.is_crowded or len(names) > 1
    gateways = [
        SimGateway(world, scenario.policy, MAX_MODEL_LEN, name=name, knows_room=knows_room) for name in names
    ]
    fleet = SimFleet(site, scenario.workers, gateways)
    faults = Faults(site, scenario, fleet)
    invariants = Invariants(world, scenario, fleet)
    world.after_event = invariants
    for fault in scenario.faults:
        faults.plan(fault)
    if scenario.gateway_dies_at is not None:
        faults.plan_gateway_death(scenario.gateway_dies_at, gateways[-1])
    for number, spec in enumerate(scenario.requests):
        world.at(spec.arrives_at, partial(fleet.arrive, spec, number), is_plane=False)
        if spec.leaves_after_s is not None:
            leaves_at = spec.arrives_at + spec.leaves_after_s
            for gateway in gateways:
                world.at(leaves_at, partial(gateway.leave, spec.request_id), is_plane=False)
    try:
        faults_end = math.ceil(
            max([scenario.calm_from, *(fault.at + fault.duration_s for fault in scenario.faults)])
        )
        world.run(until=faults_end)
        world.is_calm = True
        _come_to_rest(world, scenario, fleet)
        invariants.check_rest()
        world.run(until=world.now + IDLE_S)
        invariants.check_rest()
        invariants.check_idle()
    finally:
        _count(world, fleet)


def _come_to_rest(world: World, scenario: Scenario, fleet: SimFleet) -> None:
    end = world.now + MAX_CALM_S
    while world.now < end and not _is_quiet(fleet):
        world.run(until=world.now + CALM_STEP_S)
    # A message still on its way may begin a rank transfer, for one more lease.
    world.run(until=world.now + scenario.network.max_lateness_s + scenario.transfer.lease_s + CALM_STEP_S)


def _is_quiet(fleet: SimFleet) -> bool:
    return not any(gateway.num_open for gateway in fleet.gateways) and all(
        len(worker.connector.endpoint) == 0
        and not worker.connector.holds
        and not worker.requests.request_ids
        and not worker.hangs
        for worker in fleet.workers.values()
    )


def _count(world: World, fleet: SimFleet) -> None:
    """What happened to all incarnations."""
    for worker in fleet.incarnations:
        of_core, of_connector = worker.core.counters(), worker.connector.counters()
        assert not of_core.keys() & of_connector.keys(), "a worker's status shows both in one table"
        for name, count in {**of_core, **of_connector}.items():
            if count and not name.endswith(("_us", "_bytes")):
                world.counts[f"counter {name}"] += count
    for gateway in fleet.gateways:
        for end, count in gateway.ended.items():
            world.counts[f"request {end.value}"] += count
