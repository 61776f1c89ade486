"""The section `network`: addresses, protection and liveness of the planes between gateway and workers."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.config.section import Section
from baton.system.hosts import WILDCARDS, is_host, is_loopback


class NetworkConfig(Section):
    """Addresses, protection and signs of life of the planes between gateway and workers."""

    bind_host: str = Field("127.0.0.1", min_length=1)
    """Where workers listen, on both planes, each on a free port: an address, IPv4 or IPv6, or the name of an interface,
    which means another address on each machine; `0.0.0.0` and `::` listen on all interfaces."""
    advertise_host: str | None = Field(None, min_length=1)
    """What workers tell others to connect to, where that is not where they listen (address translation). None: the
    address they listen on; with `0.0.0.0` or `::`, the node's address in Ray or, without Ray, that of its route to
    others."""
    security: Literal["curve", "none"] = "curve"
    """`curve`: both planes are encrypted, and admit only who knows the cluster's secret. `none`: neither, so anybody
    who can connect may give orders and read KV; allowed on loopback only."""
    secret_file: str | None = Field(None, min_length=1)
    """The cluster's secret, of mode 0600; `baton serve` makes it if it is not there. None:
    $XDG_CONFIG_HOME/baton/cluster.secret. The environment variable BATON_CLUSTER_SECRET wins over either."""
    metrics_port: int | None = Field(0, ge=0, le=65535)
    """Where each worker answers Prometheus, on `bind_host`, without encryption and to everybody who can connect: counts
    and times, never what users write. 0: a free port each, and the gateway's /metrics/targets tells which. None:
    nowhere."""
    heartbeat_interval_s: float = Field(0.5, gt=0.0)
    peer_timeout_s: float = Field(5.0, gt=0.0)
    """Silence after which a worker, or a gateway, counts as dead."""
    reconnect_grace_s: float = Field(0.5, gt=0.0)
    """A worker whose connection broke, as it does at once when its process is killed, and did not come back for so long
    counts as dead, too."""

    @field_validator("bind_host", "advertise_host")
    @classmethod
    def _check_host(cls, host: str | None) -> str | None:
        if host is not None and not is_host(host):
            raise ValueError(
                f"got '{host}'; a host is an address or a name, without brackets, scheme or port"
            )
        return host

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.advertise_host in WILDCARDS:
            raise ValueError(
                f"advertise_host '{self.advertise_host}' is no place to connect to; leave it out, or name this "
                "machine's address"
            )
        if self.security == "none" and not is_loopback(self.bind_host):
            raise ValueError(
                f"security 'none' on bind_host '{self.bind_host}' would let everybody who reaches this machine give "
                "workers orders and read what users write; use security 'curve', or bind_host '127.0.0.1'"
            )
        if self.security == "none" and self.secret_file is not None:
            raise ValueError(f"secret_file ('{self.secret_file}') needs security 'curve', not 'none'")
        return self
