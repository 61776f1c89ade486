"""The section `kv_transfer`: how KV blocks move from prefill to decode workers."""

from typing import Literal

from pydantic import Field, field_validator

from baton.config.section import Section

HEARTBEATS_PER_LEASE = 4
HEARTBEATS_PER_TIMEOUT = 8


class KVTransferConfig(Section):
    """How KV blocks move from prefill to decode workers."""

    transport: Literal["auto", "cuda_ipc", "shared_memory", "nixl", "zmq_tcp"] = "auto"
    """How KV bytes move; `auto` takes the best transport that both ends support. Messages always use ZMQ."""
    lease_s: float = Field(10.0, gt=0.0)
    """A producer keeps blocks for this long after the consumer's last sign of life."""
    load_timeout_s: float = Field(120.0, gt=0.0)
    """A consumer gives up a load after this long, including the time in the prefill worker's queue."""
    peer_timeout_s: float = Field(5.0, gt=0.0)
    """A peer that answers no heartbeats for this long counts as lost, and its loads fail. A peer that normally answers
    without long pauses counts as lost after 2/5 of this time."""
    load_failure_policy: Literal["retry", "recompute", "fail"] = "retry"
    """What happens if a prompt's KV does not arrive. `retry`: another prefill worker computes it. After several
    failures, or without a prefill worker, a decode worker does. `recompute`: the decode worker computes it. `fail`: the
    request fails."""
    max_inflight_mib: int = Field(64, ge=1)
    """Bytes that may be on their way to one peer without acknowledgement; with `cuda_ipc` at least 512 MiB."""
    checksum: Literal["auto", "on", "off"] = "auto"
    """Verify the xxh3 checksum of every block on arrival; `auto`: only of blocks from another host."""

    @field_validator("checksum", mode="before", json_schema_input_type=Literal["auto", "on", "off"] | bool)
    @classmethod
    def _read_yaml(cls, checksum: object) -> object:
        """Takes true for `on` and false for `off`, since YAML 1.1 reads the bare words so."""
        return {True: "on", False: "off"}[checksum] if isinstance(checksum, bool) else checksum

    @property
    def heartbeat_s(self) -> float:
        """How often a consumer sends heartbeats, and looks for silent producers."""
        return min(self.lease_s / HEARTBEATS_PER_LEASE, self.peer_timeout_s / HEARTBEATS_PER_TIMEOUT)
