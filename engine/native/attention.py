"""The functions and structures of attention.cpp; attention_step.h explains them."""

import ctypes

from engine.request_table import IntArray

MAX_HEAD_DIM = 576
HEAD_DIM_MULTIPLE = 16
"""Head dimensions must be multiples of this number, which is the number of lanes of the widest vectors."""
TILE_ROWS = 96
RANGE_KEYS = 256
MAX_PARTIALS = 2**24
"""The most floats of a step's partial results; they take 64 MiB."""
ITEM_FIELDS, MERGE_FIELDS = 10, 3
"""Numbers of fields of an item and of a merge; each field has 64 bits."""


class Step(ctypes.Structure):
    """A step. Its addresses belong to arrays that must live at least as long as the step."""

    _fields_ = (
        ("activation_type", ctypes.c_int64),
        ("pool_type", ctypes.c_int64),
        ("num_layers", ctypes.c_int64),
        ("num_planes", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("rotated_from", ctypes.c_int64),
        ("pool", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("num_requests", ctypes.c_int64),
        ("num_decodes", ctypes.c_int64),
        ("max_blocks", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("positions_T", ctypes.c_void_p),
        ("slots_T", ctypes.c_void_p),
        ("starts_B", ctypes.c_void_p),
        ("num_tokens_B", ctypes.c_void_p),
        ("context_lens_B", ctypes.c_void_p),
        ("block_ids_BM", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )


class AttentionKernels:
    """The library's functions, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self.plan = library.baton_plan_attention
        self.plan.argtypes = (address, number, address, address, address)
        self.rope_store = library.baton_rope_store
        self.rope_store.argtypes = (address, number, *(address,) * 4, ctypes.c_float)
        self.attend = library.baton_attend
        self.attend.argtypes = (
            *(address, number, number, address, address),
            *(address, number, address, number, address, address),
        )
        for function in (self.plan, self.rope_store, self.attend):
            function.restype = None


def most_items(num_tokens_B: IntArray, context_lens_B: IntArray, num_heads: int, num_kv_heads: int) -> int:
    """An upper bound for the number of a step's items, and also for the number of its merges."""
    tile = max(1, TILE_ROWS * num_kv_heads // num_heads)
    num_ranges_B = -(-context_lens_B // RANGE_KEYS)
    return num_kv_heads * int((-(-num_tokens_B // tile) * num_ranges_B).sum())
