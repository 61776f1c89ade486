"""Triton's interpreter without what takes most of its time and changes no number. Import this where kernels are
interpreted; it is never undone.

Triton replaces its language anew for every launch, and describes every value's type anew. It also computes which sums
of integers overflow, though it looks at the answer only when it debugs.
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
_init_block_type = tl.block_type.__init__
_broadcast = TritonSemantic.broadcast_impl_value


@cache
def _patch_lang_for_good(fn: Any) -> Any:
    _patch_lang(fn)
    return _NOTHING_TO_RESTORE


@cache
def _block_type(element_ty: Any, shape: tuple[int, ...]) -> Any:
    made = object.__new__(tl.block_type)
    _init_block_type(made, element_ty, list(shape))
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
    self.numel, self.shape = _numel_and_shape(tuple(type.shape.values) if type.is_block() else ())


def _broadcast_if_needed(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.numel is rhs.numel and lhs.shape is rhs.shape:
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


for type_without_hash in (tl.pointer_type, tl.block_type):
    type_without_hash.__hash__ = tl.dtype.__hash__
interpreter._patch_lang = _patch_lang_for_good
interpreter._get_np_dtype = cache(interpreter._get_np_dtype)
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
tl.block_type.__init__ = _copy_block_type
tl.block_type.with_element_ty = _with_element_ty
tl.tensor.__init__ = _init_tensor
TritonSemantic.broadcast_impl_value = _broadcast_if_needed
