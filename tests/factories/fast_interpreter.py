"""Makes Triton's interpreter faster: leaves out what takes most of its time, but changes no number. Import
this where kernels are interpreted; it is never undone.

For every launch, Triton replaces the functions of its language again. For every value, it describes the type again.
For every operation, it decides to which type and shape both operands are converted, although most operands need no
conversion. It also computes which sums of integers overflow, but uses the answer only when it debugs.
"""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_NOTHING_TO_RESTORE = interpreter._LangPatchScope()

_patch_lang = interpreter._patch_lang
_patch_attr = interpreter._patch_attr
_init_block_type = tl.block_type.__init__
_unwrap = tl.core._unwrap_if_constexpr
_check_types = TritonSemantic.binary_op_type_checking_impl
_broadcast = TritonSemantic.broadcast_impl_value
_CHECK_OF_BUILTINS = tl.core.builtin(lambda: None).__code__
_PLAIN = frozenset({tl.tensor, tl.dtype, tl.pointer_type, tl.block_type, int, float, bool, str, type(None)})
"""Types of values that are no constexpr and contain none."""


@cache
def _patch_lang_for_good(fn: Any) -> Any:
    _patch_lang(fn)
    return _NOTHING_TO_RESTORE


@cache
def _block_type(element_ty: Any, shape: tuple[int, ...]) -> Any:
    made = object.__new__(tl.block_type)
    _init_block_type(made, element_ty, list(shape))
    made.numel_and_shape = _numel_and_shape(shape)
    return made


def _copy_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    self.__dict__.update(_block_type(element_ty, sizes).__dict__)


def _with_element_ty(self: Any, element_ty: Any) -> Any:
    return _block_type(element_ty, tuple(self.shape.values))


@cache
def _numel_and_shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Of a tensor."""
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.numel, self.shape = type.numel_and_shape if type.is_block() else _numel_and_shape(())


def _patch_attr_directly(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Like `_patch_attr`. But a builtin does not check whether it got a `_semantic`, since it always gets one here."""
    if getattr(member, "__code__", None) is not _CHECK_OF_BUILTINS:
        _patch_attr(obj, name, member, builder, scope)
        return
    function, semantic = member.__wrapped__, interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _unwrap_if_constexpr(value: Any) -> Any:
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrap(value)


def _fits(data: Any, dtype: Any) -> bool:
    return isinstance(dtype, tl.pointer_type) or data.itemsize <= max(1, dtype.primitive_bitwidth // 8)


def _broadcast_operands(
    self: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Converts only shapes if both operands have one type, or if one is a pointer to which an integer is added."""
    if type(lhs) is tl.tensor and type(rhs) is tl.tensor and not div_or_mod:
        left, right = lhs.dtype, rhs.dtype
        if (
            right.is_int() and allow_lhs_ptr if left.is_ptr() else left.name == right.name
        ):  # a pointer has the name of its type
            return self.broadcast_impl_value(lhs, rhs)
    return _check_types(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def _broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.shape is rhs.shape:
        return lhs, rhs
    if not (lhs.type.is_block() and rhs.type.is_block()):
        return _broadcast(self, lhs, rhs)
    left, right = tuple(lhs.type.shape.values), tuple(rhs.type.shape.values)
    if len(left) != len(right):
        return _broadcast(self, lhs, rhs)
    common = _common_shape(left, right)
    return _as_large(self, lhs, left, common), _as_large(self, rhs, right, common)


@cache
def _common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    if not all(1 in sizes or sizes[0] == sizes[1] for sizes in zip(left, right, strict=True)):
        raise ValueError(f"Cannot make_shape_compatible: incompatible dimensions: {left} and {right}")
    return tuple([max(sizes) for sizes in zip(left, right, strict=True)])


def _as_large(self: Any, tensor: Any, shape: tuple[int, ...], common: tuple[int, ...]) -> Any:
    if shape == common:
        return tensor
    handle = self.builder.create_broadcast(tensor.handle, common)
    return self.make_tensor(handle, _block_type(tensor.type.scalar, common))


for type_without_hash in (tl.pointer_type, tl.block_type):
    type_without_hash.__hash__ = tl.dtype.__hash__
interpreter._patch_lang = _patch_lang_for_good
interpreter._patch_attr = _patch_attr_directly
interpreter._validate_np_data_size = _fits
interpreter._get_np_dtype = cache(interpreter._get_np_dtype)
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
tl.block_type.__init__ = _copy_block_type
tl.block_type.with_element_ty = _with_element_ty
tl.tensor.__init__ = _init_tensor
tl.core._unwrap_if_constexpr = _unwrap_if_constexpr
TritonSemantic.binary_op_type_checking_impl = _broadcast_operands
TritonSemantic.broadcast_impl_value = _broadcast_if_needed
