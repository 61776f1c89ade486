"""`baton serve --ray-address none`: the same service over child processes, which its controller keeps whole."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.fleet import CacheFlush
from baton.worker import WorkerRole
from gateway import GatewayClient, GatewayError
from tests.factories.models import make_model_dir
from tests.factories.serving import ServeProcess, listening_addresses, serving, serving_with_forks

pytestmark = pytest.mark.slow

CONFIG = """
model: {load_format: dummy, dtype: float32}
engine: {kv_cache_memory_mib: 8, num_threads: 1}
kv_transfer: {lease_s: 1.0}
cluster: {ray_address: none, prefill: 1, decode: 2, unresponsive_timeout_s: 3.0, drain_timeout_s: 0.2}
"""
TIMEOUT_S = 90.0
STOOD_S = 6.0
"""Longer than a worker may be silent towards its supervisor, and a gateway towards its workers."""


async def ask(
    client: GatewayClient, num_tokens: int = 5, on_first: Callable[[], None] | None = None
) -> list[int]:
    """`on_first` is called when the first token is here."""
    tokens: list[int] = []
    async for event in client.generate(
        token_ids=[5, 6, 7], sampling={"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0.0}
    ):
        if on_first is not None and not tokens:
            on_first()
        tokens += event.token_ids
    assert len(tokens) == num_tokens
    return tokens


async def serving_workers(client: GatewayClient) -> dict[str, dict[str, Any]]:
    """The workers that are ready, by name."""
    workers = (await client.describe())["workers"]
    return {worker["name"]: worker for worker in workers if worker["state"] == "ready"}


async def renewed(client: GatewayClient, before: dict[str, dict[str, Any]], *names: str) -> None:
    """Returns once all workers of `before` serve: `names` in another incarnation, the others in the same one."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            now = await serving_workers(client)
            if now.keys() == before.keys():
                changed = {n for n, w in now.items() if w["incarnation"] != before[n]["incarnation"]}
                if changed == set(names):
                    return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def client_of(serve: ServeProcess) -> AsyncIterator[GatewayClient]:
    async with GatewayClient(serve.wait_ready()["target"]) as client:
        yield client


def test_workers_are_replaced_take_orders_and_leave_nothing(tmp_path: Path) -> None:
    make_model_dir(tmp_path / "tiny")
    config = tmp_path / "baton.yaml"
    config.write_text(CONFIG)
    with serving_with_forks(str(config), "--model", str(tmp_path / "tiny")) as serve:
        asyncio.run(exercise(serve))
        host, port = min(listening_addresses([psutil.Process(serve.process.pid)]))
        with serving(str(config), "--model", str(tmp_path / "tiny"), "--grpc-port", str(port)) as second:
            assert second.wait_gone() == 2
            assert (
                f"gateway.grpc_port: {host}:{port} is in use, perhaps by another `baton serve`"
                in second.stderr
            )
            assert "workers" not in second.stderr, "none was started"
        assert serve.process.poll() is None
        serve.interrupt()  # as a terminal does, to the whole group; workers are in sessions of their own
        assert serve.wait_gone() == 0
        assert "ray" not in serve.stderr.lower()
        for name in ("w0", "w1"):
            assert serve.stderr.count(f"worker {name} (") == 1, "a death is logged once"


def test_a_command_that_stood_still_ends_no_request_but_a_second_ctrl_c_does(tmp_path: Path) -> None:
    """The command that stood still kills no worker, either."""
    make_model_dir(tmp_path / "tiny", max_position_embeddings=16384)
    config = tmp_path / "baton.yaml"
    patient = CONFIG.replace("drain_timeout_s: 0.2", "drain_timeout_s: 600.0").replace("_mib: 8", "_mib: 16")
    config.write_text(patient + "network: {peer_timeout_s: 2.0}\n")
    with serving_with_forks(str(config), "--model", str(tmp_path / "tiny")) as serve:
        asyncio.run(stand_still_and_leave(serve))


async def stand_still_and_leave(serve: ServeProcess) -> None:
    async with client_of(serve) as client:
        expected = await ask(client, 2000)
        before = await serving_workers(client)
        has_begun = asyncio.Event()
        asking = [asyncio.create_task(ask(client, 2000, has_begun.set)) for _ in range(2)]
        await has_begun.wait()
        serve.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(STOOD_S)
        serve.process.send_signal(signal.SIGCONT)
        assert await asyncio.gather(*asking) == [expected] * 2
        await asyncio.sleep(1.0)  # by now, a supervisor would have killed a worker that it took for dead
        await renewed(client, before)
        assert await ask(client, 5) == expected[:5]
        assert "silent for too long" in serve.stderr, "it stood still for long enough to be missed"
        assert "died" not in serve.stderr
        # After a second Ctrl-C, the command does not wait for a running request, either.
        has_begun.clear()
        endless = asyncio.create_task(ask(client, 15_000, has_begun.set))
        await has_begun.wait()
        serve.interrupt()
        await asyncio.to_thread(serve.wait_for_text, "Ctrl-C again")
        serve.interrupt()
        assert await asyncio.to_thread(serve.wait_gone) == 0
        with pytest.raises(GatewayError):
            await endless


