"""Quantized checkpoints of published kinds, packed from tiny models by the formats' definitions.

The packers follow the writers of the formats: compressed-tensors (`pack_to_int32`), GPTQModel (`pack_original`),
AutoAWQ (`WQLinear_GEMM.from_linear`), transformers (integrations/finegrained_fp8.py).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a matrix, without the module's name, and its numbers in float32."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of checkpoint: its configuration, and a function that packs a matrix."""

    config: Mapping[str, Any]
    """The `quantization_config` of the checkpoint."""
    write: Callable[[torch.Tensor], Written]


def make_quantized(
    path: Path, source: Path, kind: Kind, ignored: Callable[[str], bool] = lambda name: name == "lm_head"
) -> tuple[Path, Path]:
    """Two folders: a tiny model in such a checkpoint, and the same numbers in float32."""
    stored: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if tensor.dim() == 1 or "embed_tokens" in name or ignored(module):
            stored[name] = numbers[name] = tensor
            continue
        parts, numbers[name] = kind.write(tensor.float())
        stored |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    return _written(path, source, stored, numbers, kind.config)


def make_mxfp4(path: Path, source: Path) -> tuple[Path, Path]:
    """Like `make_quantized`, for a tiny gpt-oss in OpenAI's MXFP4. The numbers are transformers'."""
    from transformers.integrations.mxfp4 import (
        convert_moe_packed_tensors,  # takes seconds to import, and all test processes import this file
    )

    stored: dict[str, torch.Tensor] = {}
    numbers: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = numbers[name] = tensor
            continue
        blocks, scales = mxfp4_tensors(tensor.transpose(1, 2))
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        numbers[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    return _written(path, source, stored, numbers, config)


def mxfp4_tensors(weight_XOI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs a matrix as MXFP4: the nearest 4-bit floats, by definition.

    A block of 32 inputs has 16 bytes, with the first input of two in the low bits. Exponents have a bias of
    127.
    """
    floats = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    floats = torch.cat((floats, -floats))
    groups = weight_XOI.float().unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6.0).log2().ceil()
    scaled = torch.ldexp(groups, -exponents.unsqueeze(-1).int())
    codes = (scaled.unsqueeze(-1) - floats).abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def _written(
    path: Path,
    source: Path,
    stored: Mapping[str, torch.Tensor],
    numbers: Mapping[str, torch.Tensor],
    quantization: Mapping[str, Any],
) -> tuple[Path, Path]:
    config = json.loads((source / "config.json").read_text())
    folders = path / "quantized", path / "numbers"
    for folder, tensors, method in zip(folders, (stored, numbers), (quantization, None), strict=True):
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.name not in ("config.json", "model.safetensors"):
                (folder / file.name).write_bytes(file.read_bytes())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folders


def compressed_tensors(stored_as: str, **weights: Any) -> dict[str, Any]:
    """The `quantization_config` that llm-compressor writes."""
    group = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group | {"weights": {"dynamic": False, "observer": "minmax"} | weights}},
    }


def gptq(bits: int, group_size: int, **other: Any) -> dict[str, Any]:
    """The `quantization_config` that GPTQModel writes."""
    given = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": False}
    return given | {"damp_percent": 0.1, "true_sequential": True, "checkpoint_format": "gptq"} | other


def fp8_rows(weight: torch.Tensor, *, is_whole: bool = False) -> Written:
    """fp8 with a scale for each output, or with `is_whole` one scale for all."""
    largest = weight.abs().amax() if is_whole else weight.abs().amax(1, keepdim=True)
    scale = (largest / 448).to(torch.bfloat16)
    values = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def fp8_blocks(weight: torch.Tensor, rows: int, columns: int) -> Written:
    """fp8 with a scale for each block. The last blocks may be smaller."""
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    numbers = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            numbers[block] = values[block].float() * scales[i, j]
    return {"weight": values, "weight_scale_inv": scales}, numbers


def int8_rows(weight: torch.Tensor) -> Written:
    """int8 W8A8: symmetric, with a scale for each output."""
    values, scales, _ = rounded(weight, 8, weight.shape[1], is_symmetric=True)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales.float()


def packed(weight: torch.Tensor, bits: int, group_size: int, *, is_symmetric: bool = True) -> Written:
    """pack-quantized: packed along the inputs. Zero points are packed along the outputs."""
    values, scales, zeros = rounded(weight, bits, group_size, is_symmetric=is_symmetric)
    half = 2 ** (bits - 1)
    tensors = {
        "weight_packed": int32s(values + half, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = int32s((zeros + half).t(), bits).t()
    return tensors, spread(values, scales, zeros, torch.arange(weight.shape[1]) // group_size)


def gptq_tensors(
    weight: torch.Tensor, bits: int, group_size: int, *, is_v2: bool = False, has_order: bool = False
) -> Written:
    """Packs as GPTQ: everything is transposed.

    With `has_order`, a group's inputs are anywhere, as with act-order.
    """
    num_inputs = weight.shape[1]
    order = torch.arange(num_inputs)
    if has_order:
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
    g_idx = torch.empty(num_inputs, dtype=torch.int32)
    g_idx[order] = (torch.arange(num_inputs) // group_size).to(torch.int32)
    in_groups, scales, zeros = rounded(weight[:, order], bits, group_size)
    values = torch.empty_like(in_groups)
    values[:, order] = in_groups
    half = 2 ** (bits - 1)
    qzeros = int32s((zeros + half).t(), bits)
    if not is_v2:  # GPTQModel subtracts 1 from the packed zero points
        ones = sum(1 << bits * i for i in range(32 // bits))
        qzeros = torch.from_numpy((qzeros.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    tensors = {
        "qweight": int32s((values + half), bits).t(),
        "qzeros": qzeros,
        "scales": scales.t(),
        "g_idx": g_idx,
    }
    return tensors, spread(values, scales, zeros, g_idx.long())


def awq_tensors(weight: torch.Tensor, group_size: int) -> Written:
    """Packs as AWQ: along the outputs, in AWQ's order."""
    values, scales, zeros = rounded(weight, 4, group_size)
    order = [8 * i + j for i in range(len(weight) // 8) for j in AWQ_ORDER]
    tensors = {
        "qweight": int32s((values + 8).t()[:, order], 4),
        "qzeros": int32s((zeros + 8).t()[:, order], 4),
        "scales": scales.t(),
    }
    return tensors, spread(values, scales, zeros, torch.arange(weight.shape[1]) // group_size)


def rounded(
    weight: torch.Tensor, bits: int, group_size: int, *, is_symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values (O x I), float16 scales, zero points (O x G).

    Values and zero points are signed integers in float32.
    """
    groups = weight.unflatten(1, (-1, group_size))
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if is_symmetric:
        scales = (groups.abs().amax(-1) / highest).to(torch.float16)
        zeros = torch.zeros_like(groups[..., 0])
    else:
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / (highest - lowest)).to(torch.float16)
        zeros = (lowest - low / scales.float()).round().clamp(lowest, highest)
    values = (groups / scales.float().unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return values.clamp(lowest, highest).flatten(1), scales, zeros


def spread(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """The numbers of a matrix: each value with the scale and the zero point of its group."""
    columns = [
        (values[:, i] - zeros[:, group]) * scales[:, group].float() for i, group in enumerate(groups.tolist())
    ]
    return torch.stack(columns, 1)


def int32s(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs unsigned values along the last dimension, from the lowest bits on.

    The last integer may have unused bits.
    """
    per_int = 32 // bits
    given: npt.NDArray[np.uint32] = values.numpy().astype(np.uint32)
    given = np.pad(given, ((0, 0), (0, -given.shape[1] % per_int)))
    out = np.zeros((given.shape[0], given.shape[1] // per_int), np.uint32)
    for i in range(per_int):
        out |= given[:, i::per_int] << np.uint32(bits * i)
    return torch.from_numpy(out.view(np.int32))


KINDS: dict[str, Kind] = {
    "fp8 by tensor": Kind(
        compressed_tensors("float-quantized", num_bits=8, type="float", strategy="tensor"),
        lambda weight: fp8_rows(weight, is_whole=True),
    ),
    "fp8 by channel": Kind(
        compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_rows
    ),
    "fp8 by block": Kind(
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [48, 48],
            "modules_to_not_convert": ["lm_head"],
        },
        lambda weight: fp8_blocks(weight, 48, 48),
    ),
    "int8 by channel": Kind(
        compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"), int8_rows
    ),
    "int4, groups of 32": Kind(
        compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        lambda weight: packed(weight, 4, 32),
    ),
    "int4, groups of 128": Kind(
        compressed_tensors("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
        lambda weight: packed(weight, 4, 128),
    ),
    "int4, groups of 64, asymmetric": Kind(
        compressed_tensors(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=64, symmetric=False
        ),
        lambda weight: packed(weight, 4, 64, is_symmetric=False),
    ),
    "gptq, 4 bits": Kind(gptq(4, 64), lambda weight: gptq_tensors(weight, 4, 64)),
    "gptq, 8 bits": Kind(gptq(8, 32), lambda weight: gptq_tensors(weight, 8, 32)),
    "gptq, second format": Kind(
        gptq(4, 128, checkpoint_format="gptq_v2"), lambda weight: gptq_tensors(weight, 4, 128, is_v2=True)
    ),
    "gptq, act-order": Kind(
        gptq(4, 32, desc_act=True), lambda weight: gptq_tensors(weight, 4, 32, has_order=True)
    ),
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
        lambda weight: awq_tensors(weight, 64),
    ),
}
IN_GROUPS = [name for name in KINDS if "fp8" not in name and "act-order" not in name]
"""Kinds whose matrices are not converted to wider numbers on a CPU."""
