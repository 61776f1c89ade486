"""`baton serve --model ORG/NAME` and `baton models`, as a new user starts them, against a stub Hub."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.hub_name import HubName
from cli.main import DONE, REFUSED, main
from engine.loading.hub import fetch
from gateway import GatewayClient
from tests.factories.models import make_model_dir
from tests.factories.serving import serving
from tests.factories.stub_hub import StubHub, environment_of, stub_hub, use_in_this_process
from tests.integration.test_serve_without_ray import renewed, serving_workers

pytestmark = pytest.mark.slow

CONFIG = """
model: {dtype: float32}
engine: {kv_cache_memory_mib: 8, num_threads: 1}
cluster: {ray_address: none, prefill: 0, decode: 1, drain_timeout_s: 0.2}
"""
NAME = "acme/tiny"


async def exercise(ready: dict[str, Any]) -> None:
    """Asks, kills a worker, and asks its next incarnation."""
    async with GatewayClient(ready["target"]) as client:
        assert (await client.describe())["model"] == NAME
        before = await serving_workers(client)
        expected = await ask(client)
        (worker,) = ready["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        await renewed(client, before, "w0")
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
        arguments = ("--model", NAME, "--routing-mode", "local")
        with serving(str(config), *arguments, environment=environment) as serve:
            ready = serve.wait_ready()
            serve.wait_for_text("downloading acme/tiny: ")
            serve.wait_for_text(f"snapshots/{commit} in float32")
            serve.wait_for_text("1 MiB of weights; 0.75 KiB of KV per token; 8 MiB of KV hold 10,896 tokens")
            hub.add_folder(NAME, make_model_dir(tmp_path / "newer", seed=1))  # main moves
            hub.requests.clear()
            asyncio.run(exercise(ready))
            assert hub.requests == [], "the commit is fixed: no worker asks the Hub"
            serve.interrupt()
            assert serve.wait_gone() == 0


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    """A stub Hub for commands in this process."""
    with stub_hub() as hub:
        use_in_this_process(hub, tmp_path / "hf", monkeypatch)
        yield hub


def test_a_wrong_name_is_refused_before_anything_starts(
    hub: StubHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--ray-address", "none", "--model", "acme/tinny"]) == REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton serve: model 'acme/tinny' is not a folder or file here, and ")


def test_a_model_without_room_is_refused_before_anything_starts(
    hub: StubHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add_folder(NAME, folder)
    much = ["--kv-cache-memory-mib", str(2**40)]
    assert main(["serve", "--ray-address", "none", "--dtype", "float32", "--model", NAME, *much]) == REFUSED
    *_, last = capsys.readouterr().err.splitlines()
    said = "acme/tiny does not fit: a worker needs 1 MiB of weights and 1,099,511,627,776 MiB of KV, and the available"
    assert last.startswith(f"baton serve: {said}")


def test_models_lists_what_is_cached_as_a_table_and_as_json(
    hub: StubHub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.add_folder(NAME, folder)
    fetch(HubName(NAME), lambda *_: None)
    flags = ["--dtype", "float32", "--kv-cache-memory-mib", "8"]
    assert main(["models", "--json", *flags]) == DONE
    models = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    model = models[NAME]
    assert (model["loads"], model["problem"], model["commit"]) == (True, "", commit)
    assert (model["refs"], model["dtype"], model["kv_bytes_per_token"]) == (["main"], "float32", 768)
    assert model["num_kv_tokens"] == 10_896
    assert main(["models", *flags]) == DONE
    table = " ".join(capsys.readouterr().out.split())
    assert f"{NAME} {commit[:8]} LlamaForCausalLM float32" in table
    assert "768 B 11k in float32" in table
