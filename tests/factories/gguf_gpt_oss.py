"""The tensors of gpt-oss as llama.cpp's converter stores them in GGUF files, and back.

Checkpoints have an expert's gates and ups in turns, GGUF files have them apart.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

Blocks = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def stored_tensors(model: Path) -> Iterator[tuple[str, torch.Tensor | Blocks]]:
    """All tensors by their names with `.weight` or `.bias`; experts in MXFP4 as the blocks of a GGUF file."""
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        stem, mark, part = name.partition(".experts.")
        if name.endswith(".sinks"):
            yield f"{name}.weight", tensor
        elif not mark:
            yield name, tensor
        elif part.endswith("_bias"):
            yield from _apart(f"{stem}.experts", part.removesuffix("_bias"), "bias", tensor)
        elif part.endswith("_blocks"):
            blocks = torch.cat(
                (tensors[name.replace("_blocks", "_scales")].unsqueeze(-1), _halves(tensor)), -1
            )
            rows = blocks.flatten(2)
            for full, each in _apart(f"{stem}.experts", part.removesuffix("_blocks"), "weight", rows):
                yield full, each.contiguous().numpy()
        elif not part.endswith("_scales"):
            yield from _apart(f"{stem}.experts", part, "weight", tensor.transpose(1, 2))


def joined(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, dequantized, as transformers has them."""
    result = {}
    for name, tensor in state.items():
        stem, mark, part = name.partition(".experts.")
        suffix = "_bias" if part.endswith(".bias") else ""
        if not mark:
            name = name.replace(".mlp.gate.", ".mlp.router.")
            result[name.removesuffix(".weight") if ".sinks." in name else name] = tensor
        elif part.startswith("down_proj"):
            result[f"{stem}.experts.down_proj{suffix}"] = tensor if suffix else tensor.transpose(1, 2)
        elif part.startswith("gate_proj"):
            pairs = torch.stack((tensor, state[name.replace("gate_proj", "up_proj")]), 2).flatten(1, 2)
            result[f"{stem}.experts.gate_up_proj{suffix}"] = pairs if suffix else pairs.transpose(1, 2)
    return result


def _apart(experts: str, part: str, suffix: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensor`: experts first, then outputs."""
    if part == "down_proj":
        yield f"{experts}.down_proj.{suffix}", tensor
    else:
        yield f"{experts}.gate_proj.{suffix}", tensor[:, 0::2]
        yield f"{experts}.up_proj.{suffix}", tensor[:, 1::2]


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """MXFP4's 16 bytes with two neighbours each -> GGUF's, with the values i and i + 16."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return codes[..., :16] | codes[..., 16:] << 4
