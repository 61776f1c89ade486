"""StoredMatrix: the tensors of a quantized matrix, and how they become a CodedMatrix; reads no file.

Only a rank's part of the values is read, if the part begins and ends between two 32-bit integers. Scales and
zero points are read as a whole: they are small, and any input may belong to any group.

Sources of the layouts: compressed-tensors (compressors/quantized_compressors), GPTQModel (nn_modules/qlinear),
AutoAWQ (awq/utils/packing_utils.py), transformers (integrations/finegrained_fp8.py, integrations/mxfp4.py).

Shape suffixes: O outputs, I inputs, G groups of inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.errors import ModelError
from engine.layers.grouped_weight import E2M1
from engine.loading.coded_matrix import CodedMatrix, gptq_zeros, unpacked, unpacked_awq
from engine.loading.safetensors_index import CODES, DTYPES, CheckpointIndex
from engine.loading.weights import Shard, Take
from engine.quantization_scheme import MXFP4_BLOCK, Layout, Scheme

_SCALES = DTYPES | {"F8_E8M0": CODES["F8_E8M0"]}
_BYTES = {"U8": torch.uint8}
_INT32 = {"I32": torch.int32}
_INDICES = {"I32": torch.int32, "I64": torch.int64}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One rank's part of a matrix, and where it is stored."""

    scheme: Scheme
    take: Take
    """The model's request for the matrix."""
    parts: Mapping[str, Take]
    """Requests for the stored tensors, by role: values, scales, zeros, order, shape."""
    reads_part: bool
    """Whether only the rank's part of the values is read; else the part is cut out of all values."""

    @classmethod
    def find(cls, index: CheckpointIndex, scheme: Scheme, take: Take) -> "StoredMatrix | None":
        """Finds a matrix; None if it is not quantized. ModelError if a tensor does not match the scheme."""
        module = take.name.removesuffix(".weight")
        mark = next((name for name in scheme.marks if f"{module}.{name}" in index.names), None)
        if mark is None:
            return None
        values, reads_part = _values(scheme, module, take)
        parts = {"values": values}
        index.find(values.name, values.shape, _value_types(scheme))
        others = _by_outputs(index, scheme, module, take, mark) if _is_by_outputs(scheme) else None
        parts |= others or _by_inputs(index, scheme, module, take)
        return cls(scheme, take, parts, reads_part)

    def coded(self, tensors: Mapping[str, torch.Tensor]) -> CodedMatrix:
        """The rank's part, from the tensors of `parts`."""
        scheme, num_outputs = self.scheme, self.take.shape[0]
        outputs, inputs = self._slices()
        self._check_shape(tensors.get("shape"))
        values_OI = _decoded(scheme, tensors["values"])
        if not self.reads_part:
            values_OI = values_OI[outputs, inputs]
        rows, columns = self.take.part_shape  # the last integer of a row may have room for more values
        if _is_by_outputs(scheme):
            scales_OG = _spread(scheme, _scales(scheme, tensors["scales"]), num_outputs)
        else:
            scales_OG = tensors["scales"].to(torch.float32).t()
        zeros_OG = None if scheme.is_float else self._zeros(tensors.get("zeros"), scales_OG)
        groups_I = self._groups(tensors.get("order"), scales_OG)
        return CodedMatrix(
            values_OI[:rows, :columns].contiguous(),
            scheme.bits,
            scales_OG[outputs],
            None if zeros_OG is None else zeros_OG[outputs],
            groups_I[inputs],
            is_e2m1=scheme.layout is Layout.MXFP4,
        )

    def _check_shape(self, shape: torch.Tensor | None) -> None:
        if shape is not None and shape.tolist() != list(self.take.shape):
            name, implied = self.parts["shape"].name, list(self.take.shape)
            raise ModelError(f"tensor {name} is {shape.tolist()}, but config.json implies {implied}")

    def _slices(self) -> tuple[slice, slice]:
        shard, whole = self.take.shard, slice(None)
        if shard is None:
            return whole, whole
        part = shard.slice_of(self.take.name, self.take.shape)
        return (part, whole) if shard.dim == 0 else (whole, part)

    def _zeros(self, stored: torch.Tensor | None, scales_OG: torch.Tensor) -> torch.Tensor:
        """The unsigned values that mean zero: O x G, float32."""
        layout, bits, num_outputs = self.scheme.layout, self.scheme.bits, len(scales_OG)
        half = E2M1[0] if layout is Layout.MXFP4 else 2 ** (bits - 1)
        if stored is None:
            return torch.full_like(scales_OG, half)
        if layout is Layout.NUMBERS:
            return _spread(self.scheme, stored.to(torch.float32), num_outputs) + half
        if layout is Layout.PACKED:
            zeros_OG = unpacked(stored.t(), bits).t()
        elif layout is Layout.AWQ:
            zeros_OG = unpacked_awq(stored)
        else:
            zeros_OG = unpacked(gptq_zeros(stored, bits) if layout is Layout.GPTQ else stored, bits).t()
        return zeros_OG[:num_outputs].to(torch.float32)

    def _groups(self, order: torch.Tensor | None, scales_OG: torch.Tensor) -> torch.Tensor:
        """Each input's group; ModelError if the tensor names a group that does not exist.

        compressed-tensors fills a new order with -1, and ignores an order that contains a -1.
        """
        num_inputs, per_scale = self.take.shape[1], self.scheme.inputs_per_scale
        is_unset = order is not None and _is_by_outputs(self.scheme) and bool((order == -1).any())
        if order is None or is_unset:
            inputs_I = torch.arange(num_inputs, device=scales_OG.device)
            return torch.zeros_like(inputs_I) if per_scale is None else inputs_I // per_scale
        if int(order.min()) < 0 or int(order.max()) >= scales_OG.shape[1]:
            raise ModelError(
                f"tensor {self.parts['order'].name}: groups must be 0 to {scales_OG.shape[1] - 1}, got "
                f"{int(order.min())} to {int(order.max())}"
            )
        return order.to(torch.int64)


