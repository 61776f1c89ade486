"""`baton serve --model ORG/NAME` and `baton models`, as a new user starts them, against a stub Hub."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gateway import GatewayClient
from tests.factories.models import make_model_dir
from tests.factories.serving import COMMAND, serving
from tests.factories.stub_hub import environment_of, stub_hub
from tests.integration.test_serve_without_ray import renewed, serving_workers

pytestmark = pytest.mark.slow

CONFIG = """
model: {dtype: float32}
engine: {kv_cache_memory_mib: 8, num_threads: 1}
cluster: {ray_address: none, prefill: 1, decode: 1, drain_timeout_s: 0.2}
"""
NAME = "acme/tiny"


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


async def exercise(ready: dict[str, Any]) -> None:
    """Asks, kills a worker, and asks its next incarnation."""
    async with GatewayClient(ready["target"]) as client:
        assert (await client.describe())["model"] == NAME
        before = await serving_workers(client)
        expected = await ask(client)
        os.kill(
            next(worker["pid"] for worker in ready["workers"] if worker["role"] == "decode"), signal.SIGKILL
        )
        await renewed(client, before, "w1")
        assert await ask(client) == expected


async def ask(client: GatewayClient) -> list[int]:
    sampling = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}
    return [
        token
        async for event in client.generate(token_ids=[5, 6, 7], sampling=sampling)
        for token in event.token_ids
    ]


def test_a_fleet_serves_one_commit_of_a_name_and_restarts_with_it(tmp_path: Path, folder: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text(CONFIG)
    with stub_hub() as hub:
        commit = hub.add_folder(NAME, folder)
        environment = environment_of(hub, tmp_path / "hf")
        with serving(str(config), "--model", NAME, environment=environment) as serve:
            ready = serve.wait_ready()
            assert f"snapshots/{commit} in float32" in serve.stderr
            assert "downloading acme/tiny: " in serve.stderr
            assert (
                " M parameters, 1 MiB of weights; 0.75 KiB of KV per token; 8 MiB of KV hold " in serve.stderr
            )
            hub.add_folder(NAME, make_model_dir(tmp_path / "newer", seed=1))  # main moves
            hub.requests.clear()
            asyncio.run(exercise(ready))
            assert hub.requests == [], "the commit is fixed: no worker asks the Hub"
            serve.interrupt()
            assert serve.wait_gone() == 0
        listed = run("models", "--json", "--dtype", "float32", environment=environment)
        (model,) = [model for model in json.loads(listed.stdout) if model["name"].startswith("acme")]
        assert (model["loads"], model["problem"]) == (True, "")
        assert (model["commit"], model["refs"], model["dtype"]) == (commit, ["main"], "float32")
        table = run("models", "--dtype", "float32", environment=environment).stdout
        assert f"acme/tiny {commit[:8]} LlamaForCausalLM" in " ".join(table.split())


def test_a_wrong_name_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with stub_hub() as hub:
        done = run("serve", "--model", "acme/tinny", environment=environment_of(hub, tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("baton serve: model 'acme/tinny' is no folder or file here, and ")
    assert done.stderr.count("\n") == 1


def test_a_model_without_room_is_refused_before_anything_starts(tmp_path: Path, folder: Path) -> None:
    with stub_hub() as hub:
        hub.add_folder(NAME, folder)
        arguments = ["serve", "--ray-address", "none", "--dtype", "float32", "--model", NAME]
        done = run(*arguments, "--kv-cache-memory-mib", str(2**40), environment=environment_of(hub, tmp_path))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "baton serve: acme/tiny does not fit: a worker needs 1 MiB of weights and 1,099,511,627,776 MiB"
    )
