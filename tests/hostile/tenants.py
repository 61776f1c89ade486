"""The scene of eight tenants: one tenant asks for as much as it may, and the others keep asking for little."""

import asyncio
import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

from gateway.auth.credentials import Credentials
from gateway.auth.key_store import hash_of
from gateway.client import GatewayClient, GatewayError
from tests.factories.sabotage import obeying, order
from tests.factories.serving import serving
from tests.hostile.finding import Finding

GREEDY, OTHERS = "baton-greedy", [f"baton-tenant-{number}" for number in range(7)]
NUM_ASKED, MEAN_PAUSE_S = 10, 1.0
NUM_CALLS, NUM_TOKENS = 256, 3_500
"""As many as the gateway's places."""
HEAD_START_S = 3.0


def tenants(model: Path, folder: Path) -> Finding:
    """One key asks for as many long answers as there are places."""
    finding = Finding(f"{NUM_CALLS} answers of {NUM_TOKENS} tokens for one key, beside {len(OTHERS)} others")
    config = folder / "tenants.yaml"
    keys = (f"{{name: {key}, sha256: {hash_of(key)}}}" for key in (GREEDY, *OTHERS))
    config.write_text(
        f"model: {{path: {model}, dtype: float32}}\n"
        "engine: {kv_cache_memory_mib: 64, num_threads: 1}\n"
        "cluster: {ray_address: none, prefill: 1, decode: 2}\n"
        f"gateway: {{api_keys: [{', '.join(keys)}]}}\n"
    )
    with serving(str(config), environment=obeying(folder)) as serve:
        ready = serve.wait_ready()
        target = ready["target"]
        # Otherwise the workers, the gateway and its callers compete for the cores, and the test would measure that.
        for worker in ready["workers"]:
            order(folder, worker["pid"], "pace")
        asyncio.run(_play(target, finding))
        serve.interrupt()
        finding.expect(serve.wait_gone() == 0, "baton serve did not end well")
    return finding


async def _play(target: str, finding: Finding) -> None:
    await _ask_all(target, finding, num_asked=2)  # nothing is cold any more
    alone = await _ask_all(target, finding)
    ours, theirs = multiprocessing.Pipe()
    # In a process of its own, since a process that reads 256 answers cannot measure times.
    greedy = multiprocessing.get_context("spawn").Process(target=_be_greedy, args=(target, theirs))
    greedy.start()
    await asyncio.sleep(HEAD_START_S)
    beside = await _ask_all(target, finding)
    ours.send("stop")
    num_running, failed = await asyncio.to_thread(ours.recv)
    greedy.join()
    for name, times in (("alone", alone), ("beside it", beside)):
        p50_s, p99_s = times[len(times) // 2], times[len(times) * 99 // 100]
        finding.seen[f"first token {name}"] = f"p50 {p50_s:.3f} s, p99 {p99_s:.3f} s"
    finding.seen["the greedy one's answers"] = (
        f"{num_running} under way at the end, {len(failed)} failed {failed[:1]}"
    )
    finding.expect(num_running > 0, "the greedy caller had ended before the others")
    finding.expect(not failed, f"a greedy caller's answer failed: {failed[:1]}")
    finding.expect(max(beside) < MAX_FIRST_TOKEN_S, "a first token was late")


MAX_FIRST_TOKEN_S = 10.0
"""Before callers had shares: 30 s, and then a refusal. Others may keep this machine busy, so it is generous."""


def _be_greedy(target: str, pipe: Connection) -> None:
    """Asks until a message comes. Replies with the number of running streams, and the errors of the other streams."""
    asyncio.run(_ask_too_much(target, pipe))


async def _ask_too_much(target: str, pipe: Connection) -> None:
    async with GatewayClient(target, credentials=Credentials(api_key=GREEDY)) as client:
        streams = [asyncio.create_task(_answer(client, NUM_TOKENS)) for _ in range(NUM_CALLS)]
        await asyncio.to_thread(pipe.recv)
        num_running = sum(not each.done() for each in streams)
        for each in streams:
            each.cancel()
        ended = await asyncio.gather(*streams, return_exceptions=True)
    pipe.send((num_running, [str(each) for each in ended if isinstance(each, GatewayError)]))


async def _ask_all(target: str, finding: Finding, num_asked: int = NUM_ASKED) -> list[float]:
    """The times to first token of the other tenants, sorted."""
    asked = await asyncio.gather(*(_ask(target, key, finding, num_asked) for key in OTHERS))
    return sorted(first_s for times in asked for first_s in times)


async def _ask(target: str, key: str, finding: Finding, num_asked: int) -> list[float]:
    rng, times = random.Random(key), list[float]()
    async with GatewayClient(target, credentials=Credentials(api_key=key)) as client:
        for _ in range(num_asked):
            await asyncio.sleep(rng.expovariate(1 / MEAN_PAUSE_S))
            try:
                times.append(await _answer(client, 4))
            except GatewayError as error:
                finding.wrong.append(f"{key}: {error}")
    return times


async def _answer(client: GatewayClient, num_tokens: int) -> float:
    """The time to its first token."""
    began, first_s = time.monotonic(), 0.0
    prompt = [random.randrange(5, 200) for _ in range(24)]
    async for event in client.generate(
        token_ids=prompt, sampling={"max_tokens": num_tokens, "ignore_eos": True}
    ):
        if event.token_ids and not first_s:
            first_s = time.monotonic() - began
    return first_s
