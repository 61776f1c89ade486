"""What the router's choices cost, and what they gain.

    python -m benchmarks.routing [--parts index decisions fleets] [--json PATH]

`index`: a prefix index in which each of 100 workers has 100,000 blocks of its own. Measures its memory, and the time of
a lookup, of events and of a departure. `decisions`: choices per second. Half of the workers prefill, each worker has
requests, and a quarter of the workers have half of the prompt in their cache. `fleets`: the three policies in virtual
time, with the real dispatcher, scheduler, block pool and events. The figures of `fleets` depend only on the seed, the
others on the machine.
"""

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.block_hash import block_hashes
from baton.config import GatewayConfig
from baton.kv import WorkerRef
from baton.messages.request_plane import KVEvents
from baton.worker import KVBlockCounts, RequestCounts, WorkerLoad, WorkerRole, WorkerState, WorkerStatus
from benchmarks.json_file import save_json
from gateway.routing.placement import RouteQuery
from gateway.routing.prefix_index import PrefixIndex, short_keys
from gateway.routing.router import Router
from simulator.timed_fleet import KEY, Result, TimedFleet
from simulator.workloads import Session, conversations, strangers

POLICIES = ("round_robin", "least_loaded", "kv_aware")
NUM_BLOCKS = 100_000
NUM_WORKERS = 100
CHAIN = 100
PROMPT = 4096
FLEETS = (8, 64, 512)


def main() -> None:
    """Runs the parts, prints tables, and writes JSON if requested."""
    arguments = _arguments()
    parts = {"index": index_part, "decisions": decisions_part, "fleets": fleets_part}
    results = {part: parts[part]() for part in arguments.parts}
    if arguments.json is not None:
        head = {"python": platform.python_version(), "cpus": os.cpu_count()}
        save_json(arguments.json, {**head, **results})


