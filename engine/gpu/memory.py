"""How much of a GPU's memory is left for KV blocks; knows sizes only."""

from dataclasses import dataclass

from baton.errors import ConfigError

GIB = 2**30


class OutOfGpuMemory(ConfigError):
    """A GPU has less memory left than needed; perhaps only for a while, if other processes hold memory
    (memory_wait.py)."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one GPU, as measured while a worker starts."""

    total: int
    used_by_others: int
    """Bytes used by other processes, the driver, and this process' context."""
    weights: int
    activations: int
    """The most bytes that a step allocates in addition to those that stay allocated between steps. Kernels are
    included."""
    graphs: int
    utilization: float
    """Share of the total that this worker, and those that used the GPU before, may fill together."""

    @property
    def for_kv(self) -> int:
        """The bytes that are left; negative if weights and the rest already exceed the budget."""
        budget = int(self.total * self.utilization)
        return budget - self.used_by_others - self.weights - self.activations - self.graphs

    def num_blocks(self, block_bytes: int, num_needed: int, min_tokens: int) -> int:
        """The number of blocks that fit, including the null block.

        OutOfGpuMemory if, without the null block, fewer than `num_needed` fit: a request of `min_tokens`
        tokens needs this many."""
        num_blocks, needed = max(0, self.for_kv) // block_bytes, num_needed + 1
        if num_blocks < needed:
            raise OutOfGpuMemory(
                f"out of GPU memory: {self.arithmetic()}, but one request of {min_tokens:,} tokens needs "
                f"{num_needed:,} blocks and the null block: {needed:,} x {block_bytes / 2**20:.2f} MiB = "
                f"{needed * block_bytes / GIB:.2f} GiB. Lower scheduler.max_model_len or "
                "scheduler.max_num_batched_tokens, raise engine.gpu_memory_utilization, or use more GPUs "
                "(engine.tensor_parallel)"
            )
        return num_blocks

    def arithmetic(self) -> str:
        """The calculation as text, for a log line."""
        parts = {
            "in use by other processes": self.used_by_others,
            "weights": self.weights,
            "activations": self.activations,
            "CUDA graphs": self.graphs,
        }
        less = " - ".join(f"{size / GIB:.2f} ({what})" for what, size in parts.items())
        return f"{self.total / GIB:.2f} GiB x {self.utilization:g} - {less} leaves {self.for_kv / GIB:.2f} GiB for KV"
