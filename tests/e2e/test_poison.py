"""Behaviour 56 with real processes: one caller's request that ends its workers, or breaks its steps, sent ten times."""

import asyncio
import random
from pathlib import Path

import pytest

from gateway import GatewayError
from gateway.admission.suspects import MAX_LOSSES_AT_ONE_TOKEN
from tests.e2e.worker_faults import (
    Question,
    Tally,
    _ask,
    _come_to_rest,
    answer_all,
    make_config,
    make_questions,
)
from tests.factories.fragile_cluster import FragileCluster, fragile_cluster
from tests.factories.models import make_model_dir
from tests.factories.warm_worker import BREAKS_STEPS, KILLS_WORKERS

pytestmark = pytest.mark.slow

NUM_TIMES, NUM_AT_ONCE, NUM_BYSTANDERS = 10, 8, 40


async def keep_alive(cluster: FragileCluster, name: str, ends: list[str]) -> None:
    """As a supervisor does."""
    while True:
        await cluster.workers[name].process.wait()
        ends.append(name)
        cluster.gateway.workers.worker_died(name, "its process has ended")
        await cluster.replace(name)


async def send(cluster: FragileCluster, poison: int) -> str:
    """The error that the client gets."""
    try:
        async for event in cluster.client.generate(token_ids=[poison, 7, 8, 9], sampling={"max_tokens": 9}):
            raise AssertionError(f"it got {event}")
    except GatewayError as error:
        return str(error)
    raise AssertionError("it got an empty answer")


@pytest.mark.parametrize(
    ("poison", "max_ends"),
    [(KILLS_WORKERS, MAX_LOSSES_AT_ONE_TOKEN), pytest.param(BREAKS_STEPS, 0, marks=pytest.mark.by_hand)],
)
def test_c56_a_poison_sent_ten_times_costs_few_workers_and_bystanders_nothing(
    poison: int, max_ends: int, tmp_path: Path
) -> None:
    async def run() -> None:
        config, rng, ends = make_config("shared_memory"), random.Random(5), list[str]()
        async with fragile_cluster(config, make_model_dir(tmp_path / "model")) as cluster:
            questions = await answer_all(cluster, make_questions(rng, 6))
            await cluster.prepare_spares(2)
            keepers = [asyncio.create_task(keep_alive(cluster, name, ends)) for name in cluster.workers]
            tally, errors, over = Tally(), list[str](), asyncio.Event()

            async def ask_on(number: int) -> None:
                while not over.is_set() or tally.num_started < NUM_BYSTANDERS:
                    question: Question = questions[(number + tally.num_started) % len(questions)]
                    await _ask(cluster, question, f"bystander {tally.num_started}", tally)

            async with asyncio.TaskGroup() as tasks:
                for number in range(NUM_AT_ONCE):
                    tasks.create_task(ask_on(number))
                for _ in range(NUM_TIMES):
                    errors.append(await send(cluster, poison))
                over.set()
            assert await _come_to_rest(cluster) == []
            for keeper in keepers:
                keeper.cancel()
            print(f"{len(ends)} workers ended {ends}; {tally}; {set(errors)}")
            assert len(ends) == max_ends
            assert tally.wrong == []
            assert tally.errors == {}
            assert tally.num_right == tally.num_started >= NUM_BYSTANDERS
            assert all(
                error.startswith("FAILED_PRECONDITION: the request was stopped") for error in errors
            ), errors
            assert cluster.gateway._driver.dispatcher.suspects.counts["refused"] == NUM_TIMES - 1

    asyncio.run(run())
