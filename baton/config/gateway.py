"""The configuration's section `gateway`: where its doors are, how many requests they admit, and where these go."""

from typing import Literal, Self

from pydantic import Field, model_validator

from baton.config.access import ApiKey, Tls, contradiction_among
from baton.config.section import Section
from baton.system.hosts import is_host, is_loopback


class GatewayConfig(Section):
    """The door."""

    host: str = "127.0.0.1"
    """Where to listen; loopback unless told otherwise. Anywhere else, callers must prove who they are: with API keys,
    or a certificate."""
    grpc_port: int = Field(50051, ge=0, le=65535)
    """0 picks a free port."""
    http_port: int | None = Field(8000, ge=0, le=65535)
    """Where the OpenAI-compatible API, metrics and the live page are. 0 picks a free port; None: there is no HTTP."""
    api_keys: tuple[ApiKey, ...] = Field((), strict=False)
    """Who may come in, by the hashes of their keys: see docs/security.md."""
    api_keys_file: str | None = Field(None, min_length=1)
    """More of them, as a list in a YAML or JSON file. It is read again when it changes; with an empty list nobody comes
    in."""
    tls: Tls | None = None
    """Certificates; None: neither door is encrypted."""
    allow_anonymous: bool = False
    """Callers without a key may send requests; off loopback, everybody who can connect, then."""
    allow_plaintext: bool = False
    """API keys may cross a network unencrypted, as behind a proxy that ends TLS."""
    allowed_hosts: tuple[str, ...] = Field((), strict=False)
    """HTTP: what a gateway on loopback without keys may be called in the header `host`, beside `localhost`, `127.0.0.1`
    and `[::1]`: names of a proxy that passes the header on. Any other name may be that of a web page."""
    metrics_need_key: bool = True
    """With API keys, /metrics is for keys with the scope `observe`; false: for everybody who can connect."""
    routing_policy: Literal["round_robin", "least_loaded", "kv_aware"] = "kv_aware"
    """Which workers a request goes to: those whose turn it is; those with the fewest requests; or those that cost the
    least time, given what is in their prefix caches, how busy they are and how fast KV gets from one to the other."""
    routing_mode: Literal["auto", "disaggregated", "local"] = "disaggregated"
    """What a request gets that does not ask for a mode of its own. `auto`: a decode worker computes the prompt itself
    where that costs less time, that of its running requests included: short prompts, or any while prefill workers are
    busy."""
    local_prefill_tokens: int | None = Field(None, ge=0)
    """With routing_mode `auto`: a prompt of which a decode worker lacks at most so many tokens is short. None: measured
    rates decide."""
    require_disaggregated: bool = False
    """A request that would run on a decode worker alone only because no prefill worker is to be had fails instead."""
    max_in_flight: int = Field(256, ge=1)
    """Requests that are with workers at once; one more waits."""
    max_queued: int = Field(1024, ge=0)
    """Requests that wait at once, because no worker has room, or there is none at present; one more is refused with a
    retry hint. Requests that ran already, and lost their worker, wait beside these."""
    placement_timeout_s: float = Field(30.0, gt=0.0)
    """A request that has found no worker for so long is refused."""
    max_unread_tokens: int = Field(4096, ge=1)
    """A request ends if more tokens than that wait for its client to read them."""
    max_message_mib: int = Field(16, ge=1)
    """A larger request is refused at either door, and gRPC sends no larger answer."""
    max_connections: int = Field(2048, ge=1)
    """Connections at each door, in use or not, from the moment they are accepted; one more is refused. Over HTTPS it
    replaces the oldest one whose TLS handshake is under way, if there is one."""
    write_timeout_s: float = Field(60.0, gt=0.0)
    """A client that takes nothing for so long, while there is something for it, loses its call; over HTTP, its
    connection."""
    grpc_max_streams: int = Field(1024, ge=1)
    """gRPC: calls at once over one connection; one more waits at its client."""
    grpc_keepalive_s: float = Field(60.0, ge=1.0)
    """gRPC: a connection on which nothing came for so long is asked for a sign of life, and closed without one."""
    grpc_min_client_ping_s: float = Field(10.0, ge=0.0)
    """gRPC: how often a client may ask for a sign of life itself, with or without calls; one that keeps asking more
    often is disconnected (ENHANCE_YOUR_CALM)."""
    grpc_max_connection_age_s: float | None = Field(None, gt=0.0)
    """gRPC: a connection of that age, give or take a tenth, takes no new calls and its client makes another one, which
    a load balancer can hand to another gateway. None: connections stay."""
    grpc_connection_grace_s: float = Field(600.0, gt=0.0)
    """gRPC: what calls that run over such a connection have left to end; then they are cancelled."""

    otlp_endpoint: str | None = Field(None, pattern=r"^https?://[^\s/]+(/[^\s]*)?$")
    """Where traces go: the base URL of an OpenTelemetry collector that speaks OTLP over HTTP, such as
    http://127.0.0.1:4318. Needs the extra `otel`. None: nothing is traced."""
    trace_sample_ratio: float = Field(1.0, ge=0.0, le=1.0)
    """Share of the requests that are traced, of those whose clients do not say; a `traceparent` says."""

    @property
    def has_keys(self) -> bool:
        """Whether callers are asked for one."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def is_open_to_its_machine(self) -> bool:
        """Whoever can connect may do everything: the users of this machine, and nobody else."""
        return is_loopback(self.host) and not self.has_keys

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        for name in self.allowed_hosts:
            if not name or not is_host(name):
                raise ValueError(
                    f"allowed_hosts: {name!r} is no host; give names or addresses without a port"
                )
        if self.allowed_hosts and not self.is_open_to_its_machine:
            raise ValueError(
                "allowed_hosts is for a gateway on loopback without API keys; elsewhere any name will do: leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        if reason := contradiction_among(self.api_keys):
            raise ValueError(f"api_keys: {reason}")
        if is_loopback(self.host):
            return self
        has_client_certificates = self.tls is not None and self.tls.client_ca_file is not None
        if not (self.has_keys or has_client_certificates or self.allow_anonymous):
            raise ValueError(
                f"host '{self.host}' would let everybody who reaches this machine use it; make a key with `baton key "
                "NAME` and set api_keys_file, or set tls with a client_ca_file, or allow_anonymous: true where others "
                "keep strangers out"
            )
        if self.has_keys and self.tls is None and not self.allow_plaintext:
            raise ValueError(
                f"API keys would cross the network to host '{self.host}' in plain text; set tls, or allow_plaintext: "
                "true where a proxy in front of this gateway ends TLS"
            )
        return self

    @model_validator(mode="after")
    def _check_tracing(self) -> Self:
        if self.otlp_endpoint is None and self.trace_sample_ratio != 1.0:
            raise ValueError(f"trace_sample_ratio ({self.trace_sample_ratio}) needs an otlp_endpoint")
        return self

    @model_validator(mode="after")
    def _check_routing(self) -> Self:
        if self.local_prefill_tokens is not None and self.routing_mode != "auto":
            raise ValueError(
                f"local_prefill_tokens ({self.local_prefill_tokens}) needs routing_mode 'auto', not "
                f"'{self.routing_mode}'"
            )
        if self.require_disaggregated and self.routing_mode == "local":
            raise ValueError("require_disaggregated contradicts routing_mode 'local'")
        return self
