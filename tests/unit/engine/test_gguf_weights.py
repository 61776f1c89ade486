"""Models from GGUF files give transformers' tokens with the file's numbers; shared by ranks, and quantized."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import BatonConfig, EngineConfig, ModelConfig
from baton.errors import ConfigError, ModelError
from engine.batch import RequestBatch
from engine.build import build_device_engine
from engine.collectives import SINGLE_RANK, Collectives
from engine.layers.backend import InputTokens, LinearLayer, Matrix
from engine.layers.grouped_weight import GroupedWeight
from engine.layers.paged_attention import PagedAttention
from engine.layers.torch_backend import TorchBackend
from engine.loading.gguf_folder import describe
from engine.loading.gguf_weights import GgufWeights, gguf_name
from engine.loading.loader import LoadedModel, load_model
from engine.loading.quantized_weights import QuantizedWeights
from engine.loading.weights import Shard, Take
from engine.native.library import native_library
from tests.factories.families import QWEN3_MOE
from tests.factories.gguf_files import Kind, make_gguf, transformers_model
from tests.factories.models import make_model_dir
from tests.factories.stepping import StepDriver, load_on_cpu
from tests.factories.threaded_ranks import on_ranks

CPU = torch.device("cpu")
PROMPT = [5, 6, 7, 40, 41, 200, 3]
K_QUANTS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}


def make_folder(path: Path, architecture: str = "llama", kind: Kind | str = "F32", **overrides: Any) -> Path:
    folder = path / "folder"
    make_gguf(path / "model.gguf", make_model_dir(path / "source", architecture, **overrides), kind)
    describe(path / "model.gguf", folder)
    (folder / "model.gguf").symlink_to(path / "model.gguf")
    return folder


def tokens(model: LoadedModel) -> list[int]:
    return StepDriver(model).generate({"a": PROMPT}, 8)["a"]


def expected_tokens(folder: Path) -> list[int]:
    out = transformers_model(folder).generate(
        torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
        ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": True}),
        (
            "gemma3_text",
            {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4, "num_hidden_layers": 7},
        ),
    ],
    ids=str,
)
def test_architectures(tmp_path: Path, architecture: str, overrides: dict[str, Any]) -> None:
    """The file has F32 numbers, so the tokens are also those of the model that the file was made from."""
    folder = make_folder(tmp_path, architecture, **overrides)
    assert tokens(load_on_cpu(folder)) == tokens(load_on_cpu(tmp_path / "source")) == expected_tokens(folder)


@pytest.mark.parametrize(
    "kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
)
def test_kinds_of_blocks(tmp_path: Path, kind: str) -> None:
    """With `none`, the blocks become numbers, which give transformers' tokens."""
    folder = make_folder(tmp_path, kind=kind, num_hidden_layers=2, **K_QUANTS)
    assert tokens(load_on_cpu(folder, quantization="none")) == expected_tokens(folder)


def mixed(name: str) -> str:
    """A file with the kinds of matrices of the mixture Q4_K_M."""
    return "Q6_K" if "attn_v" in name or "token_embd" in name else "Q4_K"


def test_projections_of_one_input_may_have_different_bits(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, kind=mixed, num_hidden_layers=2, tie_word_embeddings=True, **K_QUANTS)
    assert error(load_on_cpu(folder), load_on_cpu(folder, quantization="none")) < 0.05


def test_experts_of_one_tensor_are_shared_by_ranks(tmp_path: Path) -> None:
    """The types are those of files of the mixture Q4_K_M; the router stays in floats."""

    def kind(name: str) -> str:
        return "F32" if "gate_inp" in name else "Q6_K" if "down_exps" in name else "Q4_K"

    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 512, "num_hidden_layers": 2}
    folder = make_folder(tmp_path, "qwen3_moe", kind, **QWEN3_MOE | {"norm_topk_prob": True} | sizes)
    assert tokens(load_on_cpu(folder, quantization="none")) == expected_tokens(folder)
    alone = tokens(load_on_cpu(folder))

    def on_rank(collectives: Collectives, *, expert_parallel: bool) -> list[int]:
        config = ModelConfig(dtype="float32")
        return tokens(
            load_model(config, folder, CPU, collectives=collectives, expert_parallel=expert_parallel)
        )

    for expert_parallel in (False, True):
        assert on_ranks(2, partial(on_rank, expert_parallel=expert_parallel)) == [alone, alone]


def test_experts_are_named_by_their_number(tmp_path: Path) -> None:
    source = source_of(make_folder(tmp_path, "qwen3_moe", num_hidden_layers=1, **QWEN3_MOE))
    experts = "model.layers.0.mlp.experts"
    for number in range(5):
        source.take_matrix(f"{experts}.{number}.up_proj.weight", 32, 64)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up_exps\.6\.weight \(shape \[32, 64\]\) is missing"):
        source.take_matrix(f"{experts}.6.up_proj.weight", 32, 64)
    elsewhere = [Take(f"{experts}.{number}.down_proj.weight", (64, 32), None) for number in range(6)]
    with pytest.raises(ModelError, match="19 tensors do not belong to the architecture"):
        source.check_all_taken(elsewhere=elsewhere)


