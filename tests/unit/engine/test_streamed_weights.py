"""A model read through the stream is the same model, and all tensors are checked before anything is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ModelError
from engine.layers.torch_backend import TorchBackend
from engine.loading.loader import takes_of
from engine.loading.streamed_weights import StreamedWeights
from engine.loading.weight_stream import CudaCopies
from engine.loading.weights import CheckpointWeights, Shard, Take, WeightSource
from engine.model_config import read_architecture
from engine.models.decoder import Decoder
from tests.factories.host_copies import HostCopies
from tests.factories.models import make_model_dir


class Kept(WeightSource):
    """Forwards takes, and keeps the tensors."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.tensors: dict[str, torch.Tensor] = {}

    def take_tensor(self, name: str, *shape: int, shard: Shard | None = None) -> torch.Tensor:
        self.tensors[name] = self._source.take_tensor(name, *shape, shard=shard)
        return self.tensors[name]


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_gets_the_same_tensors_as_from_mapped_files(tmp_path: Path, architecture: str) -> None:
    path = make_model_dir(tmp_path, architecture, tie_word_embeddings=architecture == "qwen3")
    facts = read_architecture(path)
    takes = takes_of(facts)
    progress: list[tuple[int, int]] = []
    with CheckpointWeights(path, torch.bfloat16) as mapped:
        expected = Kept(mapped)
        Decoder(facts, expected, TorchBackend())
        mapped.check_all_taken()
    with StreamedWeights(
        path, torch.bfloat16, takes, HostCopies(), lambda *seen: progress.append(seen)
    ) as streamed:
        found = Kept(streamed)
        Decoder(facts, found, TorchBackend())
        streamed.check_all_taken()
    assert list(found.tensors) == list(expected.tensors) == [take.name for take in takes]
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype is torch.bfloat16
        assert torch.equal(found.tensors[name], tensor), name
    num_bytes = sum(tensor.numel() * 4 for tensor in expected.tensors.values())  # stored as float32
    assert progress[-1] == (num_bytes, num_bytes)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert len(progress) == len(takes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shards_of_both_sources_are_slices(tmp_path: Path, dim: int, dtype: torch.dtype) -> None:
    whole = torch.randn(8, 4, 12).to(dtype)
    save_file({"other": torch.ones(3), "w": whole}, tmp_path / "model.safetensors")
    for rank in range(4):
        shard = Shard(dim, rank, 4)
        size = whole.shape[dim] // 4
        expected = whole.narrow(dim, rank * size, size).float()
        with CheckpointWeights(tmp_path, torch.float32) as mapped:
            assert torch.equal(mapped.take_tensor("w", 8, 4, 12, shard=shard), expected)
        takes = [Take("w", (8, 4, 12), shard)]
        with StreamedWeights(tmp_path, torch.float32, takes, HostCopies()) as streamed:
            assert torch.equal(streamed.take_tensor("w", 8, 4, 12, shard=shard), expected)


def test_shards_may_differ_in_size(tmp_path: Path) -> None:
    """For example, the last ranks may have a smaller shard of the vocabulary."""
    whole = torch.randn(7, 4)
    save_file({"other": torch.ones(3), "w": whole}, tmp_path / "model.safetensors")
    for rank, expected in enumerate((whole[:3], whole[3:6], whole[6:])):
        shard = Shard(0, rank, 3, is_equal=False)
        with CheckpointWeights(tmp_path, torch.float32) as mapped:
            assert torch.equal(mapped.take_tensor("w", 7, 4, shard=shard), expected)
        with StreamedWeights(tmp_path, torch.float32, [Take("w", (7, 4), shard)], HostCopies()) as streamed:
            assert torch.equal(streamed.take_tensor("w", 7, 4, shard=shard), expected)


def test_what_cannot_be_divided_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(6, 4)}, tmp_path / "model.safetensors")
    shard = Shard(0, 1, 4)
    message = r"tensor w \(shape \[6, 4\]\): dimension 0 of 6 cannot be divided among 4 ranks"
    with CheckpointWeights(tmp_path, torch.float32) as mapped, pytest.raises(ModelError, match=message):
        mapped.take_tensor("w", 6, 4, shard=shard)
    with pytest.raises(ModelError, match=message):
        StreamedWeights(tmp_path, torch.float32, [Take("w", (6, 4), shard)], HostCopies())


def test_missing_misshapen_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(6, 4), "extra": torch.ones(1)}, tmp_path / "model.safetensors")

    def open_for(name: str, *shape: int) -> StreamedWeights:
        return StreamedWeights(tmp_path, torch.float32, [Take(name, shape, None)], HostCopies())

    with pytest.raises(ModelError, match=r"tensor v \(shape \[6, 4\]\) is missing"):
        open_for("v", 6, 4)
    with pytest.raises(ModelError, match=r"w has shape \[6, 4\], but config.json implies \[6, 5\]"):
        open_for("w", 6, 5)
    with open_for("w", 6, 4) as weights:
        weights.take_tensor("w", 6, 4)
        weights.check_all_taken(allowed=("extra",))
        with pytest.raises(ModelError, match=r"1 tensors do not belong to .*: extra"):
            weights.check_all_taken()


def test_weights_stored_as_8_bit_floats_are_refused(tmp_path: Path) -> None:
    """Their scales are in other tensors, by one of many conventions."""
    path = make_model_dir(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, path / "model.safetensors")
    with (
        CheckpointWeights(path, torch.float32) as mapped,
        pytest.raises(ModelError, match=rf"{name} is stored as F8_E4M3; supported are F64, F32, F16, BF16"),
    ):
        mapped.take_tensor(name, 128, 64)


@pytest.mark.gpu
def test_a_gpu_gets_the_same_tensors(tmp_path: Path) -> None:
    """All tensors are read many times. Each one is freed at once, so later copies use the same memory."""
    tensors = {f"w{i}": torch.randn(300 + i, 700) for i in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    takes = [Take(name, tuple(tensor.shape), None) for name, tensor in tensors.items()] * 10
    takes += [Take("w0", (300, 700), Shard(1, rank, 4)) for rank in range(4)]
    device = torch.device("cuda")
    found = []
    with StreamedWeights(tmp_path, torch.bfloat16, takes, CudaCopies(device)) as weights:
        for take in takes:
            tensor = weights.take_tensor(take.name, *take.shape, shard=take.shard)
            assert (tensor.device.type, tensor.dtype) == ("cuda", torch.bfloat16)
            found.append(tensor.double().sum())
            del tensor
    for take, total in zip(takes, found, strict=True):
        whole = tensors[take.name].bfloat16().double()
        part = whole if take.shard is None else whole[:, take.shard.slice_of(take.name, take.shape)]
        torch.testing.assert_close(total.cpu(), part.sum(), rtol=0, atol=1e-6)