def _is_by_outputs(scheme: Scheme) -> bool:
    """Whether scales are stored output by output; GPTQ and AWQ store them group by group."""
    return scheme.layout in (Layout.NUMBERS, Layout.PACKED, Layout.MXFP4)


def _value_types(scheme: Scheme) -> Mapping[str, torch.dtype]:
    if scheme.layout is Layout.MXFP4:
        return _BYTES
    if scheme.layout is not Layout.NUMBERS:
        return _INT32
    name = "F8_E4M3" if scheme.is_float else "I8"
    return {name: CODES[name]}


def _values(scheme: Scheme, module: str, take: Take) -> tuple[Take, bool]:
    """The request for the values' tensor, and whether it is only for the rank's part."""
    (num_outputs, num_inputs), per_int = take.shape, 32 // scheme.bits
    # For each dimension of the tensor: its dimension in the matrix, and how many values share an integer.
    name, dims = scheme.values_name, ((0, 1), (1, 1))
    if scheme.layout is Layout.PACKED:
        dims = ((0, 1), (1, per_int))
    elif scheme.layout is Layout.MXFP4:
        dims = ((0, 1), (1, MXFP4_BLOCK))
    elif scheme.layout is Layout.AWQ:
        dims = ((1, 1), (0, per_int))
    elif scheme.layout in (Layout.GPTQ, Layout.GPTQ_V2):
        dims = ((1, per_int), (0, 1))
    shape = tuple(-(-(num_outputs, num_inputs)[dim] // packed) for dim, packed in dims)
    if scheme.layout is Layout.MXFP4:
        shape = (*shape, MXFP4_BLOCK // 2)  # bytes
    shard = take.shard
    if shard is None:
        return Take(f"{module}.{name}", shape, None), True
    part = shard.slice_of(take.name, take.shape)
    ((axis, packed),) = [(axis, packed) for axis, (dim, packed) in enumerate(dims) if dim == shard.dim]
    if part.start % packed or part.stop % packed:
        return Take(f"{module}.{name}", shape, None), False
    first, size = part.start // packed, (part.stop - part.start) // packed
    return Take(f"{module}.{name}", shape, Shard(axis, first=first, size=size)), True


def _by_outputs(
    index: CheckpointIndex, scheme: Scheme, module: str, take: Take, mark: str
) -> dict[str, Take]:
    """Requests for scales, zero points and order in compressed-tensors, fp8 and MXFP4."""
    num_outputs, num_inputs = take.shape
    rows, columns = (
        1 if per_scale is None else -(-size // per_scale)
        for size, per_scale in zip(
            take.shape, (scheme.outputs_per_scale, scheme.inputs_per_scale), strict=True
        )
    )
    shapes: list[tuple[int, ...]] = [(rows, columns)]
    if columns == 1:
        shapes.append((rows,))
        shapes += [()] if rows == 1 else []
    if scheme.layout is Layout.MXFP4:
        return {"scales": _whole(index, f"{module}.scales", shapes, _BYTES)}
    scale_name = mark if scheme.layout is Layout.NUMBERS else "weight_scale"
    parts = {"scales": _whole(index, f"{module}.{scale_name}", shapes, _SCALES)}
    zeros_name, order_name = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
    if scheme.has_zero_points or (zeros_name in index.names and not scheme.is_float):
        if scheme.layout is Layout.PACKED:
            zeros_shapes = [(-(-num_outputs * scheme.bits // 32), columns)]
            parts["zeros"] = _whole(index, zeros_name, zeros_shapes, _INT32)
        else:
            parts["zeros"] = _whole(index, zeros_name, shapes, {"I8": torch.int8})
    if scheme.has_own_order or order_name in index.names:
        parts["order"] = _whole(index, order_name, [(num_inputs,)], _INDICES)
    if f"{module}.weight_shape" in index.names:
        parts["shape"] = _whole(index, f"{module}.weight_shape", [(2,)], _INDICES)
    return parts


def _by_inputs(index: CheckpointIndex, scheme: Scheme, module: str, take: Take) -> dict[str, Take]:
    """Requests for scales, zero points and order in GPTQ and AWQ."""
    num_outputs, num_inputs = take.shape
    num_groups = 1 if scheme.inputs_per_scale is None else -(-num_inputs // scheme.inputs_per_scale)
    parts = {
        "scales": _whole(index, f"{module}.scales", [(num_groups, num_outputs)], _SCALES),
        "zeros": _whole(
            index, f"{module}.qzeros", [(num_groups, -(-num_outputs * scheme.bits // 32))], _INT32
        ),
    }
    if scheme.has_own_order or f"{module}.g_idx" in index.names:
        parts["order"] = _whole(index, f"{module}.g_idx", [(num_inputs,)], _INDICES)
    return parts


def _whole(
    index: CheckpointIndex, name: str, shapes: Sequence[tuple[int, ...]], types: Mapping[str, torch.dtype]
) -> Take:
    return Take(name, index.find_one_of(name, shapes, types).shape, None)


def _decoded(scheme: Scheme, stored: torch.Tensor) -> torch.Tensor:
    """Unsigned values or 8-bit floats, O x I."""
    if scheme.layout is Layout.MXFP4:
        return unpacked(stored.flatten(1), 4)
    if scheme.layout is Layout.PACKED:
        return unpacked(stored, scheme.bits)
    if scheme.layout is Layout.AWQ:
        return unpacked_awq(stored)
    if scheme.layout is not Layout.NUMBERS:
        return unpacked(stored.t(), scheme.bits)
    if scheme.is_float:
        return stored
    unsigned: torch.Tensor = stored.view(torch.uint8) ^ 0x80  # a signed byte + 128
    return unsigned.sub_(128 - 2 ** (scheme.bits - 1))


def _scales(scheme: Scheme, stored: torch.Tensor) -> torch.Tensor:
    """The scales in float32.

    MXFP4 stores exponents with a bias of 127. The codes of its values count halves, so scales are multiplied by 0.5.
    """
    if scheme.layout is Layout.MXFP4:
        return stored.view(torch.float8_e8m0fnu).to(torch.float32).mul_(0.5)
    return stored.to(torch.float32)


def _spread(scheme: Scheme, scales: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """O x G: repeats scales or zero points that several outputs share."""
    scales_RG = scales.view(scales.shape[0] if scales.dim() else 1, -1)
    if scheme.outputs_per_scale is None:
        return scales_RG.expand(num_outputs, -1)
    return scales_RG.repeat_interleave(scheme.outputs_per_scale, 0)[:num_outputs]
