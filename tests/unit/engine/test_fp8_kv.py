"""A KV cache of 8-bit floats: what is stored, what tokens see of it, and who may exchange it."""

from pathlib import Path

import pytest
import torch

from baton.config import ModelConfig
from engine.kv_cache import KVPool
from engine.layers.fp8 import FP8, saturate
from engine.loading.loader import LoadedModel, load_model
from tests.factories.kv_blocks import block_array
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver, generate_from_copied_blocks

CPU = torch.device("cpu")
PROMPTS = {"a": [(7 * i) % 300 for i in range(45)], "b": [(11 * i) % 300 for i in range(13)]}


def load(path: Path, dtype: str = "float32", **config: str) -> LoadedModel:
    return load_model(ModelConfig.model_validate({"dtype": dtype, **config}), path, CPU, kv_cache_dtype="fp8")


def test_a_block_has_half_the_bytes_of_16_bits(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    plain = load_model(ModelConfig(dtype="bfloat16"), path, CPU).kv_block_shape(16)
    shape = load(path, "bfloat16").kv_block_shape(16)
    assert shape.dtype is FP8
    assert shape.size_bytes * 2 == plain.size_bytes
    assert block_array(KVPool(3, shape, CPU)).shape == (3, plain.size_bytes // 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_pool_holds_rounded_keys_and_values(tmp_path: Path, dtype: str) -> None:
    """Those of the first layer, which no attention came before, are the plain cache's, rounded."""
    path = make_model_dir(tmp_path)
    rows = []
    for model in (load(path, dtype), load_model(ModelConfig.model_validate({"dtype": dtype}), path, CPU)):
        driver = StepDriver(model)
        block_ids = driver.free_blocks[: len(PROMPTS["a"]) // 4]  # the first request's
        driver.generate(PROMPTS, 3)
        rows.append(driver.pool.blocks_NLKHTD[block_ids, 0])
    assert rows[0].dtype is FP8
    assert torch.equal(rows[0].float(), saturate(rows[1]).float())
    assert rows[0].float().count_nonzero() > 0.9 * rows[0].numel()


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_tokens_do_not_depend_on_how_prompts_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: str, kernels: str
) -> None:
    """Our kernels compute a prompt's last token alone like a decode, which rounds less than a chunk in bfloat16."""
    window = {"sliding_window": 9} if architecture == "mistral" else {}
    prompts = PROMPTS
    if kernels == "torch's":
        monkeypatch.setattr("engine.loading.loader.native_library", lambda: None)
    elif dtype == "bfloat16":
        prompts = {name: [*prompt, 5] for name, prompt in PROMPTS.items()}
        assert all(len(prompt) % chunk != 1 for prompt in prompts.values() for chunk in (4, 7, 16))
    model = load(make_model_dir(tmp_path, architecture, **window), dtype)
    whole = StepDriver(model).generate(prompts, 12)
    for chunk in (4, 7, 16):
        assert StepDriver(model).generate(prompts, 12, chunk=chunk) == whole


def test_a_first_chunk_attends_to_what_is_stored(tmp_path: Path) -> None:
    """Keys and values of the last layer are the same whether a prompt comes whole or token by token."""
    model = load(make_model_dir(tmp_path))
    stored = []
    for chunk in (1000, 1):
        driver = StepDriver(model)
        driver.generate({"a": PROMPTS["a"]}, 1, chunk=chunk)
        stored.append(driver.pool.blocks_NLKHTD[:, 2].float())
    differences = (stored[0] != stored[1]).float().mean().item()
    assert differences < 0.01  # float32 sums in another order, seen through a rounding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_whose_blocks_were_copied_continues_with_the_same_tokens(tmp_path: Path, dtype: str) -> None:
    model = load(make_model_dir(tmp_path), dtype)
    expected = StepDriver(model).generate({"a": PROMPTS["a"]}, 10)["a"]
    assert generate_from_copied_blocks(model, PROMPTS["a"], 10) == expected


def test_fingerprints_differ_by_dtype(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    eight = load(path, "bfloat16")
    sixteen = load_model(ModelConfig(dtype="bfloat16"), path, CPU)
    ours, theirs = (
        KVPool(2, model.kv_block_shape(4), CPU).fingerprint(model.digest) for model in (eight, sixteen)
    )
    assert ours.differences(theirs) == [
        f"model: {sixteen.digest}-bfloat16 != {sixteen.digest}",
        "dtype: float8_e4m3fn != bfloat16",
    ]


def test_fingerprints_differ_by_the_dtype_that_computed_the_kv(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    models = load(path, "bfloat16"), load(path, "float32")
    ours, theirs = (KVPool(2, m.kv_block_shape(4), CPU).fingerprint(m.digest) for m in models)
    assert ours.dtype == theirs.dtype == "float8_e4m3fn"
    (difference,) = ours.differences(theirs)
    assert difference == f"model: {models[0].digest} != {models[1].digest}"
