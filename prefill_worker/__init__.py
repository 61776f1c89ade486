"""The prefill role: computes prompts, samples token 0 and hands the KV cache over."""

from prefill_worker.worker import PrefillWorker

__all__ = ["PrefillWorker"]
