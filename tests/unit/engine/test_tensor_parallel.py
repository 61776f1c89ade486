"""A model that ranks share gives the tokens of the whole one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import ModelConfig
from baton.errors import ConfigError, ModelError
from baton.sampling import SamplingParams
from engine.collectives import Collectives
from engine.loading.loader import load_model
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver
from tests.factories.threaded_ranks import on_ranks

CPU = torch.device("cpu")
PROMPTS = {f"r{length}": [(7 * i + length) % 300 for i in range(length)] for length in (1, 4, 9, 30)}
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, repetition_penalty=1.1, max_tokens=100)
FLOAT32 = ModelConfig(dtype="float32")


def tokens_of_ranks(path: Path, size: int, config: ModelConfig = FLOAT32) -> list[dict[str, list[int]]]:
    def run(collectives: Collectives) -> dict[str, list[int]]:
        model = load_model(config, path, CPU, collectives=collectives)
        driver = StepDriver(model)
        return driver.generate(PROMPTS, 10, chunk=7, params=SAMPLED)

    return on_ranks(size, run)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 7}),
    ],
    ids=str,
)
def test_two_ranks_give_the_tokens_of_one(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    path = make_model_dir(tmp_path / "model", architecture, **overrides)
    alone = StepDriver(load_model(FLOAT32, path, CPU)).generate(PROMPTS, 10, chunk=7, params=SAMPLED)
    assert tokens_of_ranks(path, 2) == [alone, alone]


def test_four_ranks_of_one_kv_head_each(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model", num_attention_heads=8, num_key_value_heads=4)
    alone = StepDriver(load_model(FLOAT32, path, CPU)).generate(PROMPTS, 10, chunk=7, params=SAMPLED)
    assert tokens_of_ranks(path, 4) == [alone] * 4


def test_dummy_weights_are_shared_alike(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model")
    config = ModelConfig(dtype="float32", load_format="dummy")
    alone = StepDriver(load_model(config, path, CPU)).generate(PROMPTS, 10, chunk=7, params=SAMPLED)
    assert tokens_of_ranks(path, 2, config) == [alone, alone]


def test_a_rank_has_its_share_of_the_kv_heads(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model")
    whole = load_model(FLOAT32, path, CPU)
    shares = on_ranks(2, lambda ranks: load_model(FLOAT32, path, CPU, collectives=ranks))
    assert [share.kv_block_shape(16).num_kv_heads for share in shares] == [1, 1]
    assert whole.kv_block_shape(16).num_kv_heads == 2
    assert {share.digest for share in shares} == {whole.digest}


def test_heads_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"tensor_parallel: got 4, which does not divide this model's 2 KV heads"
    ):
        on_ranks(4, lambda ranks: load_model(FLOAT32, path, CPU, collectives=ranks))


def test_so_is_any_other_size(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model", intermediate_size=129)
    with pytest.raises(ModelError, match="129 cannot be divided among 2 ranks"):
        on_ranks(2, lambda ranks: load_model(FLOAT32, path, CPU, collectives=ranks))
