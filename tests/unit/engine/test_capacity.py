"""A rank's capacity, by configuration, device and model."""

import json
import logging
import math
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.config import BatonConfig, ModelConfig, SchedulerConfig
from baton.errors import ConfigError
from engine import capacity
from engine.batch import StepLimits
from engine.capacity import largest_steps, rank_capacity, with_defaults_of
from engine.gpu.memory import GIB, DeviceMemory
from engine.layers.torch_backend import TorchBackend
from engine.loading.loader import LoadedModel, load_model, outline_model
from tests.factories.models import WINDOWED, make_model_dir
from tests.factories.stepping import load_on_cpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_model_dir(tmp_path_factory.mktemp("model"), max_position_embeddings=256)
    return load_model(BatonConfig.from_mapping({"model": {"dtype": "float32"}}).model, path, CPU)


def reckoned(model: LoadedModel, **sections: dict[str, Any]) -> SchedulerConfig:
    return capacity_of(model, **sections).scheduler_config


def capacity_of(model: LoadedModel, **sections: dict[str, Any]) -> capacity.Capacity:
    config = BatonConfig.from_mapping(sections)
    return rank_capacity(config.engine, config.scheduler, model)


def test_a_cpu_takes_what_is_asked_and_the_models_own_length(model: LoadedModel) -> None:
    config = reckoned(model, engine={"kv_cache_memory_mib": 1}, scheduler={"block_size": 8})
    assert config.max_model_len == 256
    assert config.num_blocks == 2**20 // (3 * 2 * 2 * 8 * 16 * 4)
    assert config.num_swap_blocks is None
    assert reckoned(model, scheduler={"num_blocks": 5, "max_model_len": 9}).max_model_len == 9


def test_the_default_pool_holds_as_many_tokens_in_float32_as_in_16_bits(model: LoadedModel) -> None:
    assert model.kv_dtype == torch.float32
    assert reckoned(model).num_blocks == 2**31 // model.kv_block_shape(16).size_bytes
    half = replace(model, kv_dtype=torch.bfloat16)
    assert reckoned(half).num_blocks == reckoned(model).num_blocks


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"scheduler": {"max_model_len": 257}},
            r"max_model_len: got 257, but this model supports at most 256",
        ),
        (
            {"engine": {"kv_cache_memory_mib": 1}, "scheduler": {"block_size": 9999}},
            "too little for two blocks",
        ),
        (
            {
                "engine": {"swap_space_mib": 1},
                "scheduler": {"preemption": "swap", "block_size": 9999, "num_blocks": 3},
            },
            "swap_space_mib: got 1, which is too little for one block",
        ),
    ],
)
def test_too_much_is_refused_by_its_key(model: LoadedModel, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reckoned(model, **sections)


def test_a_gpu_has_defaults_of_its_own_which_give_way_to_what_is_set() -> None:
    config = with_defaults_of(CUDA, SchedulerConfig(max_num_seqs=7), 10_000)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.block_size) == (7, 8192, 64)
    assert with_defaults_of(CPU, SchedulerConfig(), 10_000) == SchedulerConfig()


@pytest.mark.parametrize(
    ("settings", "budget"),
    [
        ({"max_num_seqs": 200}, 200),
        ({"max_num_seqs": 200, "max_num_batched_tokens": 100}, 100),
        ({"enable_chunked_prefill": False}, 700),
        ({"batching": "prefill_first"}, 700),
        ({"batching": "mixed"}, 700),
        ({"enable_chunked_prefill": False, "max_model_len": 256}, 512),
        ({"enable_chunked_prefill": False, "max_model_len": 600}, 600),
    ],
    ids=str,
)
def test_on_a_cpu_a_step_of_decodes_and_an_unsplit_prompt_fit_the_budget_unless_it_is_set(
    settings: dict[str, Any], budget: int
) -> None:
    """The model's longest request has 700 tokens."""
    asked = SchedulerConfig(**settings)
    assert with_defaults_of(CPU, asked, asked.max_model_len or 700).max_num_batched_tokens == budget


def test_c60_mixed_steps_on_a_cpu_are_limited_by_the_pool_alone_unless_a_budget_is_set(
    model: LoadedModel,
) -> None:
    found = capacity_of(model, scheduler={"batching": "mixed", "num_blocks": 101})
    assert found.scheduler_config.max_num_batched_tokens == found.limits.max_num_batched_tokens == 1600
    whole_pool = reckoned(model, scheduler={"batching": "mixed"})
    assert whole_pool.num_blocks is not None
    assert whole_pool.num_blocks == reckoned(model).num_blocks
    assert whole_pool.max_num_batched_tokens == (whole_pool.num_blocks - 1) * 16
    budget = {"max_num_batched_tokens": 128}
    assert reckoned(model, scheduler=budget | {"batching": "mixed"}).max_num_batched_tokens == 128


@pytest.mark.parametrize("length", [700, 8192, 20_000])
def test_on_a_gpu_the_longest_prompt_fits_a_step_if_prompts_are_not_split(length: int) -> None:
    for asked in (
        SchedulerConfig(enable_chunked_prefill=False),
        SchedulerConfig(batching="prefill_first", max_model_len=length),
    ):
        assert with_defaults_of(CUDA, asked, length).max_num_batched_tokens == max(8192, length)


def test_prompts_that_are_not_split_need_no_other_key(model: LoadedModel) -> None:
    found = capacity_of(model, scheduler={"enable_chunked_prefill": False}).scheduler_config
    assert found.max_model_len is not None
    assert found.max_num_batched_tokens >= found.max_model_len


