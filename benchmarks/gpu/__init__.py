"""The parts of `make gpu-check`: what only a GPU can prove, and what its speed is beside the hardware's own."""
