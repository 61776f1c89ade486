"""The estimated memory of a model, compared with what the engine allocates; and models that do not fit."""

import json
from math import prod
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from baton.config import BatonConfig
from baton.errors import ModelError
from engine.capacity import rank_capacity
from engine.collectives import SilentRank
from engine.draft_parts import load_draft
from engine.layers.grouped_weight import GroupedWeight
from engine.loading import footprint as module
from engine.loading.footprint import BITS_KEPT, check_room, footprint
from engine.loading.gguf import GgufType
from engine.loading.gguf_blocks import FLOATS, matrix_of
from engine.loading.gguf_folder import describe
from engine.loading.loader import load_model, takes_of
from engine.model_config import read_architecture
from engine.native.compilers import may_have_kernels
from engine.native.instructions import machine_instructions
from engine.native.library import native_library
from engine.native.products import Products
from tests.factories.families import CASES, GLM4_MOE, GPT_OSS
from tests.factories.gguf_files import make_gguf
from tests.factories.models import make_model_dir, set_tensors
from tests.factories.quantized_checkpoints import KINDS, make_mxfp4, make_quantized

CPU = torch.device("cpu")


def config_of(**sections: dict[str, Any]) -> BatonConfig:
    values: dict[str, Any] = {"model": {"dtype": "float32"}} | sections
    return BatonConfig.from_mapping(values)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"dtype": "bfloat16"}},
        {"engine": {"kv_cache_memory_mib": 3}},
        {"engine": {"kv_cache_memory_mib": 3, "kv_cache_dtype": "bfloat16"}, "scheduler": {"block_size": 7}},
        {"engine": {"kv_cache_dtype": "fp8"}, "scheduler": {"num_blocks": 12}},
    ],
    ids=str,
)
def test_the_pool_is_the_engines(folder: Path, sections: dict[str, Any]) -> None:
    config = config_of(**sections)
    model = load_model(config.model, folder, CPU, kv_cache_dtype=config.engine.kv_cache_dtype)
    scheduler = rank_capacity(config.engine, config.scheduler, model).scheduler_config
    takes = footprint(config, folder)
    assert scheduler.num_blocks is not None
    assert (
        takes.kv_bytes_per_token * scheduler.block_size
        == model.kv_block_shape(scheduler.block_size).size_bytes
    )
    assert takes.num_kv_tokens == (scheduler.num_blocks - 1) * scheduler.block_size


@pytest.mark.parametrize("sections", [{}, {"scheduler": {"num_blocks": 12, "block_size": 8}}], ids=str)
def test_layers_with_a_window_have_blocks_of_their_own(tmp_path: Path, sections: dict[str, Any]) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 20, "layer_types": kinds}
    folder, config = make_model_dir(tmp_path / "m", "qwen2", **options), config_of(**sections)
    model = load_model(config.model, folder, CPU)
    scheduler = rank_capacity(config.engine, config.scheduler, model).scheduler_config
    takes = footprint(config, folder)
    assert scheduler.num_blocks is not None
    assert takes.kv_pool_bytes is not None
    block = model.kv_block_shape(scheduler.block_size)
    assert takes.kv_pool_bytes // block.size_bytes == scheduler.num_blocks
    assert takes.kv_bytes_per_token * scheduler.block_size == 3 * block.size_bytes
    assert takes.num_kv_tokens == (scheduler.num_blocks - 1) // 3 * scheduler.block_size
    assert f"hold at least {takes.num_kv_tokens:,} tokens" in str(takes)
    with_blocks = {"scheduler": {"block_size": 16}} | sections
    on_cpu, on_gpu = (
        footprint(config_of(**with_blocks, engine={"device": device, "kv_cache_memory_mib": 2}), folder)
        for device in ("cpu", "cuda")
    )
    assert on_gpu == on_cpu


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_rank_has_all_latents(tmp_path: Path, num_ranks: int) -> None:
    """So more ranks make no room for more tokens."""
    case = CASES["deepseek v3"]
    folder = make_model_dir(tmp_path / "m", case.architecture, **case.overrides)
    config = config_of(engine={"kv_cache_memory_mib": 3, "tensor_parallel": num_ranks})
    model = load_model(config.model, folder, CPU, collectives=SilentRank(0, num_ranks))
    scheduler = rank_capacity(config.engine, config.scheduler, model).scheduler_config
    takes = footprint(config, folder)
    assert scheduler.num_blocks is not None
    block_bytes = model.kv_block_shape(scheduler.block_size).size_bytes
    assert takes.kv_bytes_per_token * scheduler.block_size == num_ranks * block_bytes
    assert takes.kv_bytes_per_token == num_ranks * 3 * (24 + 8) * 4
    assert takes.num_kv_tokens == (scheduler.num_blocks - 1) * scheduler.block_size


