"""Ranks that hold whole experts: what each reads, that the tokens are those of one rank, and what is refused."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.config import BatonConfig, ModelConfig
from baton.errors import ConfigError, ModelError
from engine.collectives import Collectives, SilentRank
from engine.loading.footprint import footprint
from engine.loading.loader import LoadedModel, load_model, takes_of
from engine.loading.quantized_checkpoint import QuantizedCheckpoint
from engine.loading.streamed_weights import StreamedWeights
from engine.loading.weights import CheckpointWeights, Take
from engine.mixture_config import Mixture
from engine.model_config import read_architecture
from engine.native.library import native_library
from engine.quantization_config import read_quantization
from tests.factories.families import DEEPSEEK_V3, GPT_OSS
from tests.factories.host_copies import HostCopies
from tests.factories.models import make_model_dir, set_tensors
from tests.factories.quantized_checkpoints import KINDS, make_mxfp4, make_quantized
from tests.factories.stepping import StepDriver
from tests.factories.threaded_ranks import on_ranks

CPU = torch.device("cpu")
PROMPTS = {f"r{length}": [(7 * i + length) % 290 + 3 for i in range(length)] for length in (1, 4, 21)}
MIXTRAL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_local_experts": 5,
}
"""Two ranks have 2 and 3 experts."""
ODD = MIXTRAL | {"intermediate_size": 33}
"""No number of ranks divides an expert's columns into groups, and two ranks not at all."""
OSS = GPT_OSS | {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}
"""Half an expert of 160 columns is no whole number of MXFP4's blocks of 32."""
needs_kernels = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")


def mixtral(path: Path) -> Path:
    return make_model_dir(path / "m", "mixtral", **MIXTRAL)


def gpt_oss(path: Path) -> Path:
    return make_model_dir(path / "m", "gpt_oss", **OSS)


def mxfp4(path: Path) -> Path:
    return make_mxfp4(path / "quantized", gpt_oss(path))[0]


def deepseek(path: Path) -> Path:
    return make_model_dir(path / "m", "deepseek_v3", **DEEPSEEK_V3)


def quantized(kind: str, make: Callable[[Path], Path] = mixtral) -> Callable[[Path], Path]:
    """Routers stay numbers."""

    def is_ignored(name: str) -> bool:
        return name.endswith((".gate", "lm_head"))

    return lambda path: make_quantized(path / "quantized", make(path), KINDS[kind], is_ignored)[0]


