"""A KV cache of 16 bits beside float32 arithmetic: what is stored, what tokens see of it, and who may exchange it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import BatonConfig, EngineConfig, KVCacheDtype, ModelConfig, SchedulerConfig
from baton.errors import ConfigError
from engine.build import build_device_engine
from engine.capacity import reckon
from engine.collectives import SINGLE_RANK
from engine.kv_cache import KVPool
from engine.loading.loader import LoadedModel, load_model
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver, generate_from_copied_blocks

CPU = torch.device("cpu")
PROMPTS = {"a": [(7 * i) % 300 for i in range(45)], "b": [(11 * i) % 300 for i in range(13)]}


def load(path: Path, dtype: str = "float32", kv_cache_dtype: KVCacheDtype = "bfloat16") -> LoadedModel:
    return load_model(ModelConfig.model_validate({"dtype": dtype}), path, CPU, kv_cache_dtype=kv_cache_dtype)


def kernels_of(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    if kernels == "torch's":
        monkeypatch.setattr("engine.loading.loader.native_library", lambda: None)


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
def test_the_pool_holds_rounded_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Those of the first layer, which no attention came before, are the plain cache's, rounded."""
    kernels_of(monkeypatch, kernels)
    path = make_model_dir(tmp_path)
    rows = []
    for model in (load(path), load(path, kv_cache_dtype="auto")):
        driver = StepDriver(model)
        block_ids = driver.free_blocks[: len(PROMPTS["a"]) // 4]  # the first request's
        driver.generate(PROMPTS, 3)
        rows.append(driver.pool.blocks_NLKHTD[block_ids, 0])
    assert [row.dtype for row in rows] == [torch.bfloat16, torch.float32]
    assert torch.equal(rows[0], rows[1].bfloat16())
    assert rows[0].count_nonzero() > 0.9 * rows[0].numel()


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_tokens_do_not_depend_on_how_prompts_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, kernels: str
) -> None:
    kernels_of(monkeypatch, kernels)
    window = {"sliding_window": 9} if architecture == "mistral" else {}
    model = load(make_model_dir(tmp_path, architecture, **window))
    whole = StepDriver(model).generate(PROMPTS, 12)
    for chunk in (1, 4, 7, 16):
        assert StepDriver(model).generate(PROMPTS, 12, chunk=chunk) == whole


def test_our_kernels_and_torchs_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model_dir(tmp_path)
    ours = StepDriver(load(path)).generate(PROMPTS, 12)
    kernels_of(monkeypatch, "torch's")
    assert StepDriver(load(path)).generate(PROMPTS, 12) == ours


def test_a_prompt_whose_blocks_were_copied_continues_with_the_same_tokens(tmp_path: Path) -> None:
    model = load(make_model_dir(tmp_path))
    expected = StepDriver(model).generate({"a": PROMPTS["a"]}, 10)["a"]
    assert generate_from_copied_blocks(model, PROMPTS["a"], 10) == expected


def test_c43_workers_that_differ_in_it_refuse_each_other(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    mixed, wide, narrow = (
        KVPool(2, model.kv_block_shape(4), CPU).fingerprint(model.digest)
        for model in (load(path), load(path, kv_cache_dtype="auto"), load(path, "bfloat16", "auto"))
    )
    assert mixed.differences(wide) == [
        f"model: {wide.model}-float32 != {wide.model}",
        "dtype: bfloat16 != float32",
    ]
    assert mixed.differences(narrow) == [f"model: {narrow.model}-float32 != {narrow.model}"]
    same = load(path, "bfloat16")
    assert KVPool(2, same.kv_block_shape(4), CPU).fingerprint(same.digest) == narrow


def test_the_same_memory_holds_twice_the_tokens_and_the_default_as_many(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    mixed, wide = load(path), load(path, kv_cache_dtype="auto")
    assert 2 * mixed.kv_block_shape(16).size_bytes == wide.kv_block_shape(16).size_bytes
    reckoned = [reckon(EngineConfig(), SchedulerConfig(), model).scheduler_config for model in (mixed, wide)]
    assert reckoned[0].num_blocks == reckoned[1].num_blocks


def test_where_no_attention_reads_it_it_says_what_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype: 'bfloat16' .*; with 'cpu' and 'float16', use 'auto'"
    ):
        load(make_model_dir(tmp_path), "float16")
    monkeypatch.setattr("engine.build.rank_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr("engine.build._begin_on_gpu", lambda _: pytest.fail("began with the GPU"))
    engine = EngineConfig(num_threads=torch.get_num_threads(), device="cuda", kv_cache_dtype="bfloat16")
    unused: Any = None
    config = BatonConfig(model=ModelConfig(dtype="float32"), engine=engine)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: 'bfloat16' .*; with 'cuda' and 'float32'"):
        build_device_engine(config, None, tmp_path, "", SINGLE_RANK, unused, unused, unused)
