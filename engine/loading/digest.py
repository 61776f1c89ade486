"""model_digest: identifies the model of a folder, and the way in which it is computed; loads no weights."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from engine.loading.commit import version_of
from engine.loading.gguf import read_gguf
from engine.loading.gguf_folder import gguf_of
from engine.loading.model_files import read_safetensors_header, weight_files

SPREAD_WINDOWS = 64
WINDOW_BYTES = 4096


def model_digest(
    path: Path,
    *,
    dummy_device: torch.device | None = None,
    quantization: str | None = None,
    activations: str | None = None,
    rotation: str | None = None,
    kv_scales: str | None = None,
) -> str:
    """Identifies the model that a folder contains, with everything that changes its keys and values.

    Copies of a folder have the same digest. Two commits of the Hub, two versions of an object store's folder, and two
    fine-tunes of a model have different digests. In other folders, a change may go unnoticed if it leaves the first and
    last 4 KiB of every tensor as they were.

    `dummy_device`: the device of dummy weights, if the model has no other weights; different GPUs make different
    numbers. `quantization`: how matrices are stored in memory; None: as numbers of the model's dtype. `activations`:
    the data type of activations, if the KV cache has another data type. `rotation`: which of config.json's factors
    LongRoPE uses. `kv_scales`: identifies the divisors of keys and values.

    The digest is the SHA-256 over config.json and, for each weight file, its name, its size, its header, 64
    windows of 4 KiB that are spread evenly over the content, and 4 KiB before and after each border between
    two tensors. Hashing everything would read the whole model at every start.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    parts = (quantization, activations, rotation, kv_scales, version_of(path))
    suffix = "".join(f"-{part}" for part in parts if part is not None)
    if dummy_device is not None:
        return f"{digest.hexdigest()}-dummy{_kind_of(dummy_device)}{suffix}"
    gguf = gguf_of(path)
    for file in weight_files(path) if gguf is None else [gguf]:
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        tensors = read_safetensors_header(file) if gguf is None else read_gguf(file).tensors
        for window in _windows(file, sorted(tensor.offset for tensor in tensors.values())):
            digest.update(window)
    return f"{digest.hexdigest()}{suffix}"


def _kind_of(device: torch.device) -> str:
    """Empty for CPUs, which make equal random numbers; else the GPU's name, since its size changes its random
    numbers."""
    return "" if device.type == "cpu" else f"-{device.type}-{torch.cuda.get_device_name(device)}"


def _windows(file: Path, offsets: Sequence[int]) -> Iterator[bytes]:
    """The header, evenly spread windows of the rest, and windows around each tensor's first byte."""
    size = file.stat().st_size
    header_bytes = min(offsets, default=size)
    last = max(size - WINDOW_BYTES, header_bytes)
    spread = [header_bytes + (last - header_bytes) * i // (SPREAD_WINDOWS - 1) for i in range(SPREAD_WINDOWS)]
    windows = [(0, header_bytes), *((begin, WINDOW_BYTES) for begin in spread)]
    windows += [(max(offset - WINDOW_BYTES, 0), 2 * WINDOW_BYTES) for offset in offsets]
    with file.open("rb") as stream:
        for begin, num_bytes in windows:
            stream.seek(begin)
            yield stream.read(num_bytes)
