"""Model folders on disk: sharded, damaged, or with other tensors than the config promises."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.config import ModelConfig
from baton.errors import ModelError
from engine.layers.fp8 import quantize_rows
from engine.loading.digest import model_digest
from engine.loading.loader import LoadedModel, load_model
from engine.loading.weights import DummyWeights, Shard
from tests.factories.families import GEMMA
from tests.factories.models import make_model_dir, set_tensors
from tests.factories.stepping import StepDriver, load_on_cpu

CPU = torch.device("cpu")


def tokens(model: LoadedModel) -> list[int]:
    return StepDriver(model).generate({"a": [5, 6, 7]}, 8)["a"]


def test_the_facts_of_a_loaded_model(tmp_path: Path) -> None:
    model = load_on_cpu(
        make_model_dir(tmp_path, "qwen3", head_dim=16, max_position_embeddings=512), dtype="bfloat16"
    )
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (512, 300, (2,))
    shape = model.kv_block_shape(8)
    assert shape.dimensions == (3, 2, 2, 8, 16)
    assert shape.dtype is torch.bfloat16


def test_an_index_over_several_files_serves_the_same_model(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    expected = tokens(load_on_cpu(path))
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert tokens(load_on_cpu(path)) == expected
    (path / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-1\.safetensors does not exist"):
        load_on_cpu(path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors does not exist; weights must be safetensors"):
        load_on_cpu(path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    (path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ModelError, match=r"model\.safetensors is not a readable safetensors file"):
        load_on_cpu(path)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = make_model_dir(tmp_path / "missing")
    set_tensors(path, {name: None})
    with pytest.raises(ModelError, match=rf"tensor {name} \(shape \[128, 64\]\) is missing"):
        load_on_cpu(path)
    path = make_model_dir(tmp_path / "misshapen")
    set_tensors(path, {name: torch.zeros(128, 63)})
    with pytest.raises(
        ModelError, match=rf"{name} has shape \[128, 63\], but config.json implies \[128, 64\]"
    ):
        load_on_cpu(path)
    path = make_model_dir(tmp_path / "unexpected")
    set_tensors(path, {"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(
        ModelError, match=r"1 tensors do not belong to .*: model.layers.1.self_attn.q_proj.bias"
    ):
        load_on_cpu(path)


def test_leftovers_that_change_nothing_are_allowed(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path, tie_word_embeddings=True)
    expected = tokens(load_on_cpu(path))
    copied = load_file(path / "model.safetensors")["model.embed_tokens.weight"].clone()
    set_tensors(path, {"lm_head.weight": copied, "model.rotary_emb.inv_freq": torch.zeros(8)})
    assert tokens(load_on_cpu(path)) == expected


def test_dummy_weights_come_from_the_config_alone(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    (path / "model.safetensors").unlink()
    first, second = load_on_cpu(path, load_format="dummy"), load_on_cpu(path, load_format="dummy")
    assert tokens(first) == tokens(second)
    assert first.digest == second.digest
    assert first.digest.endswith("-dummy")


def test_dummy_weights_differ_by_name_and_are_the_same_in_every_process() -> None:
    weights = DummyWeights(torch.float32, CPU)
    tensor = weights.take_tensor("model.layers.0.self_attn.q_proj.weight", 4, 6)
    assert not torch.equal(tensor, weights.take_tensor("model.layers.1.self_attn.q_proj.weight", 4, 6))
    pinned = torch.randn((4, 6), generator=torch.Generator().manual_seed(0xAA823655)) * 6**-0.5
    torch.testing.assert_close(tensor, pinned)


def test_dummy_shards_are_slices_of_one_tensor() -> None:
    weights = DummyWeights(torch.bfloat16, CPU)
    whole = weights.take_tensor("w", 8, 12)
    for dim in (0, 1):
        shards = [weights.take_tensor("w", 8, 12, shard=Shard(dim, rank, 4)) for rank in range(4)]
        assert torch.equal(torch.cat(shards, dim), whole)
        assert all(shard.is_contiguous() and shard.untyped_storage().nbytes() == 48 for shard in shards)
    with pytest.raises(ModelError, match=r"tensor w .* dimension 1 of 12 cannot be divided among 5 ranks"):
        weights.take_tensor("w", 8, 12, shard=Shard(1, 0, 5))


@pytest.mark.gpu
def test_dummies_of_a_gpu_are_the_same_ones_every_time() -> None:
    device = torch.device("cuda")
    first, second = (DummyWeights(torch.bfloat16, device).take_tensor("w", 512, 640) for _ in range(2))
    assert first.device.type == "cuda"
    assert torch.equal(first, second)
    shard = DummyWeights(torch.bfloat16, device).take_tensor("w", 512, 640, shard=Shard(1, 1, 4))
    assert torch.equal(shard, first[:, 160:320])
    assert abs(first.float().std().item() - 640**-0.5) < 0.01 * 640**-0.5


def test_digests_of_dummies_name_the_kind_of_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model_dir(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    on_cpu, on_gpu = (model_digest(path, dummy_device=torch.device(kind)) for kind in ("cpu", "cuda"))
    assert on_cpu.endswith("-dummy")
    assert on_gpu == f"{on_cpu}-cuda-NVIDIA H200"


def test_a_quantized_model_is_another_one(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path)
    plain, quantized = load_on_cpu(path), load_on_cpu(path, quantization="fp8")
    assert quantized.digest == f"{plain.digest}-fp8"
    assert load_on_cpu(path, quantization="fp8", load_format="dummy").digest.endswith("-dummy-fp8")
    assert len(tokens(quantized)) == 8


def test_quantization_leaves_embeddings_norms_and_logits_alone(tmp_path: Path) -> None:
    """With all projections exact in 8 bits, the quantized model is the plain one."""
    path = make_model_dir(tmp_path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "_proj" in name:
            quantized, scale = quantize_rows(tensor)
            tensors[name] = quantized.float() * scale
    set_tensors(path, tensors)
    assert tokens(load_on_cpu(path, quantization="fp8")) == tokens(load_on_cpu(path))


def test_progress_counts_what_is_loaded(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = make_model_dir(tmp_path, tie_word_embeddings=True)
    load_model(
        ModelConfig(dtype="float32"), path, CPU, on_progress=lambda done, total: seen.append((done, total))
    )
    num_bytes = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert seen[-1] == (num_bytes, num_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_digest_differs_for_fine_tunes_and_not_for_copies(tmp_path: Path) -> None:
    paths = [
        make_model_dir(tmp_path / "a", seed=1),
        make_model_dir(tmp_path / "copy", seed=1),
        make_model_dir(tmp_path / "tuned", seed=2),
        make_model_dir(tmp_path / "stretched", seed=1, max_position_embeddings=2048),
    ]
    original, copy, tuned, stretched = (model_digest(path) for path in paths)
    assert original == copy
    assert len({original, tuned, stretched}) == 3


def test_the_digest_sees_a_change_of_any_tensor(tmp_path: Path) -> None:
    """A change of a single number at one of the tensor's ends suffices: rows of added tokens are there."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    path = make_model_dir(tmp_path, **sizes, vocab_size=1000)
    tensors, seen = load_file(path / "model.safetensors"), {model_digest(path)}
    for name, tensor in tensors.items():
        for place in (0, -1):
            changed = tensor.clone()
            changed.view(-1)[place] += 1.0
            set_tensors(path, tensors | {name: changed})
            seen.add(model_digest(path))
    assert len(seen) == 2 * len(tensors) + 1


@pytest.mark.slow
def test_loading_does_not_import_pytorchs_compiler(tmp_path: Path) -> None:
    """With this import, every worker would take a second longer to start."""
    program = (
        "import sys; from pathlib import Path; import torch\n"
        "from baton.config import ModelConfig; from engine.loading.loader import load_model\n"
        "for path in sys.argv[1:]:\n"
        "    load_model(ModelConfig(dtype='float32'), Path(path), torch.device('cpu'))\n"
        "    print('torch._dynamo' in sys.modules)"
    )
    folders = (
        make_model_dir(tmp_path / "llama", attention_bias=True),
        make_model_dir(tmp_path / "qwen3", "qwen3"),
        make_model_dir(tmp_path / "gemma2", "gemma2", **GEMMA),
    )
    command = [sys.executable, "-c", program, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "False\nFalse\nFalse\n", done.stderr
