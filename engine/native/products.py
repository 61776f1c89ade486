"""The C++ functions of products.h's kernels; arguments are addresses and sizes, which are not checked."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

STORE, ADD, GATE = range(3)
"""The values of `products::Epilogue`."""
NO_CENTRE = -1
"""The centre of a GroupedLayer with minima."""


class GroupedLayer(ctypes.Structure):
    """The structure of the same name in grouped_products.cpp."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("group_size", ctypes.c_int64),
        ("is_e2m1", ctypes.c_int64),
        ("centre", ctypes.c_int64),
        ("factor", ctypes.c_double),
    )


class FloatLayer(ctypes.Structure):
    """The structure of the same name in float_products.cpp."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("weight_type", ctypes.c_int64),
        ("by_units", ctypes.c_int64),
    )


_P, _N = ctypes.c_void_p, ctypes.c_int64
_PRODUCT = (_P, _P, _N, _N, _P, _N, _N, _N, _N, _N)
_PRODUCTS = (_P, _P, _N, _P, _N, _N, _P, _P, _N, _N, _N, _N)


class Product(NamedTuple):
    """Two functions: for the product of one layer, and for the products of many layers of equal shape."""

    one: Callable[..., None]
    many: Callable[..., None]


class Products:
    """The functions of a library; the .cpp files describe their arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.grouped_packed_bytes = library.grouped_packed_bytes
        self.grouped_packed_bytes.argtypes, self.grouped_packed_bytes.restype = (_N, _N, _N, _N, _N), _N
        self.grouped_pack = library.grouped_pack
        self.grouped_pack.argtypes, self.grouped_pack.restype = (_P, _P, _P, _N, _N, _N, _N, _P, _N), None
        self.grouped_product = Product(library.grouped_product, library.grouped_products)
        self.float_packed_bytes = library.float_packed_bytes
        self.float_packed_bytes.argtypes, self.float_packed_bytes.restype = (_N, _N, _N), _N
        self.float_pack = library.float_pack
        self.float_pack.argtypes, self.float_pack.restype = (_P, _N, _N, _N, _P, _N), None
        self.float_product = Product(library.float_product, library.float_products)
        for function in (library.grouped_product, library.float_product):
            function.argtypes, function.restype = _PRODUCT, None
        for function in (library.grouped_products, library.float_products):
            function.argtypes, function.restype = _PRODUCTS, None
        library.float_has_bfloat16_units.restype = _N
        self.has_bfloat16_units = bool(library.float_has_bfloat16_units())
