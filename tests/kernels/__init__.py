"""Triton kernels against their torch references: interpreted without a GPU, compiled without one, run on one."""
