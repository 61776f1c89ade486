"""What a whole cluster of real processes tells Prometheus: gateway and workers, found as Prometheus finds them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from baton.config import BatonConfig
from cluster.serve.child_processes import child_processes
from gateway import GatewayClient
from tests.factories.local_cluster import LocalCluster
from tests.factories.metrics import TTFT_PARTS, Scrape, read_url
from tests.factories.promql import alert_expressions, dashboard_expressions, documented_metrics, metrics_in

NUM_TOKENS = 64
"""So many that the prefill worker reports the end of its hand-over before the answer ends, even on a busy machine."""


@asynccontextmanager
async def cluster_and_gateways_url(folder: Path) -> AsyncIterator[tuple[LocalCluster, str]]:
    config = BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32"},
            "engine": {"num_threads": 1},
            "scheduler": {"num_blocks": 100, "max_num_batched_tokens": 64},
            "gateway": {"grpc_port": 0, "http_port": 0},
            "cluster": {"prefill": 1, "decode": 1},
        }
    )
    async with child_processes(config, folder) as running, GatewayClient(running.target) as client:
        yield LocalCluster(client, running.workers), f"http://127.0.0.1:{running.gateway.http_port}"


async def scrape(url: str) -> Scrape:
    return Scrape(await asyncio.to_thread(read_url, f"{url}/metrics"))


def test_a_real_cluster_tells_what_dashboard_and_alerts_ask_and_its_first_tokens_times_add_up(
    folder: Path,
) -> None:
    async def test() -> None:
        async with cluster_and_gateways_url(folder) as (cluster, url):
            before = await scrape(url)
            modes: dict[Literal["disaggregated", "local"], range] = {
                "disaggregated": range(5, 205),
                "local": range(204, 4, -1),
            }
            for mode, prompt in modes.items():
                answer = await cluster.answer(prompt, mode, max_tokens=NUM_TOKENS, ignore_eos=True)
                now = await scrape(url)
                parts = {
                    part: now("ttft_part_seconds_sum", part=part) - before("ttft_part_seconds_sum", part=part)
                    for part in TTFT_PARTS
                }
                assert sum(parts.values()) == pytest.approx(answer.completion.timing["ttft_s"], abs=1e-3)
                assert min(parts["prefill"], parts["gateway"]) > 0.0
                assert parts["failed_attempts"] == 0.0
                # The decode worker may be the first to report the token, after its transfer.
                assert mode == "disaggregated" or parts["transfer_exposed"] == 0.0
                before = now
            assert now("handover_part_seconds_sum") == pytest.approx(
                now("handover_gap_seconds_sum"), abs=1e-3
            )
            # If the decode worker is the first to report token 0, token 1 may come with it: then there is no gap.
            first_step_s = now("handover_part_seconds_sum", part="first_step")
            assert (first_step_s > 0.0) == (now("handover_gap_seconds_sum") > 0.0)
            assert now("kv_handover_bytes_count") == now("kv_handover_moving_seconds_count") == 1

            await cluster.at_rest()  # the prefill worker knows the end of the hand-over
            now = await scrape(url)
            targets = json.loads(await asyncio.to_thread(read_url, f"{url}/metrics/targets"))
            assert len(targets) == 2
            workers = [
                await scrape(f"http://{address}") for target in targets for address in target["targets"]
            ]
            by_role = {
                role: w for w in workers for role in ("prefill", "decode") if w("worker_info", role=role)
            }
            assert by_role["prefill"]("worker_computed_tokens_total", kind="prompt") == 200
            assert by_role["decode"]("worker_computed_tokens_total", kind="prompt") == 200
            assert by_role["decode"]("worker_computed_tokens_total", kind="decode") == 2 * (NUM_TOKENS - 1)
            assert by_role["decode"]("kv_peer_handovers_total", outcome="done") == 1
            assert by_role["prefill"]("step_seconds_count", kind="prefill") == 4

            families = now.families.union(*(worker.families for worker in workers))
            exposed_families = {name.removeprefix("baton_") for name in families}
            assert documented_metrics() == exposed_families, "docs/observability.md, All metrics"
            exposed = now.names.union(*(worker.names for worker in workers))
            for where, expression in (*dashboard_expressions(), *alert_expressions()):
                missing = metrics_in(expression) - exposed
                assert not missing, f"{where} asks for {missing}, which no process reports: {expression}"

    asyncio.run(asyncio.wait_for(test(), 300))