def test_a_tensor_whose_name_has_no_dots_is_another_tensor(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_hidden_layers=1)
    content = (folder / "model.gguf").read_bytes()
    (folder / "model.gguf").write_bytes(content.replace(b"output_norm.weight", b"output_norm_weight"))
    with pytest.raises(ModelError, match=r"tensor output_norm\.weight .* is missing"):
        load_on_cpu(folder)


@torch.inference_mode()
def logits(model: LoadedModel) -> torch.Tensor:
    """Of every position of the prompt."""
    driver, requests = StepDriver(model), RequestBatch(4)
    driver.add("a", PROMPT)
    plan = driver.plan({"a": len(PROMPT)})
    requests.update(plan)
    attention = PagedAttention(driver.pool, model.architecture, model.num_heads, model.dtype)
    hidden_TE = model.decoder.forward(
        InputTokens(torch.tensor(PROMPT)), attention.prepare(requests.build(plan))
    )
    return model.decoder.logits(hidden_TE)


def source_of(folder: Path, *, keeps_groups: bool = True) -> GgufWeights:
    return GgufWeights(folder / "model.gguf", torch.float32, CPU, 64, keeps_groups=keeps_groups)


def test_ranks_need_not_divide_the_vocabulary(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, kind="Q8_0", num_hidden_layers=1, vocab_size=303, **K_QUANTS)
    config = ModelConfig(dtype="float32")
    ranks = on_ranks(2, lambda rank: tokens(load_model(config, folder, CPU, collectives=rank)))
    assert ranks == [tokens(load_on_cpu(folder))] * 2


@pytest.mark.parametrize("keeps_groups", [True, False])
@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q6_K"])
def test_ranks_parts_are_parts_of_the_whole(tmp_path: Path, kind: str, keeps_groups: bool) -> None:
    folder = make_folder(tmp_path, kind=kind, num_hidden_layers=1, attention_bias=True, **K_QUANTS)
    source = source_of(folder, keeps_groups=keeps_groups)
    for name, shape in (("self_attn.q_proj", (256, 256)), ("mlp.down_proj", (256, 512))):
        for dim in (0, 1):
            full = f"model.layers.0.{name}.weight"
            whole = source.take_tensor(full, *shape)
            parts = [source.take_matrix(full, *shape, shard=Shard(dim, rank, 2)) for rank in range(2)]
            floats = [part if isinstance(part, torch.Tensor) else part.dequantized() for part in parts]
            assert torch.equal(torch.cat(floats, dim), whole)
            assert all(isinstance(part, GroupedWeight) == (keeps_groups and kind != "F16") for part in parts)
    bias = "model.layers.0.self_attn.q_proj.bias"
    parts_of_bias = [source.take_tensor(bias, 256, shard=Shard(0, rank, 2)) for rank in range(2)]
    assert torch.equal(torch.cat(parts_of_bias), source.take_tensor(bias, 256))


def test_bits_that_suffice_stay_and_others_are_quantized(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, kind=mixed, num_hidden_layers=1, **K_QUANTS)
    source = QuantizedWeights(source_of(folder), 4)
    kept = source.take_matrix("model.layers.0.self_attn.q_proj.weight", 256, 256)
    quantized = source.take_matrix("model.layers.0.self_attn.v_proj.weight", 128, 256)
    vocabulary = source.take_matrix("model.embed_tokens.weight", 300, 256)
    assert isinstance(kept, GroupedWeight)
    assert isinstance(quantized, GroupedWeight)
    assert isinstance(vocabulary, GroupedWeight)
    assert (kept.bits, quantized.bits, vocabulary.bits) == (4, 4, 8)
    original = source_of(folder)
    assert torch.equal(
        kept.dequantized(), original.take_tensor("model.layers.0.self_attn.q_proj.weight", 256, 256)
    )
    assert torch.equal(vocabulary.dequantized(), original.take_tensor("model.embed_tokens.weight", 300, 256))


def error(model: LoadedModel, reference: LoadedModel) -> float:
    """Of the logits, relative."""
    expected = logits(reference)
    return float((logits(model) - expected).norm() / expected.norm())


@pytest.mark.parametrize(("quantization", "largest"), [("int8", 0.1), ("int4", 0.7)])
def test_an_ordinary_checkpoint_is_quantized_while_it_is_loaded(
    tmp_path: Path, quantization: str, largest: float
) -> None:
    path = make_model_dir(tmp_path, attention_bias=True)
    plain, quantized = load_on_cpu(path), load_on_cpu(path, quantization=quantization)
    assert quantized.digest == f"{plain.digest}-{quantization}"
    assert largest / 20 < error(quantized, plain) < largest
    assert load_on_cpu(path, quantization=quantization, load_format="dummy").digest.endswith(
        f"-dummy-{quantization}"
    )


