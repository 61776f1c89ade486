"""Triton kernels, one a file, each with its torch reference; know tensors and strides, no request and no model."""
