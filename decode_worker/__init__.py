"""The decode role: what it accepts, when it is drained, and which KV blocks it loads."""

from decode_worker.kv_consumer import KVConsumerScheduler
from decode_worker.role import DecodeRole

__all__ = ["DecodeRole", "KVConsumerScheduler"]
