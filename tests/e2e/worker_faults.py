"""Workers that are killed, stopped or replaced while hand-overs run: every client's answer, and every block freed.

    python -m tests.e2e.worker_faults --transfers 200 [--seed N] [--transport shared_memory|zmq_tcp]

Real processes and the real gateway, two workers of each role, and every fault on either side. Each request must end
with the tokens of an undisturbed run, or with an error after some of these tokens.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal

from baton.config import BatonConfig
from baton.system.progress_watch import EXIT_HUNG
from gateway import GatewayError
from tests.factories.fragile_cluster import FragileCluster, fragile_cluster, unrest
from tests.factories.local_cluster import HANDING_OVER
from tests.factories.models import make_model_dir

LEASE_S = 1.0
STANDSTILL_S = 2.0 * LEASE_S
HANG_S = 5.0
"""A step of this model takes milliseconds."""
NUM_AT_ONCE = 12
TRANSFERS_PER_FAULT = 50
REQUEST_TIMEOUT_S = 60.0
REST_TIMEOUT_S = 90.0
HONEST_ERRORS = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}

Transport = Literal["shared_memory", "zmq_tcp"]
TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "zmq_tcp")


def make_config(transport: Transport) -> BatonConfig:
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"kv_cache_memory_mib": 16, "num_threads": 1, "progress_timeout_s": HANG_S},
            "scheduler": {"max_num_batched_tokens": 64, "num_blocks": 64},
            "gateway": HANDING_OVER,
            "network": {"heartbeat_interval_s": 0.1, "peer_timeout_s": 1.0},
            "kv_transfer": {"transport": transport, "lease_s": LEASE_S, "peer_timeout_s": 1.0},
            "cluster": {"prefill": 2, "decode": 2},
        }
    )


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, how it is asked, and the expected answer."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    mode: Literal["disaggregated"] | None
    answer: tuple[int, ...] = ()


@dataclass(slots=True)
class Tally:
    """The outcomes of the requests of one row of the table."""

    num_started: int = 0
    num_right: int = 0
    num_retried: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """What may never happen."""
    home_after_s: float = 0.0


# what is asked


def make_questions(rng: random.Random, number: int) -> list[Question]:
    """Greedy and sampled requests. Prompts have from less than a block to many chunks, and answers from one token to
    many."""
    questions = []
    for index in range(number):
        length = rng.choice([rng.randint(1, 40), rng.randint(1, 300)])
        sampling: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 8, 24, 60]), "ignore_eos": True}
        if index % 2:
            sampling |= {"temperature": 0.8, "seed": index}
        else:
            sampling |= {"temperature": 0.0}
        prompt = tuple(rng.randint(3, 290) for _ in range(length))
        questions.append(Question(prompt, sampling, "disaggregated" if index % 5 == 4 else None))
    return questions


async def answer_all(cluster: FragileCluster, questions: list[Question]) -> list[Question]:
    """The questions with the answers of an undisturbed cluster, asked one after another."""
    answered = []
    for question in questions:
        tally = Tally()
        tokens = await _ask(cluster, question, "undisturbed", tally)
        assert len(tokens) == question.sampling["max_tokens"], (tokens, tally)
        answered.append(Question(question.prompt, question.sampling, question.mode, tuple(tokens)))
    return answered


async def _ask(cluster: FragileCluster, question: Question, salt: str, tally: Tally) -> list[int]:
    """Returns the tokens of the answer. Each request has its own salt, so no worker has any part of the prompt
    cached."""
    tokens: list[int] = []
    completions = []
    tally.num_started += 1
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            async for event in cluster.client.generate(
                token_ids=question.prompt, sampling=question.sampling, mode=question.mode, cache_salt=salt
            ):
                tokens += event.token_ids
                if event.completion is not None:
                    completions.append(event.completion)
    except TimeoutError:
        tally.wrong.append(f"{salt}: no end after {REQUEST_TIMEOUT_S:g} s, {len(tokens)} tokens")
    except GatewayError as error:
        tally.errors[str(error)] += 1
        if error.code not in HONEST_ERRORS:
            tally.wrong.append(f"{salt}: {error}")
    else:
        if [completion.usage["completion_tokens"] for completion in completions] != [len(tokens)]:
            tally.wrong.append(f"{salt}: {len(tokens)} tokens and then {completions}")
        if question.answer and len(tokens) != len(question.answer):
            tally.wrong.append(f"{salt}: {len(tokens)} tokens instead of {len(question.answer)}")
        tally.num_right += 1
        tally.num_retried += sum(completion.placement["attempts"] > 1 for completion in completions)
    if question.answer and tuple(tokens) != question.answer[: len(tokens)]:
        tally.wrong.append(f"{salt}: {tokens} is no beginning of {question.answer}")
    return tokens


# what goes wrong


async def kill(cluster: FragileCluster, victim: str, rng: random.Random) -> None:
    """`kill -9`. A while later, another process replaces the worker, at other addresses."""
    await cluster.workers[victim].kill()
    if rng.random() < 0.5:  # as if a supervisor saw it; otherwise the gateway must notice the silence
        cluster.gateway.workers.worker_died(victim, "killed")
    await asyncio.sleep(STANDSTILL_S)
    await cluster.replace(victim)


async def stop(cluster: FragileCluster, victim: str, rng: random.Random) -> None:
    """SIGSTOP for longer than any lease, then SIGCONT."""
    cluster.workers[victim].stop()
    await asyncio.sleep(STANDSTILL_S)
    cluster.workers[victim].go_on()


async def restart(cluster: FragileCluster, victim: str, rng: random.Random) -> None:
    """`kill -9`, and at once another process at the same addresses, before any peer gives up waiting."""
    ports = cluster.workers[victim].ports
    await cluster.workers[victim].kill()
    if rng.random() < 0.5:
        cluster.gateway.workers.worker_died(victim, "killed")
    await cluster.replace(victim, ports)


async def hang(cluster: FragileCluster, victim: str, rng: random.Random) -> None:
    """A step never ends, while heartbeats continue. The worker ends itself, and another process replaces it."""
    worker = cluster.workers[victim]
    await worker.hang()
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        assert await worker.process.wait() == EXIT_HUNG
    await cluster.replace(victim)


FAULTS = {"kill": kill, "stop": stop, "restart": restart, "hang": hang}
ROLES = {"prefill": ("w0", "w1"), "decode": ("w2", "w3")}
STORM = ("any", "each")
"""A fault of any kind on each side at the same time."""

ROWS = [*[(fault, role) for fault in FAULTS for role in ROLES], STORM]


async def break_workers(
    cluster: FragileCluster,
    fault: str,
    role: str,
    questions: list[Question],
    num_transfers: int,
    rng: random.Random,
    pause_s: float = 0.0,
) -> Tally:
    """Plays one row: sends requests until there were enough, and the last fault is over. Then everything must come to
    rest.

    `pause_s`: how long a client pauses after each answer, so that the machine has less to do while a fault
    lasts.
    """
    tally = Tally()
    over = asyncio.Event()
    numbers = count()

    async def ask_on() -> None:
        while not over.is_set() or tally.num_started < num_transfers:
            number = next(numbers)
            await _ask(cluster, questions[number % len(questions)], f"{fault} {role} {number}", tally)
            await asyncio.sleep(pause_s)

    num_victims = 2 if role == "each" else 1
    if fault != "stop":
        # While requests keep every core busy, a process takes too long to load to be replaced "at once".
        await cluster.prepare_spares(num_victims)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_AT_ONCE):
            tasks.create_task(ask_on())
        for _ in range(max(1, num_transfers // TRANSFERS_PER_FAULT)):
            begun = tally.num_started
            await _until(lambda begun=begun: tally.num_started >= begun + NUM_AT_ONCE)  # type: ignore[misc]
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            victims = [rng.choice(names) for name, names in ROLES.items() if role in (name, "each")]
            async with asyncio.TaskGroup() as faults:
                for victim in victims:
                    begin = FAULTS.get(fault) or rng.choice(list(FAULTS.values()))
                    faults.create_task(begin(cluster, victim, rng))
        over.set()
    ended_at = time.monotonic()
    tally.wrong += await _come_to_rest(cluster)
    tally.home_after_s = time.monotonic() - ended_at
    return tally


async def _come_to_rest(cluster: FragileCluster) -> list[str]:
    """Waits until everything is at rest. Returns the reasons if that does not happen in time; otherwise nothing."""
    try:
        async with asyncio.timeout(REST_TIMEOUT_S):
            while found := await _unrest(cluster):
                await asyncio.sleep(0.02)
    except TimeoutError:
        return found
    return []


async def _unrest(cluster: FragileCluster) -> list[str]:
    """What is left of requests at the gateway and on every worker."""
    descriptions = await cluster.descriptions()
    found = [f"{name}: {what}" for name, about in descriptions.items() for what in unrest(about)]
    seen = {worker["name"]: worker["state"] for worker in (await cluster.client.describe())["workers"]}
    found += [f"the gateway sees {name} {state}" for name, state in seen.items() if state != "ready"]
    found += [f"the gateway does not know {name}" for name in cluster.workers.keys() - seen.keys()]
    driver = cluster.gateway._driver
    counted = {name: number for name, number in driver.router.num_sub_requests.items() if number}
    if counted or driver.dispatcher.num_in_flight or driver.dispatcher._placed:
        found.append(f"the gateway has {driver.dispatcher.num_in_flight} requests and sub-requests {counted}")
    return found


async def maps_of_the_dead(cluster: FragileCluster, timeout_s: float) -> list[str]:
    """Pools of ended processes that a process still maps after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while True:
        descriptions = await cluster.descriptions()
        alive = {pool for about in descriptions.values() for pool in about["own_pools"]}
        left = [
            f"{name} maps the pools {dead} of dead workers"
            for name, about in descriptions.items()
            if (dead := sorted(set(about["mapped_pools"]) - alive))
        ]
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.1)


