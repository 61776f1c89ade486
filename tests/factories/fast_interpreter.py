"""Triton's interpreter without its slowest part: it replaces Triton's language anew for each call of a function by a
kernel, though the kernel's launch has done that. Import this where kernels are interpreted; it is never undone.

Functions of Triton's own library see `tl.core`, which their first call replaces for good, as without this.
"""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang


def _patch_lang_once(fn: Any) -> Any:
    modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    # a builtin that is not replaced yet stands for all of its module
    if not modules or any(tl.core.is_builtin(module.load) for module in modules):
        return _patch_lang(fn)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_lang_once