@pytest.mark.parametrize("num_experts", [4, 5])
def test_the_fullest_rank_has_the_most_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_experts: int
) -> None:
    """The estimate is within 1 % of what that rank takes. Routers and norms are on every rank."""
    folder = make_model_dir(tmp_path / "m", "mixtral", num_local_experts=num_experts, intermediate_size=512)
    values = {"tensor_parallel": 2, "enable_expert_parallel": True}
    takes = footprint(config_of(engine=values), folder)
    architecture = read_architecture(folder)
    ranks = [takes_of(architecture, SilentRank(rank, 2), expert_parallel=True) for rank in range(2)]
    sizes = [4 * sum(prod(take.part_shape) for take in each) for each in ranks]
    assert takes.fullest_rank_bytes is not None
    assert takes.fullest_rank_bytes == pytest.approx(max(sizes), rel=0.01)
    assert f"MiB of weights, at most {takes.fullest_rank_bytes / 2**20:,.0f} MiB on a rank" in str(takes)
    assert footprint(config_of(engine={"tensor_parallel": 2}), folder).fullest_rank_bytes is None

    on_gpus = config_of(engine=values | {"device": "cuda"})
    monkeypatch.setattr(module, "gpu_memory", lambda: int(takes.weight_bytes * 0.5 / 0.9) + 2**17)
    if num_experts == 4:
        check_room(footprint(on_gpus, folder), on_gpus)
    else:  # half of the weights fit, and three of five experts do not
        with pytest.raises(ModelError, match=r"MiB of weights on a rank, and 1 GPU of .* has room for"):
            check_room(footprint(on_gpus, folder), on_gpus)


def test_layers_that_guess_do_not_count(tmp_path: Path) -> None:
    case = CASES["deepseek v3"]
    folder = make_model_dir(tmp_path / "m", case.architecture, **case.overrides)
    plain = footprint(config_of(), folder)
    set_tensors(folder, {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)})
    assert footprint(config_of(), folder).weights == plain.weights
    assert footprint(config_of(engine={"device": "cuda"}), folder).weights == plain.weights


@pytest.mark.parametrize("scheduler", [{}, {"num_blocks": 12, "block_size": 2, "max_num_seqs": 3}], ids=str)
def test_a_draft_models_weights_and_kv_count(tmp_path: Path, folder: Path, scheduler: dict[str, Any]) -> None:
    small = make_model_dir(tmp_path / "small", num_hidden_layers=1)
    config = config_of(
        speculation={"method": "draft_model", "draft_model": str(small), "draft_quantization": "int8"},
        scheduler=scheduler,
    )
    model = load_model(config.model, folder, CPU)
    draft = load_draft(config, folder, model)
    assert draft is not None
    takes, alone = footprint(config, folder, small), footprint(config_of(scheduler=scheduler), folder)
    reckoned = rank_capacity(config.engine, config.scheduler, model, draft=draft).scheduler_config
    assert reckoned.num_blocks is not None
    assert takes.kv_pool_bytes is not None
    block_bytes = model.kv_block_shape(reckoned.block_size).size_bytes + draft.block_bytes(
        reckoned.block_size
    )
    assert takes.kv_bytes_per_token * reckoned.block_size == block_bytes
    assert takes.kv_pool_bytes // block_bytes == reckoned.num_blocks + draft.num_spare_blocks(reckoned)
    assert takes.num_kv_tokens == (reckoned.num_blocks - 1) * reckoned.block_size
    assert 0 < takes.draft_weight_bytes < alone.weight_bytes / 2
    assert "MiB of a draft model's weights" in str(takes)
    assert (takes.weights, takes.weight_bytes) == (alone.weights, alone.weight_bytes)


