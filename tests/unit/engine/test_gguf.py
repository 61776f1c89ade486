"""GGUF headers: what a file says, and files that are damaged or not supported."""

import random
import struct
from pathlib import Path

import pytest

from baton.errors import ModelError
from engine.loading.gguf import GgufType, read_gguf
from tests.factories.gguf_files import make_gguf
from tests.factories.models import make_model_dir


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return make_gguf(folder / "tiny.gguf", make_model_dir(folder / "model"), "Q4_1")


def test_metadata_and_tensors(gguf_file: Path) -> None:
    file = read_gguf(gguf_file)
    assert file.need("general.architecture", str) == "llama"
    assert file.need("llama.block_count", int) == 3
    assert file.need("llama.attention.layer_norm_rms_epsilon", float) == pytest.approx(1e-6)
    assert len(file.strings("tokenizer.ggml.tokens")) == 300
    assert file.numbers("tokenizer.ggml.token_type")[:4] == [3.0, 3.0, 3.0, 1.0]
    down = file.tensors["blk.2.ffn_down.weight"]
    assert (down.type, down.shape, down.row_bytes) == (GgufType.Q4_1, (64, 128), 80)
    assert (
        max(tensor.offset + tensor.num_bytes for tensor in file.tensors.values()) <= gguf_file.stat().st_size
    )


def test_a_key_of_another_type_is_named(gguf_file: Path) -> None:
    file = read_gguf(gguf_file)
    with pytest.raises(ModelError, match=r"tiny.gguf: llama.block_count must be of type str, got 3"):
        file.get("llama.block_count", str)
    with pytest.raises(ModelError, match=r"the metadata key llama.missing is missing"):
        file.need("llama.missing", int)
    with pytest.raises(ModelError, match=r"general.architecture must be a list of strings"):
        file.strings("general.architecture")


def header(*, version: int = 3, tensors: int = 0, keys: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, kind: int = 0, shape: tuple[int, ...] = (4,), offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot read"),
        (b"GGU", "does not begin with 'GGUF'"),
        (b"safetensors are another format", "does not begin with 'GGUF'"),
        (header(version=1), "version 1 is not supported"),
        (header(version=0x03000000), "big-endian files are not supported"),
        (b"GGUF\x03\0\0\0", "the file ends early"),
        (header(tensors=2**60), "claims to have 1,152,921,504,606,846,976 tensors"),
        (header(keys=5), "claims to have 5 metadata keys"),
        (
            header(keys=1, rest=text("list") + struct.pack("<IIQ", 9, 0, 2**24 + 1)),
            "the metadata key list has 16,777,217 values; supported are 16,777,216",
        ),
        (header(keys=1, rest=struct.pack("<Q", 2**63) + bytes(16)), "is cut off"),
        (header(keys=1, rest=struct.pack("<Q", 2**64 - 1) + bytes(16)), "is cut off"),
        (header(keys=1, rest=struct.pack("<Q", 2) + b"\xff\xff" + bytes(16)), "not UTF-8"),
        (header(keys=1, rest=text("k") + struct.pack("<II", 13, 0)), "k has type 13"),
        (header(keys=1, rest=text("k") + struct.pack("<IIQ", 9, 9, 1)), "k is a list of lists"),
        (header(keys=1, rest=text("k") + struct.pack("<IIQ", 9, 8, 2**20)), "bytes are missing"),
        (header(keys=1, rest=text("k") + struct.pack("<IIQ", 9, 5, 2**24)), "bytes are missing"),
        (header(keys=2, rest=2 * (text("k") + struct.pack("<II", 4, 1))), "k appears twice"),
        (
            header(tensors=1, rest=tensor("t", kind=10)),
            "t has type 10, which is not supported; supported are F32",
        ),
        (header(tensors=1, rest=tensor("t", shape=())), "t has 0 dimensions"),
        (header(tensors=1, rest=tensor("t", shape=(1,) * 5)), "t has 5 dimensions"),
        (header(tensors=1, rest=tensor("t", shape=(4, 0))), r"t has shape \[0, 4\]"),
        (
            header(tensors=1, rest=tensor("t", kind=2, shape=(33,))),
            "t is Q4_0, but 33 is not a multiple of 32",
        ),
        (header(tensors=1, rest=tensor("t", shape=(2**40, 2**40))), "t ends at byte"),
        (header(tensors=1, rest=tensor("t", offset=2**63)), "t ends at byte"),
        (header(tensors=2, rest=2 * tensor("t") + bytes(64)), "t appears twice"),
        (
            header(tensors=1, rest=tensor("t", offset=4) + bytes(64)),
            "t has offset 4, which is not a multiple of 32",
        ),
        (
            header(keys=1, rest=text("general.alignment") + struct.pack("<II", 4, 0)),
            "general.alignment must be a positive multiple of 8, got 0",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"bad\.gguf.*{message}|{message}.*bad\.gguf"):
        read_gguf(path)


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path, gguf_file: Path) -> None:
    content = gguf_file.read_bytes()
    path = tmp_path / "cut.gguf"
    cuts = {*range(0, 200, 7), *random.Random(3).sample(range(len(content)), 60), len(content) - 1}
    for cut in sorted(cuts):
        path.write_bytes(content[:cut])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            read_gguf(path)


def test_a_damaged_file_is_refused_or_stays_inside_itself(tmp_path: Path, gguf_file: Path) -> None:
    """Random bytes of the header are changed. At most, this causes a ModelError, and no tensor reaches past the end of
    the file."""
    content = gguf_file.read_bytes()
    data_offset = read_gguf(gguf_file).data_offset
    rng = random.Random(5)
    path = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(data_offset)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            file = read_gguf(path)
        except ModelError:
            num_refused += 1
        else:
            assert all(t.offset + t.num_bytes <= len(damaged) for t in file.tensors.values())
    assert num_refused > 50


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*none\.gguf"):
        read_gguf(tmp_path / "none.gguf")
