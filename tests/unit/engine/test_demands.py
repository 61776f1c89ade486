"""What a configuration may not ask of a model is refused before any worker starts, and only that."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import BatonConfig
from baton.errors import ConfigError, ModelError
from engine.collectives import SilentRank
from engine.loading.footprint import footprint
from engine.loading.loader import load_model
from tests.factories.families import CASES, DEEPSEEK_V3, GPT_OSS
from tests.factories.models import make_model_dir
from tests.factories.quantized_checkpoints import KINDS, make_quantized


def config_of(**sections: dict[str, Any]) -> BatonConfig:
    values: dict[str, Any] = {"model": {"dtype": "float32"}} | sections
    return BatonConfig.from_mapping(values)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": {"tensor_parallel": 3}}, "got 3, which does not divide this model's 4 attention heads"),
        ({"cluster": {"decode_tensor_parallel": 4}}, "got 4, which does not divide this model's 2 KV heads"),
        (
            {"engine": {"device": "cuda"}, "model": {"dtype": "bfloat16", "quantization": "int4"}},
            "model.quantization: 'int4' is only for engine.device 'cpu'",
        ),
    ],
)
def test_what_a_worker_would_refuse_is_refused_before(
    folder: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        footprint(config_of(**sections), folder)


@pytest.mark.parametrize(
    ("architecture", "overrides", "message"),
    [
        ("llama", {"intermediate_size": 129}, "the intermediate size of this model's MLPs, 129"),
        (
            "deepseek_v3",
            DEEPSEEK_V3 | {"intermediate_size": 129},
            "the intermediate size of this model's MLPs, 129",
        ),
        (
            "deepseek_v3",
            DEEPSEEK_V3 | {"moe_intermediate_size": 33},
            "the intermediate size of this model's experts, 33",
        ),
    ],
)
def test_sizes_that_ranks_do_not_divide_are_named(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], message: str
) -> None:
    folder = make_model_dir(tmp_path, architecture, **overrides)
    with pytest.raises(ConfigError, match=rf"tensor_parallel: got 2, which does not divide {message}"):
        footprint(config_of(engine={"tensor_parallel": 2}), folder)


def test_a_size_that_no_layer_has_is_not_asked_for(tmp_path: Path) -> None:
    """An example is Qwen3's `intermediate_size`, if all layers have experts."""
    case = CASES["qwen3 moe"]
    folder = make_model_dir(tmp_path, case.architecture, **case.overrides | {"intermediate_size": 129})
    footprint(config_of(engine={"tensor_parallel": 2}), folder)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"hidden_size": 80, "head_dim": 16}),
        ("llama", {"intermediate_size": 96}),
        ("llama", {"head_dim": 8}),
        ("gpt_oss", GPT_OSS | {"intermediate_size": 96}),
        ("deepseek_v3", DEEPSEEK_V3),
        ("deepseek_v3", DEEPSEEK_V3 | {"v_head_dim": 16, "q_lora_rank": 64, "moe_intermediate_size": 64}),
    ],
    ids=str,
)
def test_parts_that_are_no_whole_groups_are_refused_before_a_worker_would(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], num_ranks: int, quantization: str
) -> None:
    folder = make_model_dir(tmp_path, architecture, **overrides)
    config = config_of(
        model={"dtype": "float32", "quantization": quantization}, engine={"tensor_parallel": num_ranks}
    )
    try:
        load_model(config.model, folder, torch.device("cpu"), collectives=SilentRank(0, num_ranks))
    except ModelError:
        with pytest.raises(ConfigError, match=f"{quantization}' needs whole groups of 32 inputs, but"):
            footprint(config, folder)
    else:
        footprint(config, folder)


def test_groups_of_a_checkpoint_need_no_others(tmp_path: Path) -> None:
    """The kernels' groups of 16 inputs remain where ranks cut those of 64."""
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_key_value_heads": 4,
        "vocab_size": 304,
    }
    quantized, _ = make_quantized(tmp_path, make_model_dir(tmp_path / "m", **sizes), KINDS["gptq, 4 bits"])
    config = config_of(
        model={"dtype": "float32", "quantization": "int4"}, engine={"tensor_parallel": 4, "num_threads": 1}
    )
    footprint(config, quantized)
    load_model(config.model, quantized, torch.device("cpu"), collectives=SilentRank(0, 4))
