"""Workers that are killed, stopped or replaced on their own ports while hand-overs run; see worker_faults.py.

The effects of a fault hardly depend on the transport. `make break-workers` tests all faults with each transport.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from gateway.workers.worker_listener import LossCause
from tests.e2e.worker_faults import (
    ROWS,
    Transport,
    break_workers,
    broken_cluster,
    complaints,
    maps_of_the_dead,
)
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

NUM_TRANSFERS = 12
PAUSE_S = 1.0
SEED = 7
LETTING_GO_S = 5.0
"""For the maps of dead workers' pools: it takes milliseconds, and half a minute where only idleness would end them."""


def used(descriptions: dict[str, dict[str, Any]]) -> set[str]:
    """The transports that carried KV."""
    return {transport for about in descriptions.values() for transport in about["transports"]}


@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("zmq_tcp", marks=pytest.mark.by_hand)])
def test_c44_c51_c52_c54_no_fault_of_a_worker_costs_a_token_or_a_block(
    transport: Transport, tmp_path: Path
) -> None:
    async def run() -> None:
        folder, rng = make_model_dir(tmp_path / "model"), random.Random(SEED)
        async with broken_cluster(transport, folder, SEED) as (cluster, questions):
            descriptions = await cluster.descriptions()
            assert used(descriptions) == {transport}
            is_mapped = any(about["mapped_pools"] for about in descriptions.values())
            assert is_mapped == (transport == "shared_memory")
            for fault, role in ROWS:
                tally = await break_workers(cluster, fault, role, questions, NUM_TRANSFERS, rng, PAUSE_S)
                assert tally.wrong == [], f"{fault} {role}"
                assert tally.num_right + tally.errors.total() == tally.num_started >= NUM_TRANSFERS
                # On a quiet machine, nearly all requests find another pair. On a busy machine, some live workers seem
                # dead.
                assert tally.num_right > 0.5 * tally.num_started, f"{fault} {role}: {tally.errors}"
            losses = cluster.gateway.workers.losses
            assert losses[LossCause.HUNG] >= sum(fault == "hang" for fault, _ in ROWS)
            assert await maps_of_the_dead(cluster, LETTING_GO_S) == []
            assert list(complaints(cluster)) == []

    asyncio.run(run())
