"""Scales of keys and values in 8 bits: what the cache holds, what comes of it, and which scales are refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import KVCacheDtype, ModelConfig
from baton.errors import ModelError
from baton.sampling import SamplingParams
from engine.kv_cache import KVPool
from engine.layers.fp8 import FP8, saturate
from engine.layers.paged_attention import TorchStepAttention
from engine.layers.scaled_attention import KVScale
from engine.loading.loader import LoadedModel, load_model
from tests.factories.families import GLM4_MOE, MINIMAX_M2
from tests.factories.models import make_model_dir, set_tensors
from tests.factories.stepping import StepDriver
from tests.factories.threaded_ranks import on_ranks

CPU = torch.device("cpu")
PROMPTS = {"a": [(7 * i) % 300 for i in range(45)], "b": [(11 * i) % 300 for i in range(13)]}
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=1000, logprobs=3)
SCALES = {f"model.layers.{i}.self_attn": KVScale(0.013 * (i + 1), 0.07 / (i + 1)) for i in range(3)}
"""No powers of two, and small enough that a forgotten one shows."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9},
    "olmo2": {},
    "minimax_m2": MINIMAX_M2,
    "glm4_moe": {**GLM4_MOE, "use_qk_norm": True, "attention_bias": True},
}
"""Three norm each head of keys, which would undo a factor, and two norm all heads together. The last two reorder the
norms' weights, since they rotate a part of a head."""


def add_scales(folder: Path, scales: Mapping[str, KVScale] = SCALES) -> None:
    for heads, scale in scales.items():
        each = {"k_scale": torch.tensor([scale.key]), "v_scale": torch.tensor(scale.value)}  # either shape
        set_tensors(folder, {f"{heads}.{kind}": tensor for kind, tensor in each.items()})


def load(
    folder: Path,
    kv_cache_dtype: KVCacheDtype = "fp8",
    dtype: str = "float32",
    **options: Any,
) -> LoadedModel:
    config = ModelConfig.model_validate({"dtype": dtype})
    return load_model(config, folder, CPU, kv_cache_dtype=kv_cache_dtype, **options)


def answers(model: LoadedModel) -> tuple[dict[str, list[int]], torch.Tensor]:
    """Tokens, and log-probabilities of the likeliest ones."""
    driver = StepDriver(model)
    requests = [driver.add(name, prompt, LOGPROBS) for name, prompt in PROMPTS.items()]
    for request in requests:
        driver.step({request.request_id: 10})
        driver.step({request.request_id: len(request.prompt) - 10})
        for _ in range(6):
            driver.step({request.request_id: 1})
    logprobs = [each.logprob for request in requests for each in request.logprobs]
    return {request.request_id: request.outputs for request in requests}, torch.tensor(logprobs)


def by_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loading.loader.native_library", lambda: None)


