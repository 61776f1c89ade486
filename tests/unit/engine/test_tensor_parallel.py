"""A model that ranks share gives the tokens of the whole one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import ModelConfig
from baton.errors import ConfigError
from baton.request import TokenLogprobs
from baton.sampling import MAX_LOGPROBS, SamplingParams
from engine.collectives import Collectives, SilentRank
from engine.loading.loader import load_model
from tests.factories.models import make_model_dir
from tests.factories.quantized_checkpoints import KINDS, Kind, compressed_tensors, make_quantized
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


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("quantization", ["none", "int8", "fp8"])
def test_ranks_need_not_divide_the_vocabulary(
    tmp_path: Path, num_ranks: int, is_tied: bool, quantization: str
) -> None:
    """For example, Granite 3 has 49,155 tokens. `fp8` rounds in each rank's own part."""
    path = make_model_dir(
        tmp_path / "model",
        "granite",
        num_attention_heads=8,
        num_key_value_heads=4,
        hidden_size=128,
        vocab_size=303,
        tie_word_embeddings=is_tied,
    )
    config = FLOAT32.with_values("model", quantization=quantization)
    ranks = tokens_of_ranks(path, num_ranks, config)
    assert ranks == [ranks[0]] * num_ranks
    if quantization != "fp8":
        alone = StepDriver(load_model(config, path, CPU)).generate(PROMPTS, 10, chunk=7, params=SAMPLED)
        assert ranks[0] == alone


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_nor_where_the_projection_to_logits_is_quantized(tmp_path: Path, quantization: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 303}
    kind = KINDS["int4, groups of 64, asymmetric"]
    weights = dict(kind.config["config_groups"]["group_0"]["weights"])
    config = compressed_tensors("pack-quantized", **weights) | {"ignore": []}
    source = make_model_dir(tmp_path / "model", **sizes)
    path, _ = make_quantized(tmp_path, source, Kind(config, kind.write), lambda _: False)
    model = FLOAT32.with_values("model", quantization=quantization)
    alone = StepDriver(load_model(model, path, CPU)).generate(PROMPTS, 10, chunk=7, params=SAMPLED)
    assert tokens_of_ranks(path, 2, model) == [alone, alone]


def test_ranks_look_up_and_sample_the_last_tokens(tmp_path: Path) -> None:
    """The last of 303 tokens is in a smaller part, beside numbers that are no logits."""
    path = make_model_dir(tmp_path / "model", vocab_size=303)
    prompts = {"a": [302, 301, 300, 0, 151, 152, 302]}

    def logprobs(collectives: Collectives) -> list[tuple[int, float]]:
        driver = StepDriver(load_model(FLOAT32, path, CPU, collectives=collectives))
        request = driver.add(
            "a", prompts["a"], SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS)
        )
        driver.step({"a": len(prompts["a"])})
        return sorted(request.logprobs[0].top) if collectives.rank == 0 else []

    (alone,), (shared, _) = on_ranks(1, logprobs), on_ranks(2, logprobs)
    assert [token for token, _ in shared] == [token for token, _ in alone]
    assert [value for _, value in shared] == pytest.approx([value for _, value in alone], abs=1e-4)


def test_ranks_that_only_help_with_prompt_logprobs_make_the_same_collective_calls(tmp_path: Path) -> None:
    """This holds in steps that sample, and in steps that do not. The vocabulary's parts differ in size."""
    path = make_model_dir(tmp_path / "model", vocab_size=303)
    wants, prompt = (
        SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2),
        [302, 301, *range(100, 128)],
    )

    def prompt_logprobs(collectives: Collectives) -> list[TokenLogprobs]:
        driver = StepDriver(load_model(FLOAT32, path, CPU, collectives=collectives))
        driver.add("a", prompt, wants)
        outputs = [driver.step({"a": num_tokens}) for num_tokens in (1, 9, 20, 1)]
        return [
            each
            for output in outputs
            for of_request in output.prompt_logprobs.values()
            for each in of_request.logprobs
        ]

    (alone,), (shared, _) = on_ranks(1, prompt_logprobs), on_ranks(2, prompt_logprobs)
    assert [each.token_id for each in shared] == prompt[1:]
    assert [each.rank for each in shared] == [each.rank for each in alone]
    assert [each.logprob for each in shared] == pytest.approx([each.logprob for each in alone], abs=1e-4)


def test_a_vocabulary_must_be_enough_for_all_ranks(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model", vocab_size=5, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(ConfigError, match="got 4, but this model's vocabulary of 5 tokens is too small"):
        load_model(FLOAT32, path, CPU, collectives=SilentRank(0, 4))


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
    with pytest.raises(
        ConfigError, match="got 2, which does not divide the intermediate size of this model's MLPs"
    ):
        on_ranks(2, lambda ranks: load_model(FLOAT32, path, CPU, collectives=ranks))
