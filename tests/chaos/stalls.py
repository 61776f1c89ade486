"""How long a stream stalls when one worker fails, by kind of fault, and where that time goes.

    python -m tests.chaos.stalls [--each 3] [--faults "kill,stop"] [--burners 2] [--json FILE]

Two prefill and two decode workers without Ray, so that each has a spare, and clients that stream all the time. One
fault at a time hits a worker, and is mended before the next. The gateway's own records of the requests that moved say
where their time went: `detection` is the time from the fault (or the attempt's begin, if that was later) to the
attempt's end; `move`, from there to the next attempt; `recompute`, from there to the next token.

The fault "nothing", for a minute, looks for false alarms; `--burners` keep as many cores busy meanwhile.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

from baton.config import BatonConfig
from gateway import GatewayError
from gateway.requests.record import RequestRecord
from tests.factories.fragile_cluster import FragileCluster, FragileWorker, fragile_cluster
from tests.factories.local_cluster import HANDING_OVER
from tests.factories.models import make_model_dir
from tests.factories.proxy import Proxy, proxy_to

VICTIMS = {"P": "w0", "D": "w2"}
CUT_FAULTS = {"lost node": (0, 1), "cut link to gateway": (1,), "cut link to peers": (0,)}
"""The ports, as `FragileWorker.ports` has them, that a fault cuts off."""
FAULTS = ("kill", "stop", *CUT_FAULTS, "hang")
NOTHING, NOTHING_S = "nothing", 60.0
PROXY_HOST = "127.0.0.2"
"""What workers advertise where links are to be cut: a proxy listens there."""
NUM_CLIENTS = 6
MAX_TOKENS = 150
LASTS_S = 7.0
"""Longer than any limit for silence."""
HANG_TIMEOUT_S = 140.0
"""A worker whose step is larger than any that it knows has `engine.progress_timeout_s`."""
QUIET_S = 7.0
"""After a fault: every worker has then been heard for longer than `peer_timeout_s`, and the requests that moved have
ended, which is when the gateway makes their records."""
HEAL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Stall:
    """The parts of the stall after one attempt that a fault ended, in seconds."""

    detection_s: float
    move_s: float
    recompute_s: float

    @property
    def total_s(self) -> float:
        return self.detection_s + self.move_s + self.recompute_s


@dataclass(slots=True)
class Watch:
    """What clients and the gateway saw."""

    stalls: list[Stall] = field(default_factory=list)
    num_right: int = 0
    wrong: list[str] = field(default_factory=list)
    victim: str = ""
    fault_at: float | None = None
    """On the gateway's clock."""

    def note(self, record: RequestRecord) -> None:
        """Of the gateway's `on_end`."""
        if record.finish is None or self.fault_at is None:
            return
        timing, attempts = record.finish.timing, record.attempts
        token_times = list(accumulate(timing.itl_s, initial=record.arrived_at + timing.ttft_s))
        for attempt, following in pairwise(attempts):
            if self.victim not in attempt.workers or attempt.ended_at is None:
                continue
            if attempt.ended_at < self.fault_at:
                continue
            next_token_at = next(at for at in token_times if at >= following.began_at)
            self.stalls.append(
                Stall(
                    attempt.ended_at - max(self.fault_at, attempt.began_at),
                    following.began_at - attempt.ended_at,
                    next_token_at - following.began_at,
                )
            )


def make_config(*, is_proxied: bool) -> BatonConfig:
    """All times are the defaults'."""
    return BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"kv_cache_memory_mib": 16, "num_threads": 1},
            "scheduler": {"max_num_batched_tokens": 64, "num_blocks": 256},
            "gateway": HANDING_OVER,
            "network": {"advertise_host": PROXY_HOST if is_proxied else None},
            "cluster": {"prefill": 2, "decode": 2},
        }
    )