def scaling_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of floats. Its keys and values are rounded as in 8 bits with scales."""
    plain = TorchStepAttention._store

    def store(self: TorchStepAttention, layer: int, kv_TKD: torch.Tensor) -> torch.Tensor:
        scale, num_heads = SCALES[f"model.layers.{layer}.self_attn"], kv_TKD.shape[1] // 2
        scales = torch.tensor([scale.key] * num_heads + [scale.value] * num_heads).unsqueeze(1)
        return plain(self, layer, saturate(kv_TKD / scales).float() * scales)

    monkeypatch.setattr(TorchStepAttention, "_store", store)
    by_torch_alone(monkeypatch)


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_scaling_in_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kernels: str
) -> None:
    folder = make_model_dir(tmp_path, family, **FAMILIES[family])
    add_scales(folder)
    with monkeypatch.context() as patch:
        if kernels == "torch's":
            by_torch_alone(patch)
        tokens, logprobs = answers(load(folder))
    scaling_in_torch(monkeypatch)
    expected, expected_logprobs = answers(load(folder, "auto"))
    assert tokens == expected
    torch.testing.assert_close(logprobs, expected_logprobs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cache_holds_quotients(tmp_path: Path, dtype: str) -> None:
    """The test compares the first layer, since no attention came before it. In 16 bits, a quotient is first
    rounded once more."""
    folder = make_model_dir(tmp_path)
    rows: list[torch.Tensor] = []
    caches: tuple[KVCacheDtype, KVCacheDtype] = ("auto", "fp8")
    for kv_cache_dtype in caches:
        driver = StepDriver(load(folder, kv_cache_dtype, dtype))
        block_ids = driver.free_blocks[: len(PROMPTS["a"]) // 4]
        driver.generate(PROMPTS, 3)
        rows.append(driver.pool.blocks_NLKHTD[block_ids, 0])
        add_scales(folder)
    scale = SCALES["model.layers.0.self_attn"]
    plain_NKHTD, stored_NKHTD = rows
    assert stored_NKHTD.dtype is FP8
    expected_NKHTD = saturate(
        plain_NKHTD.float() / torch.tensor([scale.key, scale.value]).view(1, 2, 1, 1, 1)
    )
    same = (stored_NKHTD.float() == expected_NKHTD.float()).float().mean().item()
    assert same >= (0.95 if dtype == "bfloat16" else 0.999)


def test_ranks_have_the_scales_of_their_heads(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path, "qwen3", head_dim=16)
    add_scales(folder)
    expected, expected_logprobs = answers(load(folder))
    (tokens, logprobs), _ = on_ranks(2, lambda ranks: answers(load(folder, collectives=ranks)))
    assert tokens == expected
    torch.testing.assert_close(logprobs, expected_logprobs, atol=2e-3, rtol=0)


def test_one_scale_may_stand_for_keys_and_values(tmp_path: Path) -> None:
    both, one = (make_model_dir(tmp_path / name) for name in ("both", "one"))
    add_scales(both, {heads: KVScale(0.02, 0.02) for heads in SCALES})
    set_tensors(one, {f"{heads}.kv_scale": torch.tensor(0.02) for heads in SCALES})
    tokens, logprobs = answers(load(both))
    assert answers(load(one))[0] == tokens
    assert torch.equal(answers(load(one))[1], logprobs)


def test_workers_with_other_scales_refuse_each_others_kv(tmp_path: Path) -> None:
    first, second, plain = (make_model_dir(tmp_path / name) for name in ("first", "second", "plain"))
    add_scales(first)
    other = KVScale(0.5, 0.5)
    add_scales(second, SCALES | {"model.layers.1.self_attn": other})
    for folder in (first, second):
        assert "-kv" in load(folder).digest
        assert "-kv" not in load(folder, "auto").digest
    assert "-kv" not in load(plain).digest
    ours, theirs = (
        KVPool(2, model.kv_block_shape(4), CPU).fingerprint(model.digest)
        for model in (load(first), load(second))
    )
    assert ours.differences(theirs)
    assert load(first).digest.rpartition("-kv")[2] != load(second).digest.rpartition("-kv")[2], (
        "not by files alone"
    )


HEADS = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{HEADS}.k_scale": torch.ones(2)}, r"self_attn\.k_scale has shape \[2\], but only one scale"),
        ({f"{HEADS}.k_scale": torch.zeros(1)}, r"self_attn\.k_scale is 0, but a scale must be positive"),
        ({f"{HEADS}.v_scale": torch.tensor(float("nan"))}, r"self_attn\.v_scale is nan, but"),
        (
            {f"{HEADS}.k_scale": torch.ones(1)},
            r"layers\.1\.self_attn has k_scale; there must be k_scale and v_scale",
        ),
        (
            {f"{HEADS}.k_scale": torch.ones(1), f"{HEADS}.kv_scale": torch.ones(1)},
            r"has k_scale and kv_scale; there must be",
        ),
        (
            {f"{HEADS}.k_proj.k_scale": torch.ones(1)},
            r"tensor model\.layers\.1\.self_attn\.k_proj\.k_scale scales keys or values, but only self_attn\.k_scale",
        ),
    ],
)
def test_other_scales_are_refused_by_name_unless_kv_has_more_bits(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    folder = make_model_dir(tmp_path)
    set_tensors(folder, tensors)
    with pytest.raises(ModelError, match=message):
        load(folder)
    load(folder, "auto")


def test_scales_of_latents_are_refused_by_name_unless_kv_has_more_bits(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path, "deepseek_v3", num_key_value_heads=4)
    add_scales(folder)
    with pytest.raises(
        ModelError, match=r"layers\.0\.self_attn has scales, .* heads share a latent; set engine\.kv"
    ):
        load(folder)
    load(folder, "auto")


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"num_bits": 8, "type": "int"}, r"kv_cache_scheme\.type 'int' is not supported; supported: 'float'"),
        ({"strategy": "channel"}, r"kv_cache_scheme\.strategy 'channel' is not supported"),
        ({"dynamic": True}, r"kv_cache_scheme\.dynamic True is not supported"),
        ({"zeros": 1}, r"kv_cache_scheme\.zeros is not supported"),
        ("fp8", r"kv_cache_scheme must be an object or 'static', got 'fp8'"),
    ],
)
def test_other_schemes_of_kv_are_refused_by_key_unless_kv_has_more_bits(
    tmp_path: Path, scheme: object, message: str
) -> None:
    folder = make_model_dir(tmp_path)
    write_scheme(folder, scheme)
    with pytest.raises(ModelError, match=message) as raised:
        load(folder)
    assert str(raised.value).startswith(f"{folder / 'config.json'}: ")
    assert str(raised.value).endswith("; set engine.kv_cache_dtype to 'auto', which needs no scales")
    load(folder, "auto")


def test_static_is_a_name_of_one_scale_for_each_layer(tmp_path: Path) -> None:
    """AMD and Tencent write this name."""
    folder = make_model_dir(tmp_path)
    add_scales(folder)
    plain = load(folder).digest
    write_scheme(folder, "static")
    assert load(folder).digest.rpartition("-")[2] == plain.rpartition("-")[2]


def test_a_checkpoint_may_have_scales_for_kv_alone(tmp_path: Path) -> None:
    """llm-compressor writes such a checkpoint if only KV was calibrated."""
    folder, plain = make_model_dir(tmp_path / "scheme"), make_model_dir(tmp_path / "plain")
    for each in (folder, plain):
        add_scales(each)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    write_scheme(folder, scheme | {"observer": "minmax", "group_size": None})
    tokens, logprobs = answers(load(folder))
    assert answers(load(plain))[0] == tokens
    assert torch.equal(answers(load(plain))[1], logprobs)


def write_scheme(folder: Path, scheme: object) -> None:
    file = folder / "config.json"
    quantization = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
