"""Triton kernels, one or two a file; know tensors and strides, no request and no model.

Each has a torch reference in tests/kernels/references.py.
"""
