"""Several gateways of one fleet: each serves alone, and the end of one does not affect the others."""

import asyncio
import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.baton_client import BatonClient
from gateway import GatewayClient
from gateway.client import GatewayError
from tests.factories.foreign_ray import RAY_ENVIRONMENT
from tests.factories.models import make_model_dir
from tests.factories.serving import STOP_TIMEOUT_S, ServeProcess, joining, serving

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7 + index] for index in range(3)]
LONG, SHORT = 3000, 40
REST_TIMEOUT_S = 90.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = make_model_dir(tmp_path / "tiny", max_position_embeddings=4096)
    path = tmp_path / "baton.yaml"
    sections = {
        "model": {"path": str(model), "load_format": "dummy", "dtype": "float32"},
        "engine": {"kv_cache_memory_mib": 32, "num_threads": 1},
        "cluster": {"name": "blue", "start_timeout_s": 600.0, "drain_timeout_s": 0.5},
        "network": {"peer_timeout_s": 3.0},
    }
    path.write_text(json.dumps(sections))
    return path


def test_gateways_come_and_go_beside_each_other(config: Path, address_of_ray: str) -> None:
    fleet = ("--ray-address", address_of_ray, "--name", "blue")
    # The first gateway starts before the fleet does, and knows only the fleet's address.
    with joining(*fleet, environment=RAY_ENVIRONMENT) as early:
        early.wait_for_text("no fleet named 'blue' (cluster.name) answers on this Ray cluster yet")
        with (
            serving(str(config), *fleet, environment=RAY_ENVIRONMENT) as one,
            serving(str(config), *fleet, environment=RAY_ENVIRONMENT) as other,
        ):
            owner, ready = the_one_that_serves(one, other)
            pids = {worker["pid"] for worker in ready["workers"]}
            assert {psutil.Process(pid).nice() for pid in pids} == {psutil.Process().nice()}
            ready = early.wait_ready()
            # The gateway opened as soon as it could serve, which needs no prefill worker.
            assert {worker["pid"] for worker in ready["workers"]} <= pids
            with joining(str(config), *fleet, environment=RAY_ENVIRONMENT) as doomed:
                targets = ready["target"], doomed.wait_ready()["target"]
                asyncio.run(kill_one_under_load(doomed.process.pid, *targets))
                assert doomed.wait_gone() == -signal.SIGKILL
            owner.process.kill()  # the fleet is followed, so it is no orphan
            assert owner.wait_gone() == -signal.SIGKILL
        with serving(str(config), *fleet, environment=RAY_ENVIRONMENT) as heir:
            ready = heir.wait_ready()
            assert {worker["pid"] for worker in ready["workers"]} == pids
            early.interrupt()
            assert early.wait_gone() == 0
            assert "the fleet continues" in early.stderr
            asyncio.run(ask_once(ready["target"]))
            workers = [psutil.Process(pid) for pid in pids]
            heir.interrupt()
            assert heir.wait_gone() == 0
            _, alive = psutil.wait_procs(workers, timeout=STOP_TIMEOUT_S)  # Ray says so before it kills
            assert alive == []


def the_one_that_serves(one: ServeProcess, other: ServeProcess) -> tuple[ServeProcess, dict[str, Any]]:
    """Two commands started a fleet of the same name at the same time. Returns the command that serves; the other
    command has ended."""
    with ThreadPoolExecutor(2) as readers:
        lines = list(readers.map(lambda serve: serve.process.stdout.readline(), (one, other)))
    assert sorted(map(bool, lines)) == [False, True], one.stderr + other.stderr
    owner, loser = (one, other) if lines[0] else (other, one)
    assert loser.wait_gone() == 1
    assert "a fleet named 'blue' is in use by another command" in loser.stderr
    # Until the owner's claim is stored, no other command knows the owner's process.
    by_whom = (f"(process {owner.process.pid} on ", "(it has just begun)")
    assert any(words in loser.stderr for words in by_whom), loser.stderr
    assert "died" not in owner.stderr, "the loser has ended none of its workers"
    return owner, json.loads(lines[0] or lines[1])


async def kill_one_under_load(doomed_pid: int, target: str, doomed_target: str) -> None:
    async with (
        GatewayClient(target) as client,
        GatewayClient(doomed_target) as doomed,
        BatonClient(doomed_target, target) as persistent,
    ):
        expected = await asyncio.gather(*[answer(client, prompt, SHORT) for prompt in PROMPTS])
        here = [asyncio.create_task(answer(client, prompt, LONG)) for prompt in PROMPTS]
        there = [asyncio.create_task(answer(doomed, prompt, LONG)) for prompt in PROMPTS]
        moving = asyncio.create_task(persistent_answer(persistent, PROMPTS[0]))
        async with asyncio.timeout(90.0):
            while await num_requests(client) < len(here) + len(there) + 1:
                await asyncio.sleep(0.05)
        psutil.Process(doomed_pid).kill()
        for lost in await asyncio.gather(*there, return_exceptions=True):
            assert isinstance(lost, GatewayError)
            assert lost.code == "UNAVAILABLE", lost
        # The requests of the dead gateway end. Those of the other gateway still run, and so does the request that
        # moved there.
        async with asyncio.timeout(REST_TIMEOUT_S):
            while await num_requests(client) > len(here) + 1:
                await asyncio.sleep(0.05)
        assert not any(task.done() for task in here), "the load was over too soon to prove anything"
        whole = await asyncio.gather(*here)
        for tokens, first in zip(whole, expected, strict=True):
            assert (len(tokens), tokens[:SHORT]) == (LONG, first)
        assert await moving == whole[0]
        async with asyncio.timeout(REST_TIMEOUT_S):
            while not all(is_at_rest(worker) for worker in (await client.describe())["workers"]):
                await asyncio.sleep(0.05)


async def persistent_answer(client: BatonClient, prompt: list[int]) -> list[int]:
    tokens: list[int] = []
    async for part in client.generate(token_ids=prompt, max_tokens=LONG, ignore_eos=True, temperature=0.0):
        tokens += part.token_ids
    return tokens


async def ask_once(target: str) -> None:
    async with GatewayClient(target) as client:
        assert len(await answer(client, PROMPTS[0], 5)) == 5


async def answer(client: GatewayClient, prompt: list[int], max_tokens: int) -> list[int]:
    tokens: list[int] = []
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    async for event in client.generate(token_ids=prompt, sampling=sampling):
        tokens += event.token_ids
    return tokens


async def num_requests(client: GatewayClient) -> int:
    """On the decode worker."""
    workers = (await client.describe())["workers"]
    return sum(sum(worker["requests"].values()) for worker in workers if worker["role"] == "decode")


def is_at_rest(worker: dict[str, Any]) -> bool:
    blocks = worker["kv_blocks"]
    return bool(blocks["free"] == blocks["total"] > 0 and not any(worker["requests"].values()))