def test_what_a_gpu_rehearses_is_known_before_its_model_is_loaded(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model", max_position_embeddings=256)
    outline = outline_model(ModelConfig(dtype="bfloat16"), path, TorchBackend())
    assert outline.device.type == "meta"
    assert largest_steps(SchedulerConfig(max_num_seqs=7), outline) == StepLimits(7, 8192, 256)
    with pytest.raises(ConfigError, match="supports at most 256"):
        largest_steps(SchedulerConfig(max_model_len=257), outline)


@pytest.mark.parametrize(("budget", "num_sequences"), [(8192, 35), (20, 20), (5, 7)])
def test_each_draft_is_a_sequence_of_its_step_if_the_budget_allows(
    tmp_path: Path, budget: int, num_sequences: int
) -> None:
    path = make_model_dir(tmp_path / "model", max_position_embeddings=256)
    outline = outline_model(ModelConfig(dtype="bfloat16"), path, TorchBackend())
    scheduler = SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=budget)
    assert largest_steps(scheduler, outline, num_drafts=4) == StepLimits(num_sequences, budget, 256)


@pytest.mark.parametrize(("chunk", "budget"), [(512, 1024), (2048, 2048), (8192, 8192)])
def test_a_gpus_chunk_is_as_small_as_keeps_it_busy_but_decodes_all_fit(
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    chunk: int,
    budget: int,
) -> None:
    monkeypatch.setattr(
        capacity, "_measure", lambda *_, wants_chunk: SimpleNamespace(chunk=chunk if wants_chunk else None)
    )
    with caplog.at_level(logging.INFO, logger="engine.capacity"):
        found = capacity_of(replace(model, device=CUDA), scheduler={"max_num_seqs": 1024, "num_blocks": 9})
    assert found.scheduler_config.max_num_batched_tokens == budget
    assert f"chose scheduler.max_num_batched_tokens {budget} by measuring;" in caplog.text, "what to set"
    assert found.limits.max_num_batched_tokens == 8192


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 700},
        {"max_num_batched_tokens": 512},
        {"enable_chunked_prefill": False},
        {"batching": "prefill_first"},
        {"batching": "mixed"},
    ],
    ids=str,
)
def test_a_chunk_that_is_pinned_or_means_nothing_is_not_chosen(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """This also holds where memory is measured, as here. A key that is set to its default counts as set."""
    wanted: list[bool] = []

    def measured(*_: object, wants_chunk: bool) -> SimpleNamespace:
        wanted.append(wants_chunk)
        memory = DeviceMemory(80 * GIB, GIB, GIB, GIB, GIB, 0.9)
        return SimpleNamespace(memory=memory, chunk=2048 if wants_chunk else None)

    monkeypatch.setattr(capacity, "_measure", measured)
    config = reckoned(replace(model, device=CUDA), scheduler=settings | {"max_num_seqs": 8})
    assert wanted == [False]
    assert config.max_num_batched_tokens == settings.get("max_num_batched_tokens", 8192)


def test_a_gpus_pool_has_no_more_rows_than_its_copy_engine_counts(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DeviceMemory(2**60, 0, 0, 0, 0, 1.0)
    monkeypatch.setattr(capacity, "_measure", lambda *_, **__: SimpleNamespace(memory=memory, chunk=None))
    num_blocks = reckoned(replace(model, device=CUDA)).num_blocks
    num_rows = math.prod(model.kv_block_shape(64).dimensions[:-1])
    assert num_blocks is not None
    assert num_blocks * num_rows < 2**31 <= (num_blocks + 1) * num_rows


def test_a_gpu_counts_the_blocks_of_groups_as_a_cpu_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 224 tokens needs a row of every group for its step of 32 and its window, and full rows before."""
    settings: dict[str, Any] = {"max_num_batched_tokens": 32, "max_model_len": 224, "block_size": 8}
    folder = make_model_dir(tmp_path / "model", "qwen2", **WINDOWED)
    windowed = load_on_cpu(folder)
    size_bytes, needed = windowed.kv_block_shape(8).size_bytes, 224 // 8 + 2 * (-(-(23 + 32) // 8) + 1) + 1

    def measured(num_blocks: int) -> SimpleNamespace:
        return SimpleNamespace(memory=DeviceMemory(num_blocks * size_bytes, 0, 0, 0, 0, 1.0), chunk=None)

    monkeypatch.setattr(capacity, "_measure", lambda *_, wants_chunk: measured(needed))  # noqa: ARG005
    on_gpu = replace(windowed, device=CUDA)
    assert reckoned(on_gpu, scheduler=settings).num_blocks == needed < 3 * 224 // 8
    monkeypatch.setattr(capacity, "_measure", lambda *_, wants_chunk: measured(needed - 1))  # noqa: ARG005
    with pytest.raises(
        ConfigError, match=rf"224 tokens needs {needed - 1} blocks and the null block: {needed} x"
    ):
        reckoned(on_gpu, scheduler=settings)


@pytest.mark.parametrize(
    "travel",
    [
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: BatonConfig.from_mapping(json.loads(config.model_dump_json(exclude_unset=True))),
    ],
    ids=["to an actor", "to a rank"],
)
def test_unset_keys_stay_unset_on_the_way_to_the_worker(travel: Any, tmp_path: Path) -> None:
    config = BatonConfig.from_mapping({"scheduler": {"block_size": 16}})
    scheduler = with_defaults_of(CUDA, travel(config).scheduler, 100)
    assert scheduler.block_size == 16, "set, if to the default"
    assert scheduler.max_num_seqs == 256