@pytest.mark.parametrize("tie", [True, False])
def test_parameters_are_those_of_the_file(tmp_path: Path, tie: bool) -> None:
    folder = make_model_dir(tmp_path / "m", tie_word_embeddings=tie, dtype="bfloat16")
    takes = footprint(config_of(), folder)
    assert takes.weights is not None
    attention, mlp, norms = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 128, 2 * 64
    layers = 3 * (attention + mlp + norms) + 64
    expected = 300 * 64 * (1 if tie else 2) + layers
    assert takes.weights.num_parameters == expected
    assert takes.weight_bytes == 2 * layers + (4 + 2) * 300 * 64, "only what is looked up gets 32 bits"
    assert (
        footprint(config_of(model={"dtype": "float32", "quantization": "int4"}), folder).weight_bytes
        < expected
    )


def test_a_gguf_files_bits_are_counted(tmp_path: Path, folder: Path) -> None:
    gguf = make_gguf(tmp_path / "m.gguf", folder, "Q8_0")
    describe(gguf, tmp_path / "described")
    (tmp_path / "described" / "model.gguf").symlink_to(gguf)
    own = footprint(config_of(), tmp_path / "described")
    floats = footprint(config_of(model={"dtype": "float32", "quantization": "none"}), tmp_path / "described")
    assert own.weights is not None
    assert own.weights == floats.weights
    assert own.weight_bytes < 1.2 * own.weights.num_parameters
    assert floats.weight_bytes == 4 * own.weights.num_parameters


@pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "kind", [kind for kind in GgufType if kind not in FLOATS], ids=lambda kind: kind.name
)
def test_the_bits_of_gguf_types_are_those_that_the_kernels_keep(kind: GgufType) -> None:
    bytes_OB = torch.full((32, 768 // kind.block_size * kind.block_bytes), 0x3C, dtype=torch.uint8)
    matrix = matrix_of(kind, bytes_OB)
    assert isinstance(matrix, GroupedWeight)
    assert bits_kept(matrix) == kind.memory_bits


@pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("bits", "kept"), [(4, 5.0), (8, 8.5)])
def test_the_bits_of_rounded_weights_are_at_most_those_that_are_counted(
    bits: Literal[4, 8], kept: float
) -> None:
    assert bits_kept(GroupedWeight.quantize(torch.randn(32, 768), bits)) == kept <= BITS_KEPT[f"int{bits}"]


def bits_kept(weight: GroupedWeight) -> float:
    """Bits of each number of a matrix of whole blocks."""
    library = native_library()
    assert library is not None
    num_bytes: int = Products(library).grouped_packed_bytes(
        *weight.shape, weight.bits, weight.group_size, weight.centre is None
    )
    return 8 * num_bytes / weight.values_OI.numel()


@pytest.mark.parametrize(
    ("name", "device", "bits"),
    [
        ("gptq, 4 bits", "cpu", 5.0),
        ("int8 by channel", "cpu", 9.0),
        ("fp8 by channel", "cpu", 32.0),
        ("gptq, act-order", "cpu", 32.0),
        ("gptq, 4 bits", "cuda", 16.0),
        ("fp8 by channel", "cuda", 8.0),
        ("fp8 by block", "cuda", 16.0),
    ],
)
def test_a_quantized_checkpoints_parameters_are_those_of_its_numbers(
    tmp_path: Path, name: str, device: str, bits: float
) -> None:
    dtype, num_bytes = ("float32", 4) if device == "cpu" else ("bfloat16", 2)
    source = make_model_dir(tmp_path / "m", hidden_size=128, intermediate_size=256, dtype=dtype)
    quantized, numbers = make_quantized(tmp_path, source, KINDS[name], lambda _: False)
    takes, plain = (
        footprint(
            config_of(model={"dtype": dtype}, engine={"device": device}, scheduler={"num_blocks": 9}), folder
        )
        for folder in (quantized, numbers)
    )
    assert takes.weights is not None
    assert plain.weights is not None
    assert takes.weights.num_parameters == plain.weights.num_parameters
    outside = 300 * 128 + (2 * 3 + 1) * 128  # embeddings and norms
    inside = takes.weights.num_parameters - outside
    assert takes.weight_bytes == pytest.approx(outside * num_bytes + inside * bits / 8, rel=0.1)


@pytest.mark.parametrize(("capability", "bits"), [("8.0", 16.0), ("8.9", 8.0), ("9.0\n8.6", 16.0), ("", 8.0)])
def test_8_bit_floats_stay_where_every_gpu_multiplies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str, bits: float
) -> None:
    """If there is no GPU here, the estimate assumes that the workers' GPUs multiply them."""
    source = make_model_dir(tmp_path / "m", hidden_size=128, intermediate_size=256, dtype="bfloat16")
    quantized, _ = make_quantized(tmp_path, source, KINDS["fp8 by channel"], lambda _: False)
    driver(tmp_path, monkeypatch, f"[ $1 = --query-gpu=compute_cap ] && echo '{capability}' || echo 81920")
    takes = footprint(config_of(model={"dtype": "bfloat16"}, engine={"device": "cuda"}), quantized)
    assert takes.weights is not None
    outside = 300 * 128 + (2 * 3 + 1) * 128
    inside = takes.weights.num_parameters - outside
    assert takes.weight_bytes == pytest.approx(outside * 2 + inside * bits / 8, rel=0.1)


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_without_our_kernels_weights_are_numbers_of_the_data_type(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setenv("BATON_NATIVE_KERNELS", "off")
    config = config_of(model={"dtype": "float32", "quantization": quantization})
    gguf = make_gguf(tmp_path / "m.gguf", folder, "Q8_0")
    describe(gguf, tmp_path / "described")
    (tmp_path / "described" / "model.gguf").symlink_to(gguf)
    for each in (tmp_path / "described", make_model_dir(tmp_path / "m", dtype="bfloat16")):
        takes = footprint(config, each)
        assert takes.weights is not None
        assert takes.weight_bytes == 4 * takes.weights.num_parameters


def test_a_machine_without_a_compiler_has_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert may_have_kernels({"BATON_NATIVE_KERNELS": "/kernels"}) == (machine_instructions() is not None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("engine.native.compilers.find_spec", lambda _name: None)
    assert not may_have_kernels({})


def test_schemes_of_kv_are_read_where_kv_has_8_bits(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "m")
    scheme = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"type": "int"}}
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": scheme}))
    footprint(config_of(), folder)
    with pytest.raises(ModelError, match=r"kv_cache_scheme\.type 'int' is not supported"):
        footprint(config_of(engine={"kv_cache_dtype": "fp8"}), folder)


