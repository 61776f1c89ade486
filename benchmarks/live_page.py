"""What viewers of the live page cost a gateway: processor time a second, by how many watch.

`python -m benchmarks.live_page` runs a gateway with four prefill and eight decode workers that say how they stand and
do nothing else, over a minute of traffic of every latency; viewers are sockets of another process. The workers' ends of
the request plane live in the same process: what counts is the difference.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.config import NetworkConfig
from baton.kv import TransferRole
from baton.worker import KVPeerCounts
from gateway.requests.latency_window import MAX_WINDOW_S, LatencyWindow
from tests.factories.gateway import GatewayUnderTest, gateway_with, silent
from tests.factories.models import make_model_dir

NUM_PREFILL, NUM_DECODE = 4, 8
TOKENS_A_SECOND = 2_000


async def measure(numbers_of_viewers: list[int], seconds: float) -> dict[int, float]:
    """Milliseconds of processor time a second, for each number of viewers."""
    names = [f"w{number}" for number in range(NUM_PREFILL + NUM_DECODE)]
    prefill, decode = names[:NUM_PREFILL], names[NUM_PREFILL:]
    found = {}
    with TemporaryDirectory() as folder:
        model = make_model_dir(Path(folder))
        async with gateway_with(
            model, dict.fromkeys(prefill, silent), dict.fromkeys(decode, silent), network=NetworkConfig()
        ) as under_test:
            for name in decode:
                under_test.workers[name].kv_peers = tuple(_counts(peer) for peer in prefill)
            for number in numbers_of_viewers:
                async with viewers(under_test, number):
                    fill(under_test.gateway._driver.dispatcher.latencies, time.monotonic())
                    await asyncio.sleep(2.0)
                    before = time.process_time()
                    await asyncio.sleep(seconds)
                    found[number] = (time.process_time() - before) / seconds * 1e3
    return found


def fill(window: LatencyWindow, now: float) -> None:
    """A minute of tokens."""
    rng = random.Random(0)
    window._slices.clear()
    for second in range(int(MAX_WINDOW_S), 0, -1):
        for _ in range(TOKENS_A_SECOND // 20):
            window.first_token(rng.lognormvariate(-2.0, 0.8), now - second)
        for _ in range(TOKENS_A_SECOND):
            window.next_tokens(rng.lognormvariate(-3.5, 0.6), 1, now - second)


@asynccontextmanager
async def viewers(under_test: GatewayUnderTest, number: int) -> AsyncIterator[None]:
    """So many of them watch, in a process of their own."""
    if number == 0:
        yield
        return
    port = str(under_test.gateway.http_port)
    command = [sys.executable, "-m", "benchmarks.live_page_viewers", port, str(number)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await under_test.until(lambda: under_test.gateway._feed.num_viewers == number)
        yield
    finally:
        process.terminate()
        await process.wait()


def _counts(peer: str) -> KVPeerCounts:
    return KVPeerCounts(TransferRole.CONSUMER, peer, "tcp", 1000, 1, 1, 10**9, 1.0, 1.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--viewers", type=int, nargs="+", default=[0, 1, 10, 64])
    parser.add_argument("--seconds", type=float, default=15.0, help="to measure each")
    options = parser.parse_args()
    found = asyncio.run(measure(options.viewers, options.seconds))
    for number, milliseconds in found.items():
        print(f"{number:3} viewers: {milliseconds:6.1f} ms of processor time a second")
    print(json.dumps({str(number): round(value, 2) for number, value in found.items()}))


if __name__ == "__main__":
    main()
