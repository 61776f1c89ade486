"""Clients that behave badly, by hand and in numbers.

python -m tests.clients --each 500        # slow, vanishing and cancelling ones, three times over; a minute or two
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from baton.config import NetworkConfig
from tests.clients.swarm import held_by, script, swarm
from tests.factories.gateway import gateway_with
from tests.factories.models import make_model_dir

MAX_GROWTH_MIB = 20.0
"""Of the last round over the one before it: allocators keep some of what they once had."""


async def measure(num_each: int, num_rounds: int) -> bool:
    """Prints what the gateway holds after each round. Returns whether it has freed everything."""
    with tempfile.TemporaryDirectory() as folder:
        async with gateway_with(
            make_model_dir(Path(folder)),
            {},
            {"w0": script},
            network=NetworkConfig(peer_timeout_s=60.0),
            write_timeout_s=10.0,  # clients and gateway share one event loop, which is busy
            max_in_flight=4 * num_each,
            max_connections=8 * num_each,
            grpc_max_streams=4 * num_each,
        ) as under_test:
            held = [await held_by(under_test)]
            print(f"before    {held[0]}")
            for number in range(num_rounds):
                await swarm(under_test, num_each)
                held.append(await held_by(under_test))
                print(f"round {number + 1}   {held[-1]}", flush=True)
    first, before, last = held[0], held[-2], held[-1]
    is_rid = last.num_runs == last.num_sub_requests == 0 and last.num_tasks <= first.num_tasks
    return is_rid and last.num_files <= before.num_files and last.rss_mib - before.rss_mib <= MAX_GROWTH_MIB


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--each", type=int, default=500, help="clients of each kind")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    return 0 if asyncio.run(measure(options.each, options.rounds)) else 1


if __name__ == "__main__":
    sys.exit(main())