def test_inputs_that_are_not_whole_groups_are_named(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, intermediate_size=80)
    with pytest.raises(
        ModelError, match=r"down_proj\.weight cannot be quantized: a rank has 80 of its .* the group size 32"
    ):
        load_on_cpu(path, quantization="int8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_on_a_gpu_it_says_what_is_possible(tmp_path: Path, quantization: str) -> None:
    config = ModelConfig.model_validate({"dtype": "float32", "quantization": quantization})
    with pytest.raises(
        ConfigError, match=rf"model.quantization: '{quantization}' .*; with 'cuda', use 'fp8', or 'none'"
    ):
        load_model(config, make_model_dir(tmp_path), torch.device("cuda"))


def test_on_a_gpu_it_says_so_before_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.build.rank_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr("engine.build._begin_on_gpu", lambda _: pytest.fail("began with the GPU"))
    config = BatonConfig(
        model=ModelConfig(dtype="float32", quantization="int8"),
        engine=EngineConfig(num_threads=torch.get_num_threads()),
    )
    unused: Any = None
    with pytest.raises(ConfigError, match=r"model.quantization: 'int8' "):
        build_device_engine(config, None, tmp_path, "", SINGLE_RANK, unused, unused, unused)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_groups_stay_as_they_are_where_our_kernels_multiply_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_kernels: bool
) -> None:
    """Torch would dequantize them at every step."""
    monkeypatch.setattr("engine.loading.loader.native_library", lambda: object() if has_kernels else None)
    folder, config = make_folder(tmp_path, kind="Q4_1"), ModelConfig(dtype="float32")
    made = RecordingBackend()
    model = load_model(config, folder, CPU, made)
    assert made.kinds == {GroupedWeight if has_kernels else torch.Tensor}
    assert model.digest.endswith("-gguf") == has_kernels


class RecordingBackend(TorchBackend):
    """Keeps the kinds of its matrices."""

    def __init__(self) -> None:
        self.kinds: set[type] = set()

    def linear(self, weight_OI: Matrix, bias_O: torch.Tensor | None) -> LinearLayer:
        self.kinds.add(type(weight_OI))
        return super().linear(weight_OI, bias_O)


@pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")
def test_digests_tell_models_and_quantizations_apart(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "a", kind="Q4_1")
    names = ("auto", "none", "int8", "int4", "fp8")
    digests = {name: load_on_cpu(folder, quantization=name).digest for name in names}
    assert len(set(digests.values())) == len(names)
    assert digests["auto"] == f"{digests['none']}-gguf"
    assert load_on_cpu(make_folder(tmp_path / "tuned", kind="Q4_1", seed=4)).digest != digests["auto"]
    assert load_on_cpu(make_folder(tmp_path / "copy", kind="Q4_1")).digest == digests["auto"]


def test_missing_misshapen_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    source = source_of(folder)
    with pytest.raises(
        ModelError, match=r"model\.gguf: tensor blk\.7\.attn_q\.weight \(shape \[64, 64\]\) is missing"
    ):
        source.take_matrix("model.layers.7.self_attn.q_proj.weight", 64, 64)
    with pytest.raises(
        ModelError, match=r"blk\.0\.ffn_up\.weight has shape \[128, 64\], but .* implies \[128, 63\]"
    ):
        source.take_matrix("model.layers.0.mlp.up_proj.weight", 128, 63)
    with pytest.raises(ModelError, match=r"30 tensors do not belong to .*: blk\.0\.attn_k\.weight, "):
        source_of(folder).check_all_taken()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (tmp_path / "model.gguf").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*folder/model\.gguf: .*No such file"):
        load_on_cpu(folder)


def test_a_file_that_the_system_does_not_map_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap")

    folder = make_folder(tmp_path)
    monkeypatch.setattr(torch, "from_file", refuse)
    with pytest.raises(ModelError, match=r"cannot map .*folder/model\.gguf into memory: unable to mmap"):
        load_on_cpu(folder)


def test_a_missing_tensor_is_found_before_a_byte_is_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    seen: list[tuple[int, int]] = []
    with pytest.raises(ModelError, match=r"tensor blk\.3\.attn_norm\.weight .* is missing"):
        load_model(
            ModelConfig(dtype="float32"), folder, CPU, on_progress=lambda *progress: seen.append(progress)
        )
    assert seen == []


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_progress_reaches_the_whole(tmp_path: Path, architecture: str) -> None:
    """Phi-3 takes parts of merged tensors."""
    seen: list[tuple[int, int]] = []
    folder = make_folder(tmp_path, architecture, kind="Q8_0")
    load_model(ModelConfig(dtype="float32"), folder, CPU, on_progress=lambda *progress: seen.append(progress))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_names() -> None:
    assert gguf_name("model.layers.12.self_attn.q_norm.weight", "qwen3") == "blk.12.attn_q_norm.weight"
    assert gguf_name("lm_head.weight", "llama") == "output.weight"
