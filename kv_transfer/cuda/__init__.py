"""The CUDA driver: device memory that other processes can open, copies, and pinned buffers."""
