"""Triton kernels, one or two per file, that know tensors and strides, but no request and no model.

Each has a torch reference in tests/kernels/references.py.
"""
