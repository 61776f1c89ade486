"""Whatever the pool, the budget and the mode: every request ends, with the same tokens, and nothing is left."""

import random
from collections import Counter

import pytest

from baton.kv import TransferRole
from baton.kv_groups import ONE_GROUP, KVGroups
from baton.request import FinishReason, OnPreemption
from baton.step import KVConnectorOutput
from scheduler import Request, RequestStatus
from tests.factories.driving import Driver
from tests.factories.scheduling import (
    FakeConnector,
    failed,
    flatten,
    make_scheduler,
    received,
)
from tests.property.workloads import (
    GROUPS,
    MODES,
    Mode,
    Options,
    add,
    check,
    expected_tokens,
    make_workload,
    memory_for,
    next_token,
    play,
    runner_for,
    settings_for,
)

NUM_WORKLOADS = 14
NUM_WORKLOADS_WITH_TRANSFERS = 15
NUM_WORKLOADS_THAT_MOVE = 8
NUM_WORKLOADS_WITH_WINDOWS = 14
NUM_WORKLOADS_WITH_BOTH = 9


def test_every_mode_leads_to_the_same_tokens() -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        happened += check(seed)
    assert all(happened[what] > 40 for what in ("preemptions", "swap_preemptions", "prefix_cache_hits"))
    num_accepted = happened["spec_decode_num_accepted_tokens"]
    assert 400 < num_accepted < happened["spec_decode_num_draft_tokens"] - 400
    assert happened["forced_tokens"] > 400


def test_c27_with_windows_every_mode_leads_to_the_same_tokens() -> None:
    happened: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS_WITH_WINDOWS):
        happened += check(seed, GROUPS[seed % len(GROUPS)])
    assert all(happened[what] > 5 for what in ("preemptions", "swap_preemptions", "prefix_cache_hits")), (
        happened
    )


class RandomTransfers:
    """Ends loads and holds at random moments, in every way they can end."""

    def __init__(self, rng: random.Random, connector: FakeConnector, requests: dict[str, Request]) -> None:
        self._rng = rng
        self._connector = connector
        self._requests = requests
        self._open: set[str] = set()
        self._seen: set[str] = set()

    def outputs(self) -> list[KVConnectorOutput]:
        self._open |= self._connector.loading.keys() - self._seen
        self._seen |= self._connector.loading.keys()
        ended = [request_id for request_id in sorted(self._open) if self._rng.random() < 0.3]
        self._open.difference_update(ended)
        outputs = [self._end(self._requests[request_id]) for request_id in ended]
        return outputs + [n for n in outputs if self._rng.random() < 0.2]  # some reports come twice

    def _end(self, request: Request) -> KVConnectorOutput:
        if request.is_finished:
            return KVConnectorOutput(quiesced=(request.request_id,))
        if self._rng.random() < 0.3:
            return failed(request, num_valid_blocks=self._rng.randrange(2))
        return received(request, next_token(request.request_id, request.num_output_tokens))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_with_transfers_that_fail_and_clients_that_leave_nothing_leaks(mode: Mode) -> None:
    for seed in range(NUM_WORKLOADS_WITH_TRANSFERS):
        run_with_transfers(seed, mode)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_with_transfers_and_windows_nothing_leaks(mode: Mode) -> None:
    for seed in range(NUM_WORKLOADS_WITH_BOTH):
        run_with_transfers(seed, mode, GROUPS[seed % len(GROUPS)])


def run_with_transfers(seed: int, mode: Mode, groups: KVGroups = ONE_GROUP) -> None:
    rng, workload = random.Random(seed), make_workload(seed, groups)
    connector = FakeConnector(holds=True, memory=memory_for(workload))
    scheduler = make_scheduler(connector, **settings_for(workload, mode))
    driver = Driver(scheduler, runner_for(mode, connector.memory), mode.num_ahead, connector)
    roles = {
        options["request_id"]: rng.choice([None, TransferRole.CONSUMER]) for options in workload.requests
    }
    requests = {
        o["request_id"]: mode.request(o, role=roles[o["request_id"]], output_token_ids=some_outputs(o, rng))
        for o in workload.requests
    }
    transfers = RandomTransfers(rng, connector, requests)
    aborted: set[str] = set()
    arrivals = list(requests.values())

    def before_step() -> None:
        if arrivals and rng.random() < 0.5:
            add(driver, arrivals.pop(0))
        for output in transfers.outputs():
            driver.note(flatten(scheduler.update_connector_output(output)))
        if rng.random() < 0.05 and scheduler.has_requests():
            aborted.add(victim := rng.choice(sorted(scheduler.request_ids)))
            driver.note(flatten(scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)))

    while arrivals or scheduler.has_requests() or scheduler.kv_block_counts().quarantined:
        before_step()
        driver.step()
    driver.complete()
    driver.step()
    driver.check_rest()
    for options in workload.requests:
        request_id, expected = options["request_id"], expected_tokens(options)
        got = driver.tokens[request_id]
        assert got == expected[: len(got)], f"seed {seed}: {request_id}"
        assert request_id in aborted or got == expected, f"seed {seed}: {request_id}"


def some_outputs(options: Options, rng: random.Random) -> list[int]:
    """For every second request: the tokens that another worker sampled before the request moved here."""
    expected = expected_tokens(options)
    return expected[: rng.choice([0, rng.randrange(len(expected))])]


def test_a_workload_can_be_replayed() -> None:
    def run() -> list[str]:
        return play(make_workload(5), MODES[1]).finished_in_plans

    assert run() == run()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_c36_requests_that_small_pools_give_back_go_on_elsewhere_and_lose_no_token(mode: Mode) -> None:
    num_given_back = sum(give_back_and_go_on(seed, mode) for seed in range(NUM_WORKLOADS_THAT_MOVE))
    assert num_given_back > NUM_WORKLOADS_THAT_MOVE / 5


def give_back_and_go_on(seed: int, mode: Mode) -> int:
    """Two engines: requests given back by one continue on either, with their outputs so far. Returns how many did."""
    rng, workload = random.Random(seed), make_workload(seed)
    settings = settings_for(workload, mode) | {"num_blocks": 12, "max_num_seqs": 16}
    drivers = [
        Driver(
            make_scheduler(**settings),
            runner_for(
                mode,
                memory_for(workload),
                lambda name, position: next_token(name.partition("#")[0], position),
            ),
            mode.num_ahead,
        )
        for _ in range(2)
    ]
    left = {options["request_id"]: options for options in workload.requests}
    at: dict[str, tuple[str, Driver]] = {}
    said: dict[str, list[int]] = {request_id: [] for request_id in left}
    num_moves = 0
    while left:
        for request_id, options in left.items():
            if request_id not in at:
                name, driver = f"{request_id}#{num_moves}", rng.choice(drivers)
                moved = options | {"request_id": name, "output_token_ids": said[request_id]}
                add(driver, mode.request(moved, on_preemption=OnPreemption.GIVE_BACK))
                at[request_id] = name, driver
                num_moves += 1
        for driver in drivers:
            driver.step()
        for request_id, (name, driver) in list(at.items()):
            end = driver.ends.get(name)
            if end is not None:
                said[request_id] = driver.tokens[name]
                del at[request_id]
                if end is not FinishReason.ERROR:
                    del left[request_id]
    for driver in drivers:
        driver.complete()
        driver.step()
        driver.check_rest()
    assert said == {options["request_id"]: expected_tokens(options) for options in workload.requests}, seed
    return num_moves - len(workload.requests)
