"""A real small engine changes its role under load, over the real request plane: no restart, nothing is forgotten."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio

from baton.block_hash import SHORT_HASH_BYTES, block_hashes
from baton.config import BatonConfig, NetworkConfig
from baton.errors import FleetError
from baton.kv import KVTransferParams, TransferRole, WorkerRef
from baton.messages.request_plane import KVEvents
from baton.request import EngineRequest, ErrorKind, FinishReason, RequestOutput
from baton.sampling import SamplingParams
from baton.worker import WorkerEndpoint, WorkerRole, WorkerState, WorkerStatus
from gateway.turn_budget import SharedTurns
from gateway.workers.worker_client import WorkerClient
from gateway.workers.worker_listener import LossCause
from tests.factories.models import make_model_dir
from tests.factories.security import KEYS
from worker.host import EngineHost

NETWORK = NetworkConfig(heartbeat_interval_s=0.05, peer_timeout_s=5.0)
PROMPT = tuple(range(5, 105))


class Listener:
    """What a gateway receives from one worker."""

    def __init__(self) -> None:
        self.statuses: asyncio.Queue[WorkerStatus] = asyncio.Queue()
        self.outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self.prefixes: set[bytes] = set()
        self.numbers: list[int] = []
        self.losses: list[str] = []

    def on_status(self, status: WorkerStatus) -> None:
        self.statuses.put_nowait(status)

    def on_outputs(self, worker: str, outputs: tuple[RequestOutput, ...]) -> None:
        for output in outputs:
            self.outputs.put_nowait(output)

    def on_kv_events(self, worker: str, events: KVEvents) -> None:
        self.numbers.append(events.number)
        if events.is_anew:
            self.prefixes.clear()
        self.prefixes -= set(split(events.removed))
        self.prefixes |= set(split(events.stored))

    def on_worker_lost(self, worker: str, cause: LossCause, reason: str) -> None:
        self.losses.append(reason)

    async def until(self, role: WorkerRole, state: WorkerState) -> None:
        async with asyncio.timeout(60):
            while True:
                status = await self.statuses.get()
                if (status.role, status.state) == (role, state):
                    return

    async def end_of(self, request_id: str) -> RequestOutput:
        async with asyncio.timeout(60):
            while True:
                output = await self.outputs.get()
                if output.request_id == request_id and output.finish_reason is not None:
                    return output


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + SHORT_HASH_BYTES] for at in range(0, len(hashes), SHORT_HASH_BYTES)]


class WorkerUnderTest:
    def __init__(self, host: EngineHost, client: WorkerClient, listener: Listener) -> None:
        self.host, self.client, self.listener = host, client, listener

    async def set_role(self, role: WorkerRole, timeout_s: float) -> None:
        await asyncio.to_thread(self.host.set_role, role, timeout_s)

    async def ask(self, request_id: str, *, max_tokens: int = 4, producer_of: str | None = None) -> None:
        transfer = None
        if producer_of is not None:
            peer = WorkerRef("w9", "incarnation", ("tcp://127.0.0.1:1",), 16)
            transfer = KVTransferParams(TransferRole.PRODUCER, producer_of, 0, peer)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.client.submit(
            EngineRequest(
                request_id=request_id, prompt_token_ids=PROMPT, sampling_params=params, kv_transfer=transfer
            )
        )


@asynccontextmanager
async def worker(
    folder: Path, *, lease_s: float = 0.5, prefill_ranks: int = 1
) -> AsyncIterator[WorkerUnderTest]:
    config = BatonConfig.from_mapping(
        {
            "model": {"dtype": "float32", "load_format": "dummy"},
            "engine": {"num_threads": 1},
            "scheduler": {"num_blocks": 400},
            "kv_transfer": {"lease_s": lease_s},
            "network": NETWORK.model_dump(),
            "cluster": {"prefill_tensor_parallel": prefill_ranks},
        }
    )
    host = EngineHost(config, KEYS, make_model_dir(folder), WorkerRole.DECODE, "w0")
    endpoint: WorkerEndpoint = await asyncio.to_thread(host.start)
    context, listener, turns = zmq.asyncio.Context(), Listener(), SharedTurns(time.monotonic)
    client = WorkerClient(endpoint, context, "cafe", 1, NETWORK, KEYS.request, listener, Counter(), turns)
    running = asyncio.create_task(client.run())
    try:
        await client.first_sign.wait()
        client.subscribe_kv_events()
        yield WorkerUnderTest(host, client, listener)
    finally:
        await asyncio.to_thread(host.stop)
        async with asyncio.timeout(60):
            _, reason = await running
            assert reason == "its engine is stopped", "the last word of a worker"
        context.term()


async def test_a_role_changes_under_load_and_the_prefix_cache_stays(tmp_path: Path) -> None:
    async with worker(tmp_path) as under_test:
        listener = under_test.listener
        await under_test.ask("warm")
        assert (await listener.end_of("warm")).num_cached_tokens == 0
        for number in range(4):
            await under_test.ask(f"load-{number}", max_tokens=900)
        await listener.outputs.get()
        change = asyncio.create_task(under_test.set_role(WorkerRole.PREFILL, 5.0))
        await listener.until(WorkerRole.DECODE, WorkerState.DRAINING)
        await under_test.ask("late")
        ends = {name: await listener.end_of(name) for name in ("late",)}
        await change
        await listener.until(WorkerRole.PREFILL, WorkerState.READY)
        assert ends["late"].error_kind is ErrorKind.OVERLOADED

        await under_test.ask("prefill", producer_of="t1")
        end = await listener.end_of("prefill")
        assert end.finish_reason is FinishReason.HANDED_OVER
        assert end.num_cached_tokens == 96, "all full blocks of the prompt"
        await under_test.ask("whole")
        assert (await listener.end_of("whole")).error_kind is ErrorKind.OVERLOADED

        await under_test.set_role(WorkerRole.DECODE, 0.1)  # once no lease is left
        assert under_test.host.status().kv_blocks.leased == 0
        await under_test.ask("again")
        again = await listener.end_of("again")
        assert (again.finish_reason, again.num_cached_tokens) == (FinishReason.LENGTH, 96)
        hashes = block_hashes(PROMPT, 16, KEYS.prefix)
        assert {each[:SHORT_HASH_BYTES] for each in hashes} <= listener.prefixes
        assert listener.numbers == list(range(len(listener.numbers)))
        assert listener.losses == []


async def test_what_runs_is_given_back_with_its_tokens(tmp_path: Path) -> None:
    async with worker(tmp_path) as under_test:
        for number in range(3):
            await under_test.ask(f"r{number}", max_tokens=900)
        await under_test.listener.outputs.get()
        await under_test.set_role(WorkerRole.PREFILL, 0.0)
        for number in range(3):
            last = await under_test.listener.end_of(f"r{number}")
            assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.GIVEN_BACK)
        counts = under_test.host.status()
        assert counts.requests.running == 0
        assert counts.kv_blocks.free == counts.kv_blocks.total


async def test_a_change_that_comes_to_nothing_leaves_the_worker_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with worker(tmp_path, lease_s=60.0) as under_test:
        listener = under_test.listener
        await under_test.set_role(WorkerRole.PREFILL, 1.0)
        await under_test.ask("prefill", producer_of="t1")
        await listener.end_of("prefill")
        monkeypatch.setattr(under_test.host._parts.loop, "_lease_s", 0.2)
        with pytest.raises(FleetError, match=r"^it did not become .* 7 blocks are leased"):
            await under_test.set_role(WorkerRole.DECODE, 0.1)
        await listener.until(WorkerRole.PREFILL, WorkerState.READY)
        await under_test.ask("next", producer_of="t2")
        assert (await listener.end_of("next")).finish_reason is FinishReason.HANDED_OVER


async def test_a_role_of_other_ranks_is_refused_and_its_own_is_no_change(tmp_path: Path) -> None:
    async with worker(tmp_path, prefill_ranks=2) as under_test:
        await under_test.set_role(WorkerRole.DECODE, 0.0)
        with pytest.raises(FleetError, match="it has 1 tensor-parallel ranks, but prefill workers have 2"):
            await under_test.set_role(WorkerRole.PREFILL, 1.0)
        assert under_test.host.status().state is WorkerState.READY
