"""The prefill role: what it accepts, when it is drained, and which KV blocks it hands over."""

from prefill_worker.kv_producer import KVProducerScheduler
from prefill_worker.role import PrefillRole

__all__ = ["KVProducerScheduler", "PrefillRole"]