async def exercise(serve: ServeProcess) -> None:
    async with client_of(serve) as client:
        expected = await ask(client)
        before = await serving_workers(client)
        assert set(before) == {"w0", "w1", "w2"}
        # One worker is killed, and one hangs.
        os.kill(before["w0"]["pid"], signal.SIGKILL)
        os.kill(before["w1"]["pid"], signal.SIGSTOP)
        assert await ask(client) == expected
        await renewed(client, before, "w0", "w1")
        # One worker changes its role, and nothing else about it changes.
        healed = await serving_workers(client)
        await client.set_role("w1", WorkerRole.PREFILL)
        changed = await serving_workers(client)
        assert changed["w1"]["role"] == "prefill"
        assert {n: w["pid"] for n, w in changed.items()} == {n: w["pid"] for n, w in healed.items()}
        await client.set_role("w1", WorkerRole.DECODE)
        assert await ask(client) == expected
        # All workers empty their prefix caches, once the blocks of the last hand-over are no longer leased.
        async with asyncio.timeout(TIMEOUT_S):
            while any("leased" in flush.obstacle for flush in await client.flush_cache()):
                await asyncio.sleep(0.1)
        assert await client.flush_cache() == tuple(map(CacheFlush, ("w0", "w1", "w2")))
        # Two workers are restarted, and one of them is drained.
        steps = [step async for step in client.rollout(["w0", "w2"])]
        assert [step.worker for step in steps] == ["w0", "w2"]
        await renewed(client, healed, "w0", "w2")
        await client.drain("w2")
        assert set(await serving_workers(client)) == {"w0", "w1"}
        assert await ask(client) == expected


def test_a_worker_that_can_never_start_ends_the_command_with_its_reason(tmp_path: Path) -> None:
    model = make_model_dir(tmp_path / "tiny")
    (tmp_path / "baton.yaml").write_text(CONFIG)
    arguments = (str(tmp_path / "baton.yaml"), "--model", str(model), "--max-model-len", "999999")
    with serving_with_forks(*arguments) as serve:
        assert serve.wait_gone() in (1, 2)
        assert serve.stderr.splitlines()[-1].startswith("baton serve: ")
        assert "max_model_len" in serve.stderr.splitlines()[-1]


@contextmanager
def starting_for_ever(folder: Path, tmp_path: Path, moment: str) -> Iterator[ServeProcess]:
    """`baton serve`, whose workers run a compiler without end: while they import, or while they load."""
    stays = {
        "imports": "    sys.meta_path.insert(0, Imports())\n",
        "loads": "    from worker.host import EngineHost\n    EngineHost.start = stay\n",
    }
    (tmp_path / "sitecustomize.py").write_text(
        "import subprocess, sys\n"
        "def stay(*_):\n"
        "    compiler = subprocess.Popen(['sleep', '600'])\n"
        "    print('it starts', file=sys.stderr, flush=True)\n"
        "    compiler.wait()\n"
        "class Imports:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'worker.process':\n"
        "            stay()\n"
        "if 'worker' in sys.orig_argv:\n" + stays[moment]
    )
    small = "--ray-address=none", "--prefill=0", "--kv-cache-memory-mib=8"
    imports = f"{tmp_path}:{Path(__file__).parents[2]}"
    with serving("--model", str(folder), *small, environment={"PYTHONPATH": imports}) as serve:
        serve.wait_for_text("it starts")
        yield serve


def test_ctrl_c_while_workers_load_leaves_no_shared_memory(folder: Path, tmp_path: Path) -> None:
    """The workers are killed while they load. So none of them removes the file by which they lend cores."""
    with starting_for_ever(folder, tmp_path, "loads") as serve:
        serve.interrupt()
        assert serve.wait_gone() == 0
        assert list(Path("/dev/shm").glob(f"baton-cpus-*-{serve.process.pid}-*")) == []


@pytest.mark.parametrize("moment", ["imports", "loads"])
def test_a_command_that_is_killed_leaves_no_starting_worker(
    folder: Path, tmp_path: Path, moment: str
) -> None:
    with starting_for_ever(folder, tmp_path, moment) as serve:
        serve.process.kill()
        assert serve.wait_gone() == -signal.SIGKILL


def test_a_worker_that_is_killed_while_it_compiles_leaves_no_compiler(folder: Path, tmp_path: Path) -> None:
    with starting_for_ever(folder, tmp_path, "loads") as serve:
        compilers = [each for each in serve.descendants() if each.name() == "sleep"]
        workers = [compiler.parent() for compiler in compilers]
        for worker in filter(None, workers):
            worker.kill()
        assert len(compilers) == 1
        assert psutil.wait_procs(compilers, timeout=TIMEOUT_S)[1] == []
