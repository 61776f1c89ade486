"""Which files make a model, by their names."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import ModelError
from engine.loading.model_files import (
    VALUE_BYTES,
    gguf_file,
    indexed_files,
    read_safetensors_header,
    stored_tensors,
)
from engine.loading.safetensors_index import CODES, DTYPES, CheckpointIndex, open_safetensors
from engine.model_config import read_json

FILES = ["README.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "sub/m-BF16.gguf", "mmproj-m-F16.gguf"]


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("BF16", "sub/m-BF16.gguf"),
        ("m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
        ("m-BF16.gguf", "sub/m-BF16.gguf"),
        ("*_K_S*", "m-Q4_K_S.gguf"),
        ("sub/*", "sub/m-BF16.gguf"),
    ],
)
def test_a_gguf_file_is_named_by_quantization_file_or_pattern(wanted: str, path: str) -> None:
    assert gguf_file(FILES, wanted, "a/b") == path


@pytest.mark.parametrize(
    ("files", "wanted", "message"),
    [
        (
            FILES,
            None,
            r"a/b has several GGUF files; name one, such as a/b:Q4_K_M. There are m-Q4_K_M.gguf, .*sub/m-BF16",
        ),
        (FILES, "Q4", r"a/b has 2 GGUF files that match 'Q4'; name one"),
        (FILES, "Q5_K", r"a/b has no GGUF files that match 'Q5_K'; name one"),
        (FILES, "*Q4*", r"a/b has 2 GGUF files that match '\*Q4\*'; name one"),
        (FILES, "F16", r"no GGUF files that match 'F16'"),
        (
            ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"],
            "Q8_0",
            "one of several parts.*llama-gguf-split",
        ),
        (
            ["pytorch_model.bin", "x.txt"],
            None,
            r"neither model.safetensors nor .* GGUF file; it has pytorch_model.bin, x",
        ),
        ([], None, "it has nothing"),
    ],
)
def test_another_choice_is_refused_with_what_there_is(
    files: list[str], wanted: str | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        gguf_file(files, wanted, "a/b")


@pytest.mark.parametrize(
    ("files", "wanted", "path"),
    [
        (["m-Q6_K.gguf", "m-Q6_K_L.gguf"], "q6_k", "m-Q6_K.gguf"),
        (["m-Q6_K.gguf", "m-Q6_K_L.gguf"], "Q6_K_L", "m-Q6_K_L.gguf"),
        (["m.Q4_0.gguf", "m.Q4_0_4_4.gguf", "m.Q4_0_8_8.gguf"], "Q4_0", "m.Q4_0.gguf"),
        (["m-Q6_K_L.gguf", "m-Q8_0.gguf"], "Q6_K", "m-Q6_K_L.gguf"),
    ],
)
def test_a_quantization_is_the_whole_name_if_there_is_one(files: list[str], wanted: str, path: str) -> None:
    """llama.cpp does the same. Many repositories have both Q6_K and Q6_K_L."""
    assert gguf_file(files, wanted, "a/b") == path


@pytest.mark.parametrize(
    ("files", "proposed"),
    [
        (["a/m-Q4_0.gguf", "b/m-Q4_0.gguf"], "a/m-Q4_0.gguf"),
        (["m-Q4_0.gguf", "n/m-Q4_0.gguf"], "m-Q4_0.gguf"),
        (["m[1]-Q4_0.gguf", "m[2]-Q4_0.gguf"], "m[1]-Q4_0.gguf"),
        (["m-v1-Q4_0.gguf", "m-v2-Q4_0.gguf", "m-v2-Q8_0.gguf"], "Q8_0"),
        (["m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf", "m-Q8_0.gguf"], "Q8_0"),
    ],
)
def test_a_refusal_proposes_a_choice_that_works(files: list[str], proposed: str) -> None:
    with pytest.raises(ModelError, match=f"; name one, such as a/b:{re.escape(proposed)}. There are"):
        gguf_file(files, None, "a/b")
    assert gguf_file(files, proposed, "a/b") in files


def test_the_only_gguf_file_needs_no_name() -> None:
    assert gguf_file(["a.txt", "only.gguf", "mmproj.gguf"], None, "a/b") == "only.gguf"
    assert gguf_file(["m-00001-of-00001.gguf"], None, "a/b") == "m-00001-of-00001.gguf"


def test_an_index_names_the_files(tmp_path: Path) -> None:
    assert indexed_files(tmp_path) == ["model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b", "y": "a", "z": "b"}}))
    assert indexed_files(tmp_path) == ["a", "b"]
    index.write_text("{}")
    with pytest.raises(ModelError, match="expected a 'weight_map'"):
        indexed_files(tmp_path)


def test_a_single_file_comes_before_an_index(tmp_path: Path) -> None:
    """transformers leaves the index of earlier files if a model is saved again to the same folder."""
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "a"}}')
    assert indexed_files(tmp_path, ["model.safetensors"]) == ["model.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert indexed_files(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize(
    "name", ["/etc/x.safetensors", "../x.safetensors", "a/../../x.safetensors", "..", 300 * "x"]
)
def test_an_index_names_only_files_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelError, match=rf"index\.json: {repr(name)[:80]} is not a file of this folder"):
        indexed_files(tmp_path)


def _save_in_two_files(folder: Path, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    save_file(first, folder / "a.safetensors")
    save_file(second, folder / "b.safetensors")
    weight_map = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(second, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    "other", [torch.tensor([0, 1, 3]), torch.tensor([[0, 1, 2]]), torch.tensor([0.0, 1.0, 2.0])]
)
def test_different_tensors_of_one_name_are_refused(tmp_path: Path, other: torch.Tensor) -> None:
    _save_in_two_files(tmp_path, {"x": torch.arange(3), "y": torch.ones(1)}, {"x": other})
    message = r"the tensor x of a\.safetensors differs from that of b\.safetensors"
    for read in (CheckpointIndex.read, stored_tensors):
        with pytest.raises(ModelError, match=message):
            read(tmp_path)


def test_equal_tensors_of_one_name_are_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.loading.model_files.COMPARED_BYTES", 5)
    _save_in_two_files(tmp_path, {"x": torch.arange(3)}, {"w": torch.ones(7), "x": torch.arange(3)})
    assert set(CheckpointIndex.read(tmp_path).names) == set(stored_tensors(tmp_path)) == {"w", "x"}


def test_a_tensor_that_is_also_a_part_of_a_stacked_one_is_refused(tmp_path: Path) -> None:
    stack, part = "x.experts.down_proj_bias", "x.experts.1.down_proj.bias"
    _save_in_two_files(tmp_path, {stack: torch.ones(2, 3)}, {part: torch.zeros(3)})
    with pytest.raises(ModelError, match=f"{part} is both a tensor and a part of a stacked tensor"):
        CheckpointIndex.read(tmp_path)


def test_json_that_nests_too_deep_is_an_error_like_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: maximum recursion"):
        read_json(tmp_path / "config.json")


def test_a_stack_without_numbers_is_not_divided_into_experts(tmp_path: Path) -> None:
    """A few bytes could name any number of experts."""
    entry = {"dtype": "U8", "shape": [10**12, 0], "data_offsets": [0, 0]}
    header = json.dumps({"x.experts.down_proj": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert list(CheckpointIndex.read(tmp_path).names) == ["x.experts.down_proj"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2**20).to_bytes(8, "little") + b"{}",
        b"\x02" + bytes(7) + b"[]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        b"\x02" + bytes(7) + b"{}more",
        b"\x08" + bytes(7) + b'{"a": 1}',
        b"\x40" + bytes(7) + b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}    123',
        b"\x3f" + bytes(7) + b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4.0]}}' + b" 1234",
        b"\x3f" + bytes(7) + b'{"a": {"dtype": "U8", "shape": [4.5], "data_offsets": [0, 4]}}' + b" 1234",
        b"\x41" + bytes(7) + b'{"a": {"dtype": "U8", "shape": [-2, -2], "data_offsets": [0, 4]}}' + b"1234",
    ],
)
def test_a_damaged_header_names_its_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ModelError, match=rf"{tmp_path}/x is not a readable safetensors file"):
        read_safetensors_header(tmp_path / "x")


@pytest.mark.parametrize(
    ("ranges", "problem"),
    [
        (((0, 8), (4, 12)), "tensor b begins at byte 204 of the file, but should begin at byte 208"),
        (((0, 8), (0, 8)), "tensor a begins at byte 200 of the file, but should begin at byte 208"),
        (((0, 8), (12, 20)), "tensor b begins at byte 212 of the file, but should begin at byte 208"),
        (((8, 16), (16, 24)), "tensor a begins at byte 208 of the file, but should begin at byte 200"),
        (((0, 8), (8, 20)), "a tensor of type F32 and shape [2] has 12 bytes"),
    ],
)
def test_tensors_that_overlap_or_leave_bytes_out_are_refused(
    tmp_path: Path, ranges: tuple[tuple[int, int], tuple[int, int]], problem: str
) -> None:
    """The library of the format refuses them, too, but only when a worker has started."""
    a, b = ({"dtype": "F32", "shape": [2], "data_offsets": offsets} for offsets in ranges)
    header = json.dumps({"b": b, "a": a}).encode().ljust(192)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(max(end for _, end in ranges)))
    with pytest.raises(ModelError, match=re.escape(problem)):
        read_safetensors_header(file)
    with pytest.raises(ModelError, match="is not a readable safetensors file"):
        open_safetensors(file)


def test_the_bytes_of_every_type_that_is_read_are_known() -> None:
    sizes = {name: dtype.itemsize for name, dtype in (DTYPES | CODES).items()}
    assert sizes == VALUE_BYTES