FORMS: dict[str, Callable[[Path], Path]] = {
    "a tensor for each matrix": mixtral,
    "one tensor for all experts": gpt_oss,
    "MXFP4": mxfp4,
    "fp8, block scales": quantized("fp8 by block", deepseek),
    "gptq": quantized("gptq, 4 bits"),
    "awq": quantized("awq"),
    "int4, compressed-tensors": quantized("int4, groups of 32"),
    "int8, compressed-tensors": quantized("int8 by channel"),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model in this form. Read-only: tests share the folder."""
    return cache(lambda form: FORMS[form](tmp_path_factory.mktemp("form")))


def load(path: Path, collectives: Collectives | None = None, **config: str) -> LoadedModel:
    """Loads the whole model without `collectives`, otherwise a rank's part."""
    asked = ModelConfig.model_validate({"dtype": "float32", **config})
    if collectives is None:
        return load_model(asked, path, CPU)
    return load_model(asked, path, CPU, collectives=collectives, expert_parallel=True)


def tokens(model: LoadedModel) -> dict[str, list[int]]:
    return StepDriver(model).generate(PROMPTS, 8, chunk=7)


def check_tokens(path: Path, num_ranks: int = 2, **config: str) -> None:
    def on_rank(collectives: Collectives) -> dict[str, list[int]]:
        return tokens(load(path, collectives, **config))

    assert on_ranks(num_ranks, on_rank) == [tokens(load(path, None, **config))] * num_ranks


@pytest.mark.parametrize("num_experts", range(1, 12))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_every_expert_is_on_one_rank(num_experts: int, num_ranks: int) -> None:
    mixture = Mixture(num_experts=num_experts, num_chosen=1, intermediate_size=8, is_normalized=True)
    shares = [mixture.experts_on(rank, num_ranks) for rank in range(num_ranks)]
    assert [expert for share in shares for expert in share] == list(range(num_experts))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_of_one_rank(folder_of: Callable[[str], Path], form: str) -> None:
    """This holds for every form of a checkpoint, if its weights become numbers."""
    check_tokens(folder_of(form), quantization="none")


@needs_kernels
@pytest.mark.parametrize("form", ["MXFP4", "gptq", "awq", "int8, compressed-tensors"])
def test_experts_stay_in_their_bits(folder_of: Callable[[str], Path], form: str) -> None:
    check_tokens(folder_of(form))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("make", [mixtral, gpt_oss], ids=["mixtral", "gpt-oss"])
def test_experts_are_quantized_while_loading(
    tmp_path: Path, make: Callable[[Path], Path], quantization: str
) -> None:
    """`fp8` rounds a rank's part of other matrices by other scales than the whole; see test_mixture.py."""
    check_tokens(make(tmp_path), quantization=quantization)


def test_dummy_weights_are_shared_alike(tmp_path: Path) -> None:
    check_tokens(mixtral(tmp_path), load_format="dummy")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_need_not_divide_an_expert(tmp_path: Path, num_ranks: int) -> None:
    """Four ranks have 1, 1, 1 and 2 experts."""
    path = make_model_dir(tmp_path / "m", "mixtral", **ODD | {"num_key_value_heads": 4})
    check_tokens(path, num_ranks)
    whole = (
        r"does not divide the intermediate size of this model's experts, 33; .*engine\.enable_expert_parallel"
    )
    with pytest.raises(ConfigError, match=whole):
        load_model(ModelConfig(dtype="float32"), path, CPU, collectives=SilentRank(0, num_ranks))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_reads_only_its_experts(folder_of: Callable[[str], Path], form: str, streams: bool) -> None:
    """This holds if files are mapped, and if they are streamed as for a GPU. All ranks together read each
    expert once, to the byte."""
    path = folder_of(form)
    architecture = read_architecture(path)
    mixture = architecture.mixtures[-1]
    assert mixture is not None
    whole = takes_of(architecture)
    shares = [takes_of(architecture, SilentRank(rank, 2), expert_parallel=True) for rank in range(2)]
    for rank, takes in enumerate(shares):
        here = mixture.experts_on(rank, 2)
        found = {int(take.name.split(".experts.")[1].split(".")[0]) for take in experts_among(takes)}
        assert found == set(here)
        assert all(take.shard is None for take in experts_among(takes))
    read = [bytes_read(path, experts_among(takes), streams=streams) for takes in shares]
    assert sum(read) == bytes_read(path, experts_among(whole), streams=streams)
    assert read[0] / sum(read) == pytest.approx(mixture.num_experts // 2 / mixture.num_experts)


def experts_among(takes: list[Take]) -> list[Take]:
    return [take for take in takes if ".experts." in take.name]


def bytes_read(path: Path, takes: list[Take], *, streams: bool) -> int:
    """The bytes that the source itself reads for these takes."""
    seen = [0]

    def on_progress(done: int, _: int) -> None:
        seen[0] = done

    quantization = read_quantization(json.loads((path / "config.json").read_text()))

    def open_stored(parts: Any) -> Any:
        if streams:
            return StreamedWeights(path, None, parts, HostCopies(), on_progress)
        return CheckpointWeights(path, None, parts, on_progress)

    if quantization is None:
        source: Any = open_stored(takes)
    else:
        source = QuantizedCheckpoint(
            path, quantization, torch.float32, takes, open_stored, keeps_groups=False, keeps_fp8=False
        )
    with source as weights:
        for take in takes:
            is_matrix = quantization is not None and len(take.shape) == 2
            get = weights.take_matrix if is_matrix else weights.take_tensor
            assert get(take.name, *take.shape, shard=take.shard).shape == take.shape
    return seen[0]


@pytest.mark.parametrize("form", ["a tensor for each matrix", "one tensor for all experts", "awq"])
def test_tensors_of_no_rank_are_still_named(tmp_path: Path, form: str) -> None:
    """A missing tensor is named, too, by the rank that needs it."""
    path = FORMS[form](tmp_path)
    tensors = load_file(path / "model.safetensors")
    if form == "one tensor for all experts":
        name = added = "model.layers.0.mlp.experts.down_proj_bias"
        extra = torch.cat((tensors[name], tensors[name][:1]))
    else:
        name = next(name for name in tensors if ".experts.0.w2." in name)
        added, extra = name.replace(".experts.0.", ".experts.7."), tensors[name]
    set_tensors(path, {added: extra})
    for rank in range(2):
        with pytest.raises(ModelError, match=r"1 tensors do not belong .*\.experts\.[67]\."):
            load(path, SilentRank(rank, 2))
    set_tensors(path, dict.fromkeys((added, name)))
    with pytest.raises(ModelError, match=r"experts\.0\..* is missing"):
        load(path, SilentRank(0, 2))


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v3"])
def test_a_model_without_experts_is_refused(tmp_path: Path, architecture: str) -> None:
    """The second model has experts in none of its layers."""
    overrides = DEEPSEEK_V3 | {"first_k_dense_replace": 3} if architecture == "deepseek_v3" else {}
    path = make_model_dir(tmp_path / "m", architecture, **overrides)
    message = (
        r"engine\.enable_expert_parallel or cluster\.\*_enable_expert_parallel: got true, but this model has no "
        rf"experts \(model_type '{architecture}'\); remove the key"
    )
    with pytest.raises(ConfigError, match=message):
        load(path, SilentRank(0, 2))
    with pytest.raises(ConfigError, match=message):
        footprint(config_of(), path)


def test_more_ranks_than_experts_are_refused_with_the_numbers(tmp_path: Path) -> None:
    path = make_model_dir(
        tmp_path / "m", "mixtral", **MIXTRAL | {"num_local_experts": 3, "num_key_value_heads": 4}
    )
    with pytest.raises(ConfigError, match=r"got true, but 4 ranks are more than this model's 3 experts"):
        load(path, SilentRank(0, 4))
    with pytest.raises(ConfigError, match=r"got true, but 4 ranks are more than this model's 3 experts"):
        footprint(config_of(num_ranks=4), path)


def config_of(num_ranks: int = 2, **engine: Any) -> BatonConfig:
    values = {"tensor_parallel": num_ranks, "enable_expert_parallel": True, **engine}
    return BatonConfig.from_mapping({"model": {"dtype": "float32"}, "engine": values})
