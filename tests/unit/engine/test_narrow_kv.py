"""A KV cache with fewer bits than the arithmetic: what is stored, how it affects tokens, and which workers may
exchange it."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from baton.config import BatonConfig, EngineConfig, ModelConfig
from baton.errors import ConfigError
from baton.kv import KVFingerprint
from engine.build import build_device_engine
from engine.collectives import SINGLE_RANK
from engine.kv_cache import KVPool
from engine.layers.fp8 import FP8, saturate
from engine.loading.loader import LoadedModel
from tests.factories.kv_blocks import block_array
from tests.factories.models import make_model_dir
from tests.factories.stepping import CPU, StepDriver, generate_from_copied_blocks, load_on_cpu

PROMPTS = {"a": [(7 * i) % 300 for i in range(45)], "b": [(11 * i) % 300 for i in range(13)]}
BFLOAT16_BESIDE_FLOAT32 = ("float32", "bfloat16")
Kernels = Literal["ours", "torch's"]


def take(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "torch's":
        monkeypatch.setattr("engine.loading.loader.native_library", lambda: None)


def fingerprint(model: LoadedModel) -> KVFingerprint:
    return KVPool(2, model.kv_block_shape(4), CPU).fingerprint(model.digest)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "kernels"),
    [
        *((dtype, "fp8", "ours") for dtype in ("float32", "bfloat16", "float16")),
        *((*BFLOAT16_BESIDE_FLOAT32, kernels) for kernels in ("ours", "torch's")),
    ],
)
def test_the_pool_holds_rounded_keys_and_values(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kv_cache_dtype: str, kernels: Kernels
) -> None:
    """In the first layer, which no attention precedes, the pool holds the plain cache's keys and values, rounded."""
    take(kernels, monkeypatch)
    rows = []
    for kv in (kv_cache_dtype, "auto"):
        driver = StepDriver(load_on_cpu(folder, dtype=dtype, kv_cache_dtype=kv))
        block_ids = driver.free_blocks[: len(PROMPTS["a"]) // 4]  # the first request's
        driver.generate(PROMPTS, 3)
        rows.append(driver.pool.blocks_NLKHTD[block_ids, 0])
    narrow, plain = rows
    assert (narrow.dtype, plain.dtype) == (
        FP8 if kv_cache_dtype == "fp8" else torch.bfloat16,
        getattr(torch, dtype),
    )
    rounded = saturate(plain) if kv_cache_dtype == "fp8" else plain.bfloat16()
    assert torch.equal(narrow.float(), rounded.float())
    assert narrow.float().count_nonzero() > 0.9 * narrow.numel()


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("float32", "fp8"), ("bfloat16", "fp8"), BFLOAT16_BESIDE_FLOAT32]
)
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_tokens_do_not_depend_on_how_prompts_are_cut(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    dtype: str,
    kv_cache_dtype: str,
    kernels: Kernels,
) -> None:
    """Our kernels compute a prompt's last token alone like a decode, which rounds less than a chunk in bfloat16."""
    take(kernels, monkeypatch)
    chunks = (4, 7, 16) if kv_cache_dtype == "fp8" else (1, 4, 7, 16)
    prompts = PROMPTS
    if kernels == "ours" and dtype == "bfloat16":
        prompts = {name: [*prompt, 5] for name, prompt in PROMPTS.items()}
        assert all(len(prompt) % chunk != 1 for prompt in prompts.values() for chunk in chunks)
    window = {"sliding_window": 9} if architecture == "mistral" else {}
    path = make_model_dir(tmp_path, architecture, **window)
    model = load_on_cpu(path, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    whole = StepDriver(model).generate(prompts, 12)
    for chunk in chunks:
        assert StepDriver(model).generate(prompts, 12, chunk=chunk) == whole


def test_our_kernels_and_torchs_give_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = StepDriver(load_on_cpu(folder, kv_cache_dtype="bfloat16")).generate(PROMPTS, 12)
    take("torch's", monkeypatch)
    assert StepDriver(load_on_cpu(folder, kv_cache_dtype="bfloat16")).generate(PROMPTS, 12) == ours


def test_a_first_chunk_attends_to_what_is_stored(folder: Path) -> None:
    """Keys and values of the last layer are the same whether a prompt comes whole or token by token."""
    model = load_on_cpu(folder, kv_cache_dtype="fp8")
    stored = []
    for chunk in (1000, 1):
        driver = StepDriver(model)
        driver.generate({"a": PROMPTS["a"]}, 1, chunk=chunk)
        stored.append(driver.pool.blocks_NLKHTD[:, 2].float())
    differences = (stored[0] != stored[1]).float().mean().item()
    assert differences < 0.01  # float32 sums in another order, seen through a rounding


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [("float32", "fp8"), ("bfloat16", "fp8"), BFLOAT16_BESIDE_FLOAT32]
)
def test_a_prompt_whose_blocks_were_copied_continues_with_the_same_tokens(
    folder: Path, dtype: str, kv_cache_dtype: str
) -> None:
    model = load_on_cpu(folder, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    expected = StepDriver(model).generate({"a": PROMPTS["a"]}, 10)["a"]
    assert generate_from_copied_blocks(model, PROMPTS["a"], 10) == expected


def test_c43_workers_of_which_one_rounds_to_8_bits_refuse_each_other(folder: Path) -> None:
    eight, sixteen, eight_beside_float32 = (
        load_on_cpu(folder, dtype=dtype, kv_cache_dtype=kv)
        for dtype, kv in (("bfloat16", "fp8"), ("bfloat16", "auto"), ("float32", "fp8"))
    )
    assert fingerprint(eight).differences(fingerprint(sixteen)) == [
        f"model: {sixteen.digest}-bfloat16 != {sixteen.digest}",
        "dtype: float8_e4m3fn != bfloat16",
    ]
    assert fingerprint(eight).differences(fingerprint(eight_beside_float32)) == [
        f"model: {eight.digest} != {eight_beside_float32.digest}"
    ]


def test_c43_workers_of_which_one_rounds_to_16_bits_refuse_each_other(folder: Path) -> None:
    mixed, wide, narrow = (
        fingerprint(load_on_cpu(folder, dtype=dtype, kv_cache_dtype=kv))
        for dtype, kv in (("float32", "bfloat16"), ("float32", "auto"), ("bfloat16", "auto"))
    )
    assert mixed.differences(wide) == [
        f"model: {wide.model}-float32 != {wide.model}",
        "dtype: bfloat16 != float32",
    ]
    assert mixed.differences(narrow) == [f"model: {narrow.model}-float32 != {narrow.model}"]
    assert fingerprint(load_on_cpu(folder, dtype="bfloat16", kv_cache_dtype="bfloat16")) == narrow


@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), [("bfloat16", "fp8"), BFLOAT16_BESIDE_FLOAT32])
def test_a_block_has_half_the_bytes(folder: Path, dtype: str, kv_cache_dtype: str) -> None:
    shape = load_on_cpu(folder, dtype=dtype, kv_cache_dtype=kv_cache_dtype).kv_block_shape(16)
    plain = load_on_cpu(folder, dtype=dtype).kv_block_shape(16)
    assert 2 * shape.size_bytes == plain.size_bytes
    assert block_array(KVPool(3, shape, CPU)).shape == (3, plain.size_bytes // 2)


def test_where_no_attention_reads_it_it_says_what_is_possible(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype: 'bfloat16' .*; with 'cpu' and 'float16', use 'auto'"
    ):
        load_on_cpu(folder, dtype="float16", kv_cache_dtype="bfloat16")
    monkeypatch.setattr("engine.build.rank_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr("engine.build._begin_on_gpu", lambda _: pytest.fail("began with the GPU"))
    engine = EngineConfig(num_threads=torch.get_num_threads(), device="cuda", kv_cache_dtype="bfloat16")
    unused: Any = None
    config = BatonConfig(model=ModelConfig(dtype="float32"), engine=engine)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: 'bfloat16' .*; with 'cuda' and 'float32'"):
        build_device_engine(config, None, folder, "", SINGLE_RANK, unused, unused, unused)