class Links:
    """Proxies before both ports of every worker."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._by_port: dict[int, Proxy] = {}

    async def on_begun(self, worker: FragileWorker) -> None:
        for port in worker.ports:
            self._by_port[port] = await self._stack.enter_async_context(proxy_to(port, PROXY_HOST, port))

    def of(self, worker: FragileWorker, fault: str) -> list[Proxy]:
        return [self._by_port[worker.ports[index]] for index in CUT_FAULTS[fault]]


async def commit(cluster: FragileCluster, links: Links, fault: str, victim: str, watch: Watch) -> None:
    """Causes the fault, waits for its effect, and ends the fault."""
    worker = cluster.workers[victim]
    watch.victim, watch.fault_at = victim, time.monotonic()
    if fault == NOTHING:
        await asyncio.sleep(NOTHING_S)
    elif fault == "kill":
        await worker.kill()
        await asyncio.sleep(1.0)
        await cluster.replace(victim)
    elif fault == "stop":
        worker.stop()
        await asyncio.sleep(LASTS_S)
        worker.go_on()
    elif fault == "hang":
        await worker.hang()
        watch.fault_at = time.monotonic()
        async with asyncio.timeout(HANG_TIMEOUT_S):
            await worker.process.wait()
        await cluster.replace(victim)
    else:
        for link in links.of(worker, fault):
            link.passes.clear()
        await asyncio.sleep(LASTS_S)
        for link in links.of(worker, fault):
            link.passes.set()


async def measure(
    cluster: FragileCluster, links: Links, faults: Sequence[str], each: int, watch: Watch
) -> dict[str, dict[str, Any]]:
    """Causes each fault several times. Returns the figures of the stalls, by fault and role."""
    rows = {}
    for fault in faults:
        for role, victim in VICTIMS.items():
            if fault in ("cut link to peers", NOTHING) and role == "D":
                continue  # it is the same link, and D connects
            await _until_healed(cluster)
            await asyncio.sleep(QUIET_S)
            watch.stalls, num_losses = [], losses_of(cluster)
            for _ in range(each):
                await cluster.prepare_spares(fault in ("kill", "hang"))
                await commit(cluster, links, fault, victim, watch)
                await _until_healed(cluster)
                await asyncio.sleep(QUIET_S)
            rows[f"{fault}, {role}"] = row = figures(watch.stalls) | {
                "losses": losses_of(cluster) - num_losses
            }
            print(f"{fault}, {role}: {row}", flush=True)
    return rows


def losses_of(cluster: FragileCluster) -> int:
    """How many workers the gateway has taken for lost."""
    return cluster.gateway.workers.losses.total()


def figures(stalls: list[Stall]) -> dict[str, Any]:
    """Median and longest of each part, in seconds."""
    row: dict[str, Any] = {"stalls": len(stalls)}
    for part in ("detection_s", "move_s", "recompute_s", "total_s") if stalls else ():
        values = [getattr(stall, part) for stall in stalls]
        row[part] = [round(statistics.median(values), 3), round(max(values), 3)]
    return row


async def _until_healed(cluster: FragileCluster) -> None:
    async with asyncio.timeout(HEAL_TIMEOUT_S):
        while len(cluster.gateway.workers.statuses) < len(cluster.workers):
            await asyncio.sleep(0.05)


async def stream_on(cluster: FragileCluster, watch: Watch, is_over: asyncio.Event) -> None:
    """Clients that keep asking, and know the right answers. Each request has its own salt, so no prefix cache has its
    prompt."""
    prompts = [
        tuple((17 * i * i + 31 * number) % 290 + 3 for i in range(150)) for number in range(NUM_CLIENTS)
    ]
    answers = [await _ask(cluster, prompt, f"before {prompt[:3]}") for prompt in prompts]
    numbers = count()

    async def ask_on(index: int) -> None:
        while not is_over.is_set():
            try:
                answer = await _ask(cluster, prompts[index], f"salt {next(numbers)}")
            except GatewayError as error:
                watch.wrong.append(str(error))
            else:
                watch.num_right += answer == answers[index]
                watch.wrong += [f"other tokens: {answer}"] if answer != answers[index] else []

    async with asyncio.TaskGroup() as group:
        for index in range(NUM_CLIENTS):
            group.create_task(ask_on(index))


async def _ask(cluster: FragileCluster, prompt: tuple[int, ...], salt: str) -> list[int]:
    sampling = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
    stream = cluster.client.generate(token_ids=prompt, sampling=sampling, cache_salt=salt)
    return [token_id async for event in stream for token_id in event.token_ids]


@asynccontextmanager
async def streaming_cluster(*, is_proxied: bool) -> AsyncIterator[tuple[FragileCluster, Links, Watch]]:
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model, links = make_model_dir(Path(folder) / "model"), Links(stack)
        on_begun = links.on_begun if is_proxied else None
        cluster = await stack.enter_async_context(
            fragile_cluster(make_config(is_proxied=is_proxied), model, on_begun)
        )
        watch, is_over = Watch(), asyncio.Event()
        cluster.gateway._driver._on_end = [*cluster.gateway._driver._on_end, watch.note]
        streaming = asyncio.create_task(stream_on(cluster, watch, is_over))
        try:
            yield cluster, links, watch
        finally:
            is_over.set()
            await streaming


@contextmanager
def burners(number: int) -> Iterator[None]:
    """Processes that compute all the time."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


async def main(faults: Sequence[str], each: int) -> dict[str, Any]:
    rows, num_right, wrong = dict[str, Any](), 0, list[str]()
    for is_proxied in (False, True):
        some = [fault for fault in faults if (fault in CUT_FAULTS) == is_proxied]
        if not some:
            continue
        async with streaming_cluster(is_proxied=is_proxied) as (cluster, links, watch):
            rows |= await measure(cluster, links, some, each, watch)
        num_right += watch.num_right
        wrong += watch.wrong
    return {"rows": rows, "num_right": num_right, "wrong": wrong}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.stalls", description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=3, help="times that each fault happens to each role")
    parser.add_argument("--faults", default=",".join(FAULTS), help="default %(default)s")
    parser.add_argument("--burners", type=int, default=0, help="processes that keep a core busy, default 0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there")
    options = parser.parse_args()
    with burners(options.burners):
        report = asyncio.run(main(options.faults.split(","), options.each))
    report["command"] = " ".join(["python -m tests.chaos.stalls", *sys.argv[1:]])
    print(f"{report['num_right']} answers as undisturbed, wrong: {report['wrong'] or 'none'}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(bool(report["wrong"]))
