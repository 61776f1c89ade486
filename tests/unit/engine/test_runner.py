"""However a request's tokens are cut into steps, the same ones come out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.sampling import SamplingParams
from engine.forward import TorchForward
from engine.kv_cache import HostBlocks
from engine.layers.native_backend import NativeBackend
from engine.layers.paged_attention import PagedAttention
from engine.layers.torch_backend import TorchBackend
from engine.loading.loader import LoadedModel
from engine.native.library import native_library
from engine.runner import ModelRunner
from engine.sampler import TorchSampler
from tests.factories.kv_blocks import block_array
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver, load_on_cpu

PROMPTS = {f"r{length}": [(7 * i + length) % 300 for i in range(length)] for length in (1, 3, 4, 5, 9, 30)}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, repetition_penalty=1.1, max_tokens=100)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_on_cpu(folder)


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> dict[str, list[int]]:
    """The answers to the prompts, each computed alone and whole. Every other way must give the same answers."""
    return {
        name: StepDriver(model).generate({name: prompt}, 10, params=SAMPLED)[name]
        for name, prompt in PROMPTS.items()
    }


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunks_and_company_change_nothing(
    model: LoadedModel, alone: dict[str, list[int]], chunk: int
) -> None:
    assert StepDriver(model).generate(PROMPTS, 10, chunk=chunk, params=SAMPLED) == alone


def test_block_size_and_block_order_change_nothing(model: LoadedModel, alone: dict[str, list[int]]) -> None:
    for block_size, seed in ((1, 1), (5, 2), (64, 3)):
        driver = StepDriver(model, block_size=block_size, seed=seed)
        assert driver.generate(PROMPTS, 10, params=SAMPLED) == alone


def test_a_preempted_request_continues_where_it_was(model: LoadedModel, alone: dict[str, list[int]]) -> None:
    driver = StepDriver(model)
    name = "r9"
    driver.add(name, PROMPTS[name], SAMPLED)
    driver.step({name: 9})
    driver.step({name: 1})
    driver.preempt(name)
    driver.step({})
    while len(driver.requests[name].outputs) < 10:
        request = driver.requests[name]
        driver.step({name: min(4, request.num_tokens - request.num_computed)})
    assert driver.requests[name].outputs == alone[name]


def test_a_handed_over_request_continues_from_its_blocks(
    model: LoadedModel, alone: dict[str, list[int]]
) -> None:
    """The blocks travel as bytes, the first token in the plan; nothing is computed twice."""
    name, prompt = "r30", PROMPTS["r30"]
    producer, consumer = StepDriver(model, seed=1), StepDriver(model, seed=2)
    producer.add(name, prompt, SAMPLED)
    producer.step({name: len(prompt)})
    request = consumer.add(name, prompt, SAMPLED)
    request.outputs = list(producer.requests[name].outputs)
    request.num_computed = len(prompt)
    source = producer.requests[name].block_ids
    request.block_ids = [consumer.free_blocks.pop(0) for _ in source]
    block_array(consumer.pool)[request.block_ids] = block_array(producer.pool)[source]
    while len(request.outputs) < 10:
        consumer.step({name: 1})
    assert request.outputs == alone[name]


def test_garbage_in_free_blocks_changes_no_request(model: LoadedModel, alone: dict[str, list[int]]) -> None:
    driver = StepDriver(model)
    driver.pool.blocks_NLKHTD[1:] = torch.nan
    assert driver.generate(PROMPTS, 10, chunk=4, params=SAMPLED) == alone


def test_an_unfinished_prompt_samples_nothing(model: LoadedModel) -> None:
    driver = StepDriver(model)
    driver.add("a", range(10))
    assert driver.step({"a": 9}).sampled_token_ids == {}
    assert list(driver.step({"a": 1}).sampled_token_ids) == ["a"]


def test_logprobs_come_with_the_tokens_that_asked(model: LoadedModel) -> None:
    driver = StepDriver(model)
    wants = SamplingParams(temperature=0.0, logprobs=2, max_tokens=10)
    driver.add("wants", range(5), wants)
    driver.add("does not", range(5))
    output = driver.step({"wants": 5, "does not": 5})
    (logprobs,) = output.logprobs["wants"]
    assert "does not" not in output.logprobs
    assert logprobs.token_id == output.sampled_token_ids["wants"][0] == logprobs.top[0][0]
    assert logprobs.rank == 1


def test_a_plan_without_tokens_only_forgets(model: LoadedModel) -> None:
    driver = StepDriver(model)
    driver.add("a", range(3))
    driver.step({"a": 3})
    driver.finish("a")
    assert driver.step({}).sampled_token_ids == {}
    driver.add("a", range(4))
    assert list(driver.step({"a": 4}).sampled_token_ids) == ["a"]


class BusyDevice:
    """An asynchronous device, which computes only when a test waits for it."""

    def __init__(self) -> None:
        self.num_waits = 0

    def mark(self) -> "BusyDevice":
        return self

    def synchronize(self) -> None:
        self.num_waits += 1


def test_a_step_that_samples_nothing_is_computed_when_wait_returns(
    model: LoadedModel,
) -> None:
    """The blocks that a chunk of a prompt fills are handed over next, and those of swapped requests overwritten."""
    device, driver = BusyDevice(), StepDriver(model)
    attention = PagedAttention(driver.pool, model.architecture, model.num_heads, model.dtype)
    runner = ModelRunner(
        TorchForward(model.decoder, attention, model.device),
        TorchSampler(),
        HostBlocks(1, driver.pool),
        driver.pool.shape.block_size,
        mark=device.mark,
    )
    driver.add("a", range(10))
    chunk = runner.launch(driver.plan({"a": 4}))
    assert device.num_waits == 0
    assert chunk.wait().sampled_token_ids == {}
    assert device.num_waits == 1
    runner.launch(replace(driver.plan({}), swap_out=((1, 0),))).wait()
    assert device.num_waits == 2
    driver.requests["a"].num_computed = 4
    assert list(runner.launch(driver.plan({"a": 6})).wait().sampled_token_ids) == ["a"]
    assert device.num_waits == 2, "its token is known, so it is computed"


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3"])
def test_our_own_kernels_and_torch_compute_the_same_tokens(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = {"sliding_window": 9} if architecture == "mistral" else {}
    path = make_model_dir(tmp_path, architecture, **window)
    prompts = {"a": [(7 * i) % 300 for i in range(45)], "b": [(11 * i) % 300 for i in range(13)]}
    tokens, backends = [], []
    for library in (native_library(), None):
        monkeypatch.setattr("engine.loading.loader.native_library", lambda library=library: library)
        model = load_on_cpu(path)
        backends.append(type(model.backend))
        tokens.append(StepDriver(model).generate(prompts, 20, chunk=16))
    assert tokens[0] == tokens[1]
    assert backends[1] is TorchBackend
    assert backends[0] is (TorchBackend if native_library() is None else NativeBackend)
