"""The section `kv_transfer`: how KV blocks move from prefill to decode workers."""

from typing import Literal

from pydantic import Field

from baton.config.section import Section


class KVTransferConfig(Section):
    """How KV blocks move from prefill to decode workers."""

    transport: Literal["auto", "cuda_ipc", "shared_memory", "nixl", "zmq_tcp"] = "auto"
    """How the bytes go; `auto` takes the best that both ends have. Messages always go over ZMQ."""
    lease_s: float = Field(10.0, gt=0.0)
    """Producer blocks are kept this long after the consumer's last sign of life."""
    load_timeout_s: float = Field(120.0, gt=0.0)
    """A consumer gives a load up after this long, queueing on the prefill worker included."""
    peer_timeout_s: float = Field(5.0, gt=0.0)
    """A peer that does not answer heartbeats for this long is dead, and its loads fail at once."""
    load_failure_policy: Literal["retry", "recompute", "fail"] = "retry"
    """A prompt that does not arrive is computed by another prefill worker and, where there is none, by the decode
    worker; or by the decode worker at once; or the request fails."""
    max_inflight_mib: int = Field(64, ge=1)
    """Bytes on their way to one peer before it must acknowledge some."""
    checksum: Literal["auto", "on", "off"] = "auto"
    """Verify the xxh3 checksum of every block on arrival; `auto`: of those that come from another host."""
