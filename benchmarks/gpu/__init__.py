"""The parts of `make gpu-check`: what only a GPU can prove, and speed compared with what the hardware can reach."""