@pytest.mark.parametrize(
    ("architecture", "overrides"), [("mixtral", {"num_local_experts": 3}), ("glm4_moe", GLM4_MOE)]
)
def test_all_experts_in_one_tensor_are_refused(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    folder = make_model_dir(tmp_path / "m", architecture, **overrides)
    footprint(config_of(), folder)
    set_tensors(folder, {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(3, 8, 8)})
    with pytest.raises(
        ModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj holds all experts of a layer"
    ):
        footprint(config_of(), folder)


@pytest.mark.parametrize(("device", "bits"), [("cpu", 5.25), ("cuda", 16.0)])
def test_floats_of_4_bits_are_kept_on_a_cpu(tmp_path: Path, device: str, bits: float) -> None:
    sizes = GPT_OSS | {"hidden_size": 64, "intermediate_size": 512}
    quantized, numbers = make_mxfp4(
        tmp_path, make_model_dir(tmp_path / "m", "gpt_oss", dtype="bfloat16", **sizes)
    )
    config = config_of(model={"dtype": "bfloat16"}, engine={"device": device}, scheduler={"num_blocks": 9})
    takes, plain = footprint(config, quantized), footprint(config, numbers)
    assert takes.weights is not None
    assert plain.weights is not None
    assert takes.weights.num_parameters == plain.weights.num_parameters
    experts = 3 * 6 * 3 * 64 * 512
    others = 16 * (takes.weights.num_parameters - experts)
    assert takes.weight_bytes == pytest.approx((others + bits * experts) / 8, rel=0.02)


def test_a_folder_without_weights_says_only_what_kv_takes(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    takes = footprint(config_of(), folder)
    assert str(takes) == "0.75 KiB of KV per token; 2,048 MiB of KV hold 2,796,176 tokens on each worker"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_dummy_weights_take_as_much_as_a_worker_makes(
    case: Any, dtype: Literal["float32", "bfloat16"], tmp_path: Path
) -> None:
    folder = make_model_dir(tmp_path / "m", case.architecture, **case.overrides)
    (folder / "model.safetensors").unlink()
    config = config_of(model={"dtype": dtype, "load_format": "dummy"})
    takes = footprint(config, folder)
    made = sum(prod(take.part_shape) for take in takes_of(read_architecture(folder)))
    assert takes.weights is not None
    assert takes.weights.num_parameters == pytest.approx(made, rel=0.05)
    assert takes.weight_bytes >= takes.weights.num_parameters * module.BYTES[dtype]


def test_what_has_no_room_is_refused_with_the_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model={"dtype": "float32", "path": "org/name"}, engine={"kv_cache_memory_mib": 64})
    takes = footprint(config, folder)
    monkeypatch.setattr(module, "available_memory", lambda: 65 * 2**20)
    check_room(takes, config)
    monkeypatch.setattr(module, "available_memory", lambda: 64 * 2**20)
    with pytest.raises(
        ModelError,
        match=r"org/name does not fit: a worker needs \d MiB of weights and 64 MiB of KV, and the available memory of "
        r"this machine, or of its container, has room for 64 MiB; use fewer bits",
    ):
        check_room(takes, config)


def test_a_gpu_has_room_for_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_memory", lambda: 8 * 2**20)
    config = config_of(engine={"device": "cuda"}, model={"dtype": "bfloat16", "path": "org/name"})
    takes = footprint(config, folder)
    assert takes.kv_pool_bytes == int(8 * 2**20 * 0.9) - takes.weight_bytes
    check_room(takes, config)
    monkeypatch.setattr(module, "gpu_memory", lambda: 2**17)
    with pytest.raises(ModelError, match=r"org/name does not fit: .* and 1 GPU of 0 MiB has room for"):
        check_room(footprint(config, folder), config)
    monkeypatch.setattr(module, "gpu_memory", lambda: None)  # the workers' machine will say
    takes = footprint(config, folder)
    assert (takes.kv_pool_bytes, takes.num_kv_tokens) == (None, None)
    check_room(takes, config)


def test_the_driver_is_asked_for_the_smallest_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver(tmp_path, monkeypatch, "echo 24576; echo 16384")
    assert module.gpu_memory() == 16384 * 2**20
    driver(tmp_path, monkeypatch, "echo no driver; exit 9")
    assert module.gpu_memory() is None


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Puts a command of the driver's name first on PATH."""
    command = folder / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
