"""The controller over real workers that are child processes: the same orders as on Ray, without it."""

import asyncio
import signal
from pathlib import Path

import pytest

from baton.config import BatonConfig
from baton.worker import WorkerRole
from cluster.process_launcher import ProcessFleet, process_fleet
from gateway import GatewayClient
from tests.factories.models import make_model_dir

pytestmark = pytest.mark.slow

CONFIG = {
    "model": {"load_format": "dummy", "dtype": "float32"},
    "engine": {"kv_cache_memory_mib": 8, "num_threads": 1},
    "kv_transfer": {"lease_s": 1.0},
    "gateway": {"grpc_port": 0},
    "cluster": {"prefill": 1, "decode": 2, "unresponsive_timeout_s": 3.0, "drain_timeout_s": 0.2},
}


async def ask(fleet: ProcessFleet) -> list[int]:
    tokens: list[int] = []
    async with GatewayClient(fleet.target) as client:
        async for event in client.generate(
            token_ids=[5, 6, 7], sampling={"max_tokens": 5, "ignore_eos": True, "temperature": 0.0}
        ):
            tokens += event.token_ids
    assert len(tokens) == 5
    return tokens


async def incarnations(fleet: ProcessFleet, among: dict[str, str]) -> dict[str, str]:
    """Of those that serve, by name, as soon as all of `among` do so in another life."""
    view = await fleet.controller.next_view("", -1, 0.0)
    async with asyncio.timeout(90.0):
        while True:
            known = {endpoint.ref.name: endpoint.ref.incarnation for endpoint in view.endpoints}
            if all(known.get(name, former) != former for name, former in among.items()):
                return known
            view = await fleet.controller.next_view(view.controller_incarnation, view.version, 60.0)


def test_workers_are_replaced_and_take_orders(tmp_path: Path) -> None:
    asyncio.run(exercise(make_model_dir(tmp_path / "tiny")))


async def exercise(folder: Path) -> None:
    async with process_fleet(BatonConfig.from_mapping(CONFIG), folder) as fleet:
        expected = await ask(fleet)
        before = await incarnations(fleet, {})
        assert set(before) == {"w0", "w1", "w2"}
        # One is killed, one hangs.
        fleet.launcher.lives["w0"].process.send_signal(signal.SIGKILL)
        fleet.launcher.lives["w1"].process.send_signal(signal.SIGSTOP)
        assert await ask(fleet) == expected
        healed = await incarnations(fleet, {name: before[name] for name in ("w0", "w1")})
        assert healed["w2"] == before["w2"]
        # One changes its role, and stays what it is otherwise.
        await fleet.controller.set_role("w1", WorkerRole.PREFILL)
        view = await fleet.controller.next_view("", -1, 0.0)
        assert {e.ref.name: e.role for e in view.endpoints}["w1"] is WorkerRole.PREFILL
        assert await incarnations(fleet, {}) == healed
        await fleet.controller.set_role("w1", WorkerRole.DECODE)
        assert await ask(fleet) == expected
        # Each is restarted, and one leaves.
        steps = [step async for step in fleet.controller.rollout()]
        assert {step.worker for step in steps} == {"w0", "w1", "w2"}
        leaving = fleet.launcher.lives["w2"].process
        await fleet.controller.drain("w2")
        assert leaving.wait() == 0
        assert set(await incarnations(fleet, {})) == {"w0", "w1"}
        assert await ask(fleet) == expected
