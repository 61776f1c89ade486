"""The prefill role: computes prompts, samples one token and hands the KV cache over."""

from prefill_worker.worker import PrefillWorker

__all__ = ["PrefillWorker"]