def index_part() -> dict[str, float]:
    """Measures the prefix index at its largest."""
    rng, index = random.Random(1), PrefixIndex()
    before, began = _resident_mib(), time.perf_counter()
    for number in range(NUM_WORKERS):
        index.apply(f"w{number}", KVEvents(0, True, b"", rng.randbytes(8 * NUM_BLOCKS)))
    stored_s, memory_mib = time.perf_counter() - began, _resident_mib() - before
    hashes = [rng.randbytes(32) for _ in range(CHAIN)]
    chain = b"".join(each[:8] for each in hashes)
    for number in range(NUM_WORKERS):  # four have the whole chain, the others the first fifth of it
        index.apply(f"w{number}", KVEvents(1, False, b"", chain if number < 4 else chain[: 8 * CHAIN // 5]))
    keys = short_keys(hashes)
    unknown = short_keys([rng.randbytes(32) for _ in range(CHAIN)])
    full_us = _median_us(lambda: index.lookup(keys))
    began = time.perf_counter()
    index.forget("w7")
    result = {
        "blocks": float(index.num_entries),
        "memory_mib": memory_mib,
        "bytes_per_block": memory_mib * 2**20 / (NUM_WORKERS * NUM_BLOCKS),
        "stored_us_per_block": stored_s * 1e6 / (NUM_WORKERS * NUM_BLOCKS),
        "departure_us": (time.perf_counter() - began) * 1e6,
        "lookup_hit_us": full_us,
        "lookup_miss_us": _median_us(lambda: index.lookup(unknown)),
        "keys_us": _median_us(lambda: short_keys(hashes)),
    }
    for name, value in result.items():
        print(f"{name:24}{value:16,.2f}")
    return result


def decisions_part() -> list[dict[str, Any]]:
    """Measures choices per second."""
    rows = []
    print(f"{'workers':>8}  {'policy':14}{'us':>10}{'a second':>12}")
    for num_workers in FLEETS:
        for policy in POLICIES:
            router, query = (
                _warm_router(policy, num_workers),
                RouteQuery(token_ids=_prompt(), max_new_tokens=200),
            )
            choice_us = _median_us(lambda router=router, query=query: router.route(query))  # type: ignore[misc]
            row = {"workers": num_workers, "policy": policy, "us": choice_us, "per_s": 1e6 / choice_us}
            rows.append(row)
            print(f"{num_workers:>8}  {policy:14}{choice_us:>10,.1f}{1e6 / choice_us:>12,.0f}")
    keys_us = _median_us(lambda: short_keys(block_hashes(_prompt(), 16, KEY)))
    print(f"of which hashing a prompt of {PROMPT} tokens in blocks of 16: {keys_us:,.1f} us")
    return [*rows, {"hashing_us": keys_us}]


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet and its load."""

    name: str
    num_workers: tuple[int, int]
    sessions: list[Session]
    num_blocks: tuple[int, int] = (8192, 8192)


def fleets_part() -> list[dict[str, Any]]:
    """Measures what clients of each fleet receive."""
    cases = [
        Case("conversations", (2, 2), conversations(1, 120, 4.0)),
        Case("conversations", (4, 4), conversations(2, 240, 9.0)),
        Case("conversations", (8, 8), conversations(3, 400, 18.0)),
        Case("few blocks on D", (4, 4), conversations(4, 160, 9.0), (8192, 1024)),
        Case("strangers", (4, 4), strangers(5, 500, 14.0)),
        Case("strangers", (8, 8), strangers(6, 1000, 28.0)),
    ]
    print(
        f"{'workload':17}{'P+D':>5}  {'policy':14}{'hits':>7}{'ttft p50':>10}{'p99':>8}{'itl p50':>9}{'p99':>8}"
    )
    rows = []
    for case in cases:
        rows += [_row(case, policy, play(case, policy, routing_mode="disaggregated")) for policy in POLICIES]
        rows.append(_row(case, "kv_aware, auto", play(case, "kv_aware", routing_mode="auto")))
    return rows


def play(case: Case, policy: str, **config: Any) -> Result:
    """Plays one policy, from the first arrival to the last answer."""
    settings = GatewayConfig(routing_policy=policy, **config)  # type: ignore[arg-type]
    return TimedFleet(settings, *case.num_workers, case.num_blocks, seed=1).run(case.sessions)


def _row(case: Case, policy: str, result: Result) -> dict[str, Any]:
    ttft, itl = statistics.quantiles(result.ttft_s, n=100), statistics.quantiles(result.itl_s, n=100)
    row = {
        "workload": case.name,
        "prefill": case.num_workers[0],
        "decode": case.num_workers[1],
        "policy": policy,
        "requests": len(result.ttft_s),
        "hit_rate": round(result.hit_rate, 4),
        "ttft_p50_ms": round(ttft[49] * 1e3, 1),
        "ttft_p99_ms": round(ttft[98] * 1e3, 1),
        "itl_p50_ms": round(itl[49] * 1e3, 2),
        "itl_p99_ms": round(itl[98] * 1e3, 2),
        "transferred_tokens": result.num_transfer_tokens,
        "local": result.num_local,
        "waited_for_room": result.num_waited,
        "computed_before_there_was_room": result.num_in_vain,
        "preemptions": result.num_preemptions,
    }
    print(
        f"{case.name:17}{'+'.join(map(str, case.num_workers)):>5}  {policy:14}{result.hit_rate:>7.1%}"
        f"{row['ttft_p50_ms']:>10}{row['ttft_p99_ms']:>8}{row['itl_p50_ms']:>9}{row['itl_p99_ms']:>8}",
        flush=True,
    )
    return row


def _warm_router(policy: str, num_workers: int) -> Router:
    """A router that knows every worker's status. A quarter of the workers have the prompt's first half in cache."""
    config = GatewayConfig(routing_policy=policy, routing_mode="disaggregated")  # type: ignore[arg-type]
    router, rng = Router(config, KEY), random.Random(1)
    stored = b"".join(each[:8] for each in block_hashes(_prompt()[: PROMPT // 2], 16, KEY))
    for number in range(num_workers):
        name = f"w{number}"
        role = WorkerRole.DECODE if number % 2 else WorkerRole.PREFILL
        load = WorkerLoad(rng.randrange(9000), 0.0, rng.uniform(9e3, 1.1e4), rng.uniform(0.008, 0.01))
        counts = RequestCounts(rng.randrange(1, 40), 0, 0)
        ref = WorkerRef(name, f"{name}-1", ("tcp://127.0.0.1:1",), 16)
        blocks = KVBlockCounts(8192, 6000, 0, 0)
        router.on_status(WorkerStatus(ref, role, WorkerState.READY, blocks, counts, {}, load=load))
        has_it = number % 8 < 2
        router.on_kv_events(name, KVEvents(0, True, b"", stored if has_it else b""))
    return router


def _prompt() -> tuple[int, ...]:
    return tuple(range(PROMPT))


def _median_us(action: Callable[[], object]) -> float:
    times = []
    for _ in range(300):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _resident_mib() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["index", "decisions", "fleets"]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--json", type=Path, help="write the result here, e.g. benchmarks/results/routing.json"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
