"""What the configuration says for one role: its ranks' experts, its steps and its threads."""

from typing import Any

import pytest

from baton.config import BatonConfig
from baton.errors import ConfigError
from baton.worker import WorkerRole


def test_each_role_may_have_whole_experts_on_its_ranks() -> None:
    def of_roles(engine: dict[str, Any], **cluster: Any) -> list[bool]:
        config = BatonConfig.from_mapping({"engine": engine, "cluster": cluster})
        found = [config.has_expert_parallel(role) for role in WorkerRole]
        assert [config.for_worker(role).engine.enable_expert_parallel for role in WorkerRole] == found
        return found

    both, ranks = {"tensor_parallel": 2, "enable_expert_parallel": True}, {"tensor_parallel": 2}
    assert of_roles(ranks) == [False, False]
    assert of_roles(both) == [True, True]
    assert of_roles(both, prefill_enable_expert_parallel=False) == [False, True]
    assert of_roles(both, decode_tensor_parallel=1) == [True, False]  # one rank has all experts
    assert of_roles(ranks, decode_enable_expert_parallel=True) == [False, True]


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"engine": {"enable_expert_parallel": True}}, "engine.enable_expert_parallel"),
        (
            {"cluster": {"prefill_enable_expert_parallel": True, "decode_tensor_parallel": 2}},
            "cluster.prefill_enable_expert_parallel",
        ),
    ],
    ids=str,
)
def test_experts_are_not_divided_among_one_rank(values: dict[str, Any], key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"{key} \(true\) divides experts .* raise engine\.tensor_parallel"
    ):
        BatonConfig.from_mapping(values)


def test_each_role_may_have_steps_of_its_own_size() -> None:
    def of_roles(**cluster: int) -> list[int]:
        values = {"scheduler": {"max_num_batched_tokens": 200}, "cluster": cluster}
        config = BatonConfig.from_mapping(values)
        return [config.for_worker(role).scheduler.max_num_batched_tokens for role in WorkerRole]

    assert of_roles() == [200, 200]
    assert of_roles(prefill_max_num_batched_tokens=512) == [512, 200]
    assert of_roles(decode_max_num_batched_tokens=64) == [200, 64]
    unset = BatonConfig.from_mapping({"cluster": {"prefill_max_num_batched_tokens": 512}})
    is_set = [
        "max_num_batched_tokens" in unset.for_worker(role).scheduler.model_fields_set for role in WorkerRole
    ]
    assert is_set == [True, False]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"speculation": {"method": "ngram"}},
            r"\(3\) leaves no room for the drafts of speculation.method 'ngram'",
        ),
        (
            {"scheduler": {"enable_chunked_prefill": False, "max_model_len": 100}},
            r"\(3\) must be at least scheduler.max_model_len \(100\) when scheduler.enable_chunked_prefill is false",
        ),
    ],
    ids=["drafts", "whole prompts"],
)
@pytest.mark.parametrize("role", WorkerRole)
def test_steps_of_a_role_that_are_too_small(values: dict[str, Any], complaint: str, role: WorkerRole) -> None:
    key = f"{role.value}_max_num_batched_tokens"
    with pytest.raises(ConfigError, match=rf"cluster\.{key} {complaint}"):
        BatonConfig.from_mapping(values | {"cluster": {key: 3}})


@pytest.mark.parametrize("key", ["prefill_num_threads", "decode_num_threads"])
def test_threads_of_a_role_are_for_cpus_only(key: str) -> None:
    values: dict[str, Any] = {"cluster": {key: 2}}
    assert BatonConfig.from_mapping(values).num_threads(WorkerRole(key.partition("_")[0])) == 2
    with pytest.raises(
        ConfigError, match=rf"cluster\.{key} is only for engine\.device 'cpu'; remove the key"
    ):
        BatonConfig.from_mapping(values | {"engine": {"device": "cuda"}})
