"""Which tensors of a DeepSeek checkpoint are loaded, and in how many bits; and models that devices refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import ModelConfig
from baton.errors import ConfigError, ModelError
from engine.collectives import SINGLE_RANK, Collectives, SilentRank
from engine.loading.loader import load_model, takes_of
from engine.loading.streamed_weights import StreamedWeights
from engine.loading.weights import CheckpointWeights, Take, WeightSource
from engine.model_config import read_architecture
from tests.factories.families import CASES
from tests.factories.host_copies import HostCopies
from tests.factories.models import make_model_dir, set_tensors
from tests.factories.quantized_checkpoints import KINDS, make_quantized
from tests.factories.stepping import StepDriver
from tests.factories.threaded_ranks import on_ranks

CPU = torch.device("cpu")
FLOAT32 = ModelConfig(dtype="float32")
PROMPT = [(13 * i) % 290 + 3 for i in range(30)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "m", "deepseek_v3", **CASES["deepseek v3"].overrides)


PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""As DeepSeek-V3's config.json is published, without versions of libraries."""


def test_the_published_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    a = read_architecture(tmp_path)
    assert (a.num_heads, a.num_kv_heads, a.head_dim, a.kv_numbers(), a.kv_numbers(8)) == (
        *(128, 1, 576),
        *(576, 8 * 576),
    )
    assert [mixture is None for mixture in a.mixtures[:4]] == [True, True, True, False]
    *_, mixture = a.mixtures
    assert mixture is not None
    assert (mixture.num_groups, mixture.num_chosen_groups, mixture.shared_size) == (8, 4, 2048)
    assert a.unread_tensors == ("model.layers.61.",)
    takes = {take.name: take.shape for take in takes_of(a, SilentRank(0, 8))}
    assert takes["model.layers.60.self_attn.kv_b_proj.weight"] == (128 * 256, 512)
    assert takes["model.layers.60.self_attn.q_b_proj.weight"] == (128 * 192, 1536)
    assert takes["model.layers.60.mlp.gate.e_score_correction_bias"] == (256,)
    assert takes["model.layers.60.mlp.shared_experts.down_proj.weight"] == (7168, 2048)
    assert "model.layers.2.mlp.down_proj.weight" in takes
    assert len(takes) == 2 + 1 + 61 * 9 + 3 * 3 + 58 * (2 + 3 + 3 * 256)


def tokens(
    folder: Path, dtype: str = "float32", collectives: Collectives = SINGLE_RANK, **config: str
) -> list[int]:
    model = load_model(
        ModelConfig.model_validate({"dtype": dtype, **config}), folder, CPU, collectives=collectives
    )
    return StepDriver(model).generate({"a": PROMPT}, 8)["a"]


def test_layers_that_guess_further_tokens_are_not_loaded(folder: Path) -> None:
    """config.json says that there is one, behind the three others."""
    expected = tokens(folder)
    set_tensors(folder, {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)})
    assert tokens(folder) == expected
    set_tensors(folder, {"model.layers.4.eh_proj.weight": torch.zeros(64, 128)})
    with pytest.raises(ModelError, match=r"do not belong to the architecture .*model\.layers\.4\.eh_proj"):
        tokens(folder)


def test_the_bias_of_the_choice_is_not_rounded(folder: Path) -> None:
    """Biases of published models differ by less than a unit of bfloat16."""
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    base = torch.full((8,), 9.0)
    nudged = base + torch.tensor([0.03, -0.03]).repeat(4)
    assert torch.equal(nudged.bfloat16(), base.bfloat16())
    found = []
    for bias in (base, nudged):
        set_tensors(folder, {name.format(layer): bias.clone() for layer in (1, 2)})
        found.append(tokens(folder, "bfloat16"))
    assert found[0] != found[1]


@pytest.mark.parametrize("streams", [False, True])
def test_float32_is_taken_as_it_is_stored(folder: Path, streams: bool) -> None:
    name, exact = "model.layers.1.mlp.gate.e_score_correction_bias", torch.arange(8) / 3
    set_tensors(folder, {name: exact})
    takes = [Take(name, (8,), None)] * 2
    opened: Any = (
        StreamedWeights(folder, torch.bfloat16, takes, HostCopies())
        if streams
        else CheckpointWeights(folder, torch.bfloat16)
    )
    with opened as weights:
        source: WeightSource = weights
        assert torch.equal(source.take_float32(name, 8), exact)
        assert torch.equal(source.take_tensor(name, 8), exact.bfloat16())


def test_ranks_divide_heads_and_share_the_latent(folder: Path) -> None:
    shape = load_model(FLOAT32, folder, CPU, collectives=SilentRank(1, 4)).kv_block_shape(16)
    assert (shape.num_planes, shape.num_kv_heads, shape.head_dim) == (1, 1, 32)
    with pytest.raises(ConfigError, match="got 3, which does not divide this model's 4 attention heads"):
        load_model(FLOAT32, folder, CPU, collectives=SilentRank(0, 3))


@pytest.mark.parametrize(("key", "value"), [("kv_lora_rank", 520), ("qk_rope_head_dim", 72)])
def test_latents_too_long_for_a_gpu_are_refused_before_anything_is_loaded(
    folder: Path, key: str, value: int
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    (folder / "model.safetensors").unlink()
    limits = "kv_lora_rank up to 512 and qk_rope_head_dim up to 64"
    with pytest.raises(ModelError, match=f"{limits}; this model has .*{value}"):
        load_model(FLOAT32, folder, torch.device("cuda", 0))


@pytest.mark.parametrize("name", ["fp8 by block", "fp8 by channel", "awq", "int8 by channel"])
def test_latents_are_projected_by_numbers(tmp_path: Path, name: str) -> None:
    """The matrix from latents to heads always becomes numbers. For example, DeepSeek-V3 is published in
    blocks of fp8."""
    latents = {
        **CASES["deepseek v3"].overrides,
        "kv_lora_rank": 128,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 16,
    }
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "v_head_dim": 32}
    source = make_model_dir(tmp_path / "m", "deepseek_v3", **latents | sizes)
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name])
    expected = tokens(numbers)
    assert tokens(quantized, quantization="none") == expected
    assert len(tokens(quantized)) == 8

    def on_rank(collectives: Collectives) -> list[int]:
        return tokens(quantized, collectives=collectives, quantization="none")

    assert on_ranks(2, on_rank) == [expected, expected]
