"""The decode role: takes prompts' KV cache from others, or computes short ones itself, and decodes."""

from decode_worker.worker import DecodeWorker

__all__ = ["DecodeWorker"]