def complaints(cluster: FragileCluster) -> Iterator[str]:
    """Exceptions in the logs of the workers, including dead ones."""
    for worker in cluster.processes:
        log = worker.log.read_text()
        if "Traceback" in log:
            yield f"worker {worker.process.pid}: {log[log.index('Traceback') :][:2000]}"


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


# all of it


@asynccontextmanager
async def broken_cluster(
    transport: Transport, model_path: Path, seed: int
) -> AsyncIterator[tuple[FragileCluster, list[Question]]]:
    """A cluster to break, and questions with their answers."""
    async with fragile_cluster(make_config(transport), model_path) as cluster:
        yield cluster, await answer_all(cluster, make_questions(random.Random(seed), 40))


async def main(num_transfers: int, seed: int, transports: tuple[Transport, ...]) -> int:
    """Prints the table. Returns the number of violations."""
    rng, wrong = random.Random(seed), []
    heads = ("fault", "transfers", "ended right", "retried", "errors", "blocks home after s")
    row = "{:<31} {:>9} {:>11} {:>7} {:>6} {:>19}"
    print(f"seed {seed}\n" + row.format(*heads), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model_path = make_model_dir(Path(folder) / "model")
        for transport in transports:
            async with broken_cluster(transport, model_path, seed) as (cluster, questions):
                for fault, role in ROWS:
                    tally = await break_workers(cluster, fault, role, questions, num_transfers, rng)
                    counts = (tally.num_started, tally.num_right, tally.num_retried, tally.errors.total())
                    name = f"{transport}: {fault} {role}"
                    print(row.format(name, *counts, f"{tally.home_after_s:.2f}"), flush=True)
                    for error, number in tally.errors.items():
                        print(f"    {number} x {error}", flush=True)
                    wrong += [f"{name}: {what}" for what in tally.wrong]
                wrong += await maps_of_the_dead(cluster, 5.0)
                wrong += complaints(cluster)
    print("\n".join(wrong) or "nothing that may never happen")
    return len(wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--transfers", type=int, default=200, help="at least this many for each fault")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10_000))
    parser.add_argument("--transport", choices=TRANSPORTS)
    options = parser.parse_args()
    chosen = (options.transport,) if options.transport else TRANSPORTS
    raise SystemExit(asyncio.run(main(options.transfers, options.seed, chosen)) > 0)
