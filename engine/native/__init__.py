"""Baton's own CPU kernels in C++: compiled once for a machine's instructions, called with addresses; knows no model."""
