"""Whatever the pool, the budget and the policy: every request ends, with the same tokens, and nothing is left."""

import random
from typing import Any

import pytest

from baton.kv import TransferRole
from baton.step import KVConnectorOutput
from scheduler import Request, RequestStatus, Scheduler
from tests.factories.scheduling import (
    FakeConnector,
    FakeRunner,
    assert_at_rest,
    failed,
    make_request,
    make_scheduler,
    received,
    run_step,
    token_at,
)

NUM_WORKLOADS = 150


def make_workload(rng: random.Random) -> list[dict[str, Any]]:
    """Requests as keyword arguments, so that every scheduler gets requests of its own; many share prefixes."""
    stems = [[rng.randrange(1_000) for _ in range(rng.randrange(64))] for _ in range(3)]
    return [
        {
            "request_id": f"r{i}",
            "prompt": [*rng.choice(stems), *(rng.randrange(1_000) for _ in range(rng.randrange(1, 60)))],
            "max_tokens": rng.randrange(1, 30),
            "priority": rng.randrange(3),
            "arrival_time": float(i),
            "cache_salt": rng.choice([None, None, "salt"]),
        }
        for i in range(rng.randrange(1, 20))
    ]


def make_settings(rng: random.Random) -> dict[str, Any]:
    """A small pool (the longest request needs ten blocks), an odd budget, and every switch."""
    budget = rng.choice([1, 7, 33, 200])
    return {
        "num_blocks": rng.choice([12, 16, 40]),
        "max_num_seqs": rng.choice([1, 3, 16]),
        "max_num_batched_tokens": budget,
        "long_prefill_token_threshold": rng.choice([0, 5, 50]),
        "enable_prefix_caching": rng.random() < 0.7,
        "policy": rng.choice(["fcfs", "priority"]),
    }


def expected_tokens(options: dict[str, Any]) -> list[int]:
    return [token_at(options["request_id"], position) for position in range(options["max_tokens"])]


def note(tokens: dict[str, list[int]], outputs: list[Any]) -> None:
    for output in outputs:
        known = tokens.setdefault(output.request_id, [])
        assert output.first_position == len(known)
        known.extend(output.token_ids)


@pytest.mark.parametrize("seed", range(NUM_WORKLOADS))
def test_every_schedule_leads_to_the_same_tokens(seed: int) -> None:
    rng = random.Random(seed)
    workload, settings = make_workload(rng), make_settings(rng)
    scheduler, runner = make_scheduler(**settings), FakeRunner()
    tokens: dict[str, list[int]] = {}
    arrivals = [make_request(**options) for options in workload]
    for _ in range(20_000):
        if arrivals and rng.random() < 0.5:
            scheduler.add_request(arrivals.pop(0))
        plan, outputs = run_step(scheduler, runner)
        assert plan.total_num_scheduled_tokens <= settings["max_num_batched_tokens"]
        note(tokens, outputs)
        if not arrivals and not scheduler.has_requests():
            break
    assert_at_rest(scheduler)
    assert tokens == {options["request_id"]: expected_tokens(options) for options in workload}


class RandomTransfers:
    """Ends loads and holds at random moments, in every way they can end."""

    def __init__(self, rng: random.Random, connector: FakeConnector, requests: dict[str, Request]) -> None:
        self._rng = rng
        self._connector = connector
        self._requests = requests
        self._open: set[str] = set()
        self._seen: set[str] = set()

    def news(self) -> list[KVConnectorOutput]:
        self._open |= self._connector.started.keys() - self._seen
        self._seen |= self._connector.started.keys()
        ended = [request_id for request_id in sorted(self._open) if self._rng.random() < 0.3]
        self._open.difference_update(ended)
        news = [self._end(self._requests[request_id]) for request_id in ended]
        return news + [n for n in news if self._rng.random() < 0.2]  # some things are said twice

    def _end(self, request: Request) -> KVConnectorOutput:
        if request.is_finished:
            return KVConnectorOutput(quiesced=(request.request_id,))
        if self._rng.random() < 0.3:
            return failed(request, num_valid_blocks=self._rng.randrange(2))
        return received(request, token_at(request.request_id, 0))


@pytest.mark.parametrize("seed", range(NUM_WORKLOADS))
def test_with_transfers_that_fail_and_clients_that_leave_nothing_leaks(seed: int) -> None:
    rng = random.Random(seed)
    workload, settings = make_workload(rng), make_settings(rng)
    connector = FakeConnector(holds=True)
    runner = FakeRunner(memory=connector.memory)
    scheduler = make_scheduler(connector, **settings)
    roles = {options["request_id"]: rng.choice([None, TransferRole.CONSUMER]) for options in workload}
    requests = {o["request_id"]: make_request(**o, role=roles[o["request_id"]]) for o in workload}
    transfers = RandomTransfers(rng, connector, requests)
    tokens: dict[str, list[int]] = {}
    aborted: set[str] = set()
    arrivals = list(requests.values())
    for _ in range(20_000):
        if arrivals and rng.random() < 0.5:
            scheduler.add_request(arrivals.pop(0))
        for news in transfers.news():
            for outputs in scheduler.update_connector_output(news).values():
                note(tokens, list(outputs.outputs))
        if rng.random() < 0.05 and scheduler.has_requests():
            aborted.add(victim := rng.choice(sorted(scheduler.request_ids)))
            scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED)
        _, news_of_step = run_step(scheduler, runner)
        note(tokens, news_of_step)
        if not arrivals and not scheduler.has_requests() and not scheduler.kv_block_counts().quarantined:
            break
    assert_at_rest(scheduler)
    for options in workload:
        got, expected = tokens.get(options["request_id"], []), expected_tokens(options)
        assert got == expected[: len(got)]
        assert options["request_id"] in aborted or got == expected


def test_a_workload_can_be_replayed() -> None:
    def run() -> list[dict[str, int]]:
        rng = random.Random(5)
        scheduler: Scheduler = make_scheduler(**make_settings(rng))
        runner = FakeRunner()
        for options in make_workload(rng):
            scheduler.add_request(make_request(**options))
        steps = []
        while scheduler.has_requests():
            plan, _ = run_step(scheduler, runner)
            steps.append(dict(plan.num_scheduled_tokens))
        return steps

    assert run() == run()
