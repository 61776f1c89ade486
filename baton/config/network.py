"""The section `network`: addresses, encryption and failure detection between gateway and workers."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section
from baton.system.hosts import WILDCARDS, is_host, is_loopback


class NetworkConfig(Section):
    """Addresses, encryption and failure detection between gateway and workers."""

    bind_host: str = Field("127.0.0.1", min_length=1)
    """Where workers listen, each on free ports: an IPv4 or IPv6 address, or the name of an interface, which stands
    for another address on each machine; `0.0.0.0` and `::` listen on all interfaces."""
    advertise_host: str | None = Field(None, min_length=1)
    """Address that workers tell other processes to connect to, if it differs from the address they listen on (address
    translation). If unset: the address they listen on. With `0.0.0.0` or `::`: the node's address in Ray or, without
    Ray, the machine's address on its route to other machines."""
    security: Literal["curve", "none"] = "curve"
    """`curve`: the request plane and the KV plane are encrypted, and admit only processes that know the cluster's
    secret. `none`: everyone who can connect may send commands and read KV; allowed on loopback only."""
    secret_file: str | None = Field(None, min_length=1)
    """File of the cluster's secret, of mode 0600; `baton serve` creates it if it does not exist. If unset:
    $XDG_CONFIG_HOME/baton/cluster.secret. The environment variable BATON_CLUSTER_SECRET overrides any file."""
    metrics_port: int | None = Field(0, ge=0, le=65535)
    """Port on `bind_host` where each worker serves Prometheus metrics, unencrypted and without authentication. Metrics
    are counts and times, never what users write. 0: each worker picks a free port; the gateway's /metrics/targets lists
    the ports. `null`: no metrics."""
    heartbeat_interval_s: float = Field(0.5, gt=0.0)
    """How often gateways and workers send a sign of life; at most half of `peer_timeout_s`."""
    peer_timeout_s: float = Field(5.0, gt=0.0)
    """A worker or gateway that is silent for this long counts as lost. A worker that normally sends without long pauses
    counts as lost after 2/5 of this time."""
    reconnect_grace_s: float = Field(0.5, gt=0.0)
    """A worker whose connection broke counts as lost if it does not reconnect within this time. If its port refuses
    connections, as after the end of its process, it counts as lost at once."""

    @field_validator("bind_host", "advertise_host")
    @classmethod
    def _check_host(cls, host: str | None) -> str | None:
        if host is not None and not is_host(host):
            raise ValueError(f"got '{host}'; use an address or a name, without brackets, scheme or port")
        return host

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.advertise_host in WILDCARDS:
            raise ValueError(
                f"no process can connect to advertise_host '{self.advertise_host}'; remove the key, or set it to this "
                "machine's address"
            )
        if self.security == "none" and not is_loopback(self.bind_host):
            raise ValueError(
                f"security 'none' on bind_host '{self.bind_host}' would let everyone who can reach this "
                "machine send commands to workers and read what users write; use security 'curve', or "
                "bind_host '127.0.0.1'"
            )
        if self.security == "none" and self.secret_file is not None:
            raise ValueError(f"secret_file ('{self.secret_file}') needs security 'curve', not 'none'")
        if 2 * self.heartbeat_interval_s > self.peer_timeout_s:
            raise ValueError(
                f"heartbeat_interval_s ({self.heartbeat_interval_s:g}) must not be above half of peer_timeout_s "
                f"({self.peer_timeout_s:g}), or healthy workers would count as lost"
            )
        return self
