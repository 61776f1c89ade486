"""The bytes of a model's weights that are counted before it is loaded, beside the tensors that it then holds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from baton.config import BatonConfig
from engine.layers.torch_backend import TorchBackend
from engine.loading import footprint as module
from engine.loading.footprint import footprint
from engine.loading.gguf_folder import describe
from engine.loading.loader import load_model
from engine.native.library import native_library
from tests.factories.gguf_files import make_gguf
from tests.factories.models import make_model_dir, set_tensors
from tests.factories.quantized_checkpoints import KINDS, make_quantized

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "vocab_size": 4096,
}
needs_kernels = pytest.mark.skipif(native_library() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "not tied"])
def is_tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, is_tied: bool) -> dict[str, Path]:
    """A model with many tokens and few layers, by the way in which it is stored."""
    path = tmp_path_factory.mktemp("models")
    found = {
        dtype: make_model_dir(path / dtype, dtype=dtype, tie_word_embeddings=is_tied, **SIZES)
        for dtype in ("float32", "bfloat16")
    }
    for kind in ("Q8_0", "Q6_K", "Q4_K", "F16"):
        file = make_gguf(path / f"{kind}.gguf", found["float32"], kind)
        describe(file, path / kind)
        (path / kind / "model.gguf").symlink_to(file)
        found[kind] = path / kind
    for kind in ("gptq, 4 bits", "fp8 by channel"):
        found[kind], _ = make_quantized(path / kind, found["bfloat16"], KINDS[kind])
    return found


def tensors_of(each: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors that an object refers to, each once."""
    if id(each) in seen or isinstance(each, type):
        return
    seen.add(id(each))
    if isinstance(each, torch.Tensor):
        yield each
    elif isinstance(each, dict | list | tuple):
        for item in each.values() if isinstance(each, dict) else each:
            yield from tensors_of(item, seen)
    elif type(each).__module__.startswith("engine."):
        slots = [name for base in type(each).__mro__ for name in getattr(base, "__slots__", ())]
        for name in {*getattr(each, "__dict__", ()), *slots}:
            yield from tensors_of(getattr(each, name, None), seen)


def counted_and_held(
    folder: Path, dtype: str, quantization: str, *, has_kernels: bool = True
) -> tuple[int, int]:
    model = {"dtype": dtype, "quantization": quantization}
    config = BatonConfig.from_mapping({"model": model})
    loaded = load_model(config.model, folder, CPU, None if has_kernels else TorchBackend())
    held = sum(tensor.nbytes for tensor in tensors_of(loaded.decoder, set()))
    return footprint(config, folder).weight_bytes, held


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("stored", "quantizations"),
    [
        ("float32", ("none", "int8", "int4", "fp8")),
        ("bfloat16", ("none", "int8", "int4", "fp8")),
        ("Q8_0", ("auto", "none", "int8", "int4")),
        ("Q6_K", ("auto", "int8")),
        ("Q4_K", ("auto", "int4")),
        ("F16", ("auto",)),
        ("gptq, 4 bits", ("auto", "none", "int8")),
        ("fp8 by channel", ("auto", "fp8")),
    ],
    ids=str,
)
def test_what_is_counted_is_what_a_cpu_holds(
    folders: dict[str, Path], dtype: str, stored: str, quantizations: tuple[str, ...]
) -> None:
    for quantization in quantizations:
        counted, held = counted_and_held(folders[stored], dtype, quantization)
        assert 0.99 * held <= counted <= 1.15 * held, f"{quantization}: {counted:,} counted, {held:,} held"


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "fp8"])
def test_and_what_it_holds_without_our_kernels(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    monkeypatch.setenv("BATON_NATIVE_KERNELS", "off")
    counted, held = counted_and_held(folders["float32"], "float32", quantization, has_kernels=False)
    assert 0.99 * held <= counted <= 1.15 * held


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_a_gpu_rounds_neither_table_and_holds_a_tied_one_once(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, is_tied: bool, quantization: str
) -> None:
    monkeypatch.setattr(module, "gpu_memory", lambda: None)
    model = {"dtype": "bfloat16", "quantization": quantization}
    takes = footprint(
        BatonConfig.from_mapping({"model": model, "engine": {"device": "cuda"}}), folders["bfloat16"]
    )
    tables = 4096 * 256 * (1 if is_tied else 2)
    assert takes.weights is not None
    layers = takes.weights.num_parameters - tables
    assert takes.weight_bytes == 2 * tables + (1 if quantization == "fp8" else 2) * layers


def test_a_copy_of_tied_embeddings_is_not_counted(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "m", tie_word_embeddings=True)
    config = BatonConfig.from_mapping({"model": {"dtype": "float32"}})
    plain = footprint(config, folder)
    tensors = load_file(folder / "model.safetensors")
    set_tensors(folder, {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    assert footprint(config, folder) == plain
