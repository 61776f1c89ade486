"""Behaviour 55: a worker whose weights become NaN serves no token, and no other worker uses its KV."""

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from baton.config import BatonConfig
from baton.errors import ModelError
from baton.kv import OnLoadFailure
from baton.request import EngineRequest, ErrorKind
from baton.sampling import SamplingParams
from baton.worker import WorkerRole
from cluster.processes.worker_process import WorkerProcess
from cluster.serve.gateway import make_gateway
from engine.loading.digest import model_digest
from engine.models.decoder import Decoder
from gateway import Tokenizer
from tests.factories.sabotage import VARIABLE, carried_out, spoil
from tests.factories.security import KEYS, SECRET
from tests.factories.whole_engines import EnginesOf, hand_over
from worker.host import EngineHost

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]

CONFIG = BatonConfig.from_mapping(
    {
        "model": {"dtype": "float32"},
        "engine": {"kv_cache_memory_mib": 16, "num_threads": 1},
        "scheduler": {"max_num_batched_tokens": 64, "num_blocks": 64},
        "gateway": {"grpc_port": 0, "http_port": 0, "placement_timeout_s": 5.0},
        "cluster": {"prefill": 0, "decode": 2},
    }
)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 4},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1, "top_p": 0.9, "seed": 5},
)

AT_FAULT = "the device of this worker is at fault"


@pytest.fixture
def wrong_folder(folder: Path, tmp_path: Path) -> Path:
    """The model with one NaN in one weight."""
    wrong = shutil.copytree(folder, tmp_path / "wrong")
    weights = load_file(wrong / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][3, 4] = math.nan
    save_file(weights, wrong / "model.safetensors", {"format": "pt"})
    return wrong


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the workers find their sabotage."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


@asynccontextmanager
async def fleet(
    model: Path, is_spoilt: Mapping[str, bool], orders: Path
) -> AsyncIterator[tuple[httpx2.AsyncClient, dict[str, WorkerProcess]]]:
    """Decode workers by name, and their gateway. The weights of some workers become NaN once the workers serve."""
    workers: dict[str, WorkerProcess] = {}
    gateway = make_gateway(CONFIG, KEYS, model, Tokenizer(model))
    await gateway.start()
    try:
        for name in is_spoilt:
            (orders / name).mkdir()
            workers[name] = WorkerProcess(CONFIG, model, SECRET, WorkerRole.DECODE, name)
        for name, worker in workers.items():
            endpoint = await asyncio.to_thread(worker.wait_until_ready)
            if is_spoilt[name]:
                await carried_out(orders, endpoint.pid, "spoil")
            gateway.workers.add_worker(endpoint)
        for name in workers:
            await gateway.workers.wait_for_worker(name)
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=60) as client:
            yield client, workers
    finally:
        await gateway.stop(grace_s=1.0)
        for worker in workers.values():
            await asyncio.to_thread(worker.stop)


async def complete(client: httpx2.AsyncClient, options: dict[str, Any]) -> httpx2.Response:
    body = {"model": "smollm2", "prompt": "The cache is the baton", "max_tokens": 6, "ignore_eos": True}
    return await client.post("/v1/completions", json=body | options)


def choice(answer: httpx2.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def test_c55_answers_come_from_the_other_worker_token_for_token(folder: Path, orders: Path) -> None:
    async with fleet(folder, {"w0": True, "w1": False}, orders) as (client, workers):
        end = asyncio.create_task(asyncio.to_thread(workers["w0"].wait))
        answers = []
        async with asyncio.timeout(60):
            while not end.done():
                answers += await asyncio.gather(*[complete(client, kind) for kind in KINDS])
        assert end.result() == 1, "it failed, so its supervisor replaces it"
        undisturbed = [choice(await complete(client, kind)) for kind in KINDS]
        for number, answer in enumerate(answers):
            assert choice(answer) == undisturbed[number % len(KINDS)]


async def test_c55_where_every_worker_is_wrong_the_client_gets_an_error(folder: Path, orders: Path) -> None:
    """The error says that the workers failed, not that the request is harmful."""
    async with fleet(folder, {"w0": True, "w1": True}, orders) as (client, _):
        answers = [await complete(client, kind) for kind in KINDS]
        assert [answer.status_code for answer in answers] == [503] * len(KINDS)
        assert f"before that, the decode request failed: {AT_FAULT}" in answers[0].text
        assert all("no decode worker is available" in answer.text for answer in answers)


def test_c55_a_worker_whose_weights_are_wrong_from_the_start_serves_nothing(wrong_folder: Path) -> None:
    host = EngineHost(CONFIG, KEYS, wrong_folder, WorkerRole.DECODE, "d0")
    with pytest.raises(ModelError, match="a step with one known token failed: its logits are not finite"):
        host.start()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_c55_a_prefill_worker_whose_logits_are_not_finite_hands_nothing_over(
    folder: Path, wrong_folder: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode worker computes the prompt itself, whether the prompt comes whole or in chunks. The fault is in the
    memory, not in the files: with other files, the workers would exchange nothing."""
    digest = partial(model_digest, wrong_folder)
    monkeypatch.setattr("engine.loading.loader.model_digest", lambda _folder, **options: digest(**options))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = {f"r{length}": tuple((7 * i + length) % 300 for i in range(length)) for length in (20, 150)}
    requests = [
        EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params)
        for name, prompt in prompts.items()
    ]
    with EnginesOf(folder) as engines:
        reference, consumer = engines.start("reference"), engines.start("d")
        producer = engines.start("p", num_ranks, wrong_folder)
        for request in requests:
            reference.add(request)
            hand_over(producer, consumer, request, OnLoadFailure.RECOMPUTE)
        engines.run()
        for name in prompts:
            end = producer.answers[name].end
            assert end is not None
            assert (end.error, end.error_kind) == (AT_FAULT, ErrorKind.GIVEN_BACK)
            assert consumer.answers[name].token_ids == reference.answers[name].token_ids


def test_a_worker_that_chaos_spoils_serves_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "forward", Decoder.forward)  # undone at the end
    spoil()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with EnginesOf(folder) as engines:
        alone = engines.start("alone")
        alone.add(EngineRequest(request_id="r", prompt_token_ids=(5, 6, 7), sampling_params=params))
        engines.run()
        assert alone.answers["r"].token_ids == []
        end = alone.answers["r"].end
        assert end is not None
        assert (end.error, end.error_kind) == (AT_FAULT, ErrorKind.GIVEN_BACK)
