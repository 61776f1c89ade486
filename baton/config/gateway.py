"""The configuration's section `gateway`: its addresses, access control, limits and routing."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from baton.config.access import ApiKey, Tls, contradiction_among
from baton.config.section import Section
from baton.system.hosts import is_host, is_loopback

AnswerFormatName = Literal[
    "auto",
    "deepseek_v3",
    "deepseek_v31",
    "generic",
    "glm",
    "harmony",
    "hermes",
    "llama",
    "minimax",
    "mistral",
    "mistral_named",
    "olmo",
    "pythonic",
    "qwen_coder",
]


class GatewayConfig(Section):
    """The gateway."""

    host: str = "127.0.0.1"
    """Address to listen on; loopback by default. On any other address, callers must authenticate with API keys or a
    client certificate."""
    grpc_port: int = Field(50051, ge=0, le=65535)
    """Port of the gRPC API; 0 picks a free port."""
    http_port: int | None = Field(8000, ge=0, le=65535)
    """Port of the OpenAI-compatible API, the metrics and the live page. 0 picks a free port; `null` turns HTTP
    off."""
    api_keys: tuple[ApiKey, ...] = Field((), strict=False)
    """API keys that are admitted, by their hashes: see docs/security.md."""
    api_keys_file: str | None = Field(None, min_length=1)
    """Further API keys, as a list in a YAML or JSON file. The file is read again when it changes; an empty list
    admits no caller."""
    tls: Tls | None = None
    """TLS certificates. If unset, gRPC and HTTP are unencrypted."""
    allow_anonymous: bool = False
    """Callers without a key may send requests; off loopback, this admits everyone who can connect."""
    allow_plaintext: bool = False
    """API keys may be sent over a network unencrypted, for example behind a proxy that terminates TLS."""
    allowed_hosts: tuple[str, ...] = Field((), strict=False)
    """HTTP, on a gateway that listens on loopback and has no keys: the names that the header `host` may contain, in
    addition to `localhost`, `127.0.0.1` and `[::1]`. List the names of a proxy that passes the header on. Other names
    are refused, since they may come from a web page."""
    metrics_need_key: bool = True
    """With API keys, /metrics needs a key with the scope `observe`; false opens it to everyone who can connect."""
    isolate_prefix_cache: bool = False
    """Requests of different callers share no cached prefix, so that neither times nor `cached_tokens` tell one caller
    what another sent. Callers are told apart by their API keys' names; those without a key are one caller."""
    answer_format: AnswerFormatName = "auto"
    """How the model writes tool calls. `auto`: as its chat template shows. `generic`: for templates that know no tools;
    a system message describes the tools. All names are in docs/agents.md."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Where `temperature`, `top_p`, `top_k` and the like come from if a request does not set them. `model`: from the
    model's generation_config.json, as in vLLM and SGLang. `openai`: the defaults of OpenAI's API, for every model."""
    routing_policy: Literal["round_robin", "least_loaded", "kv_aware"] = "kv_aware"
    """How workers are chosen. `round_robin`: in turn. `least_loaded`: those with the fewest requests. `kv_aware`:
    those that cost the least time, given their prefix caches, their load, and how fast KV moves between them."""
    routing_mode: Literal["auto", "disaggregated", "local"] = "auto"
    """Mode of requests that ask for none. `disaggregated`: a prefill worker computes the prompt, and a decode worker
    generates the answer. `local`: a decode worker does both. `auto`: the mode that costs less time, the delay of other
    requests included. That is `local` for short prompts, for prompts that a decode worker without requests computes
    in one step, and while prefill workers are busy."""
    local_prefill_tokens: int | None = Field(None, ge=0)
    """With routing_mode `auto`: a prompt counts as short if a decode worker has at most this many tokens of it to
    compute. If unset, measured rates decide."""
    require_disaggregated: bool = False
    """Every prompt is handed over, even with routing_mode `auto`, and a request for which no prefill worker is
    available fails. A request that itself asks for `local` is not affected."""
    max_in_flight: int = Field(1024, ge=1)
    """Requests that may be with workers at once; further ones wait. Slots and blocks of decode workers usually set a
    lower limit. In the configuration of the command that starts the fleet, the same number also limits the requests
    that wait at one worker."""
    max_queued: int = Field(1024, ge=0)
    """Requests that may wait at once for a worker with room; further ones are refused with a retry hint. Requests
    that lost their worker while they ran wait in addition to these."""
    placement_timeout_s: float = Field(30.0, gt=0.0)
    """A request is refused if for this long it found no worker, and its place in the queue did not get better.
    A request keeps waiting if only slots are lacking, unless many other requests overtake it."""
    max_unread_tokens: int = Field(4096, ge=1)
    """A request ends if more tokens than this wait for its client to read them."""
    max_message_mib: int = Field(16, ge=1, le=2047)
    """Largest request that gRPC and HTTP accept."""
    max_connections: int = Field(2048, ge=1)
    """Open connections to each of gRPC and HTTP, counted from the moment they are accepted. A further
    connection is refused over gRPC. Over HTTP, it replaces an idle connection of the address or caller that
    has the most connections."""
    write_timeout_s: float = Field(60.0, gt=0.0)
    """A client loses its call (over HTTP, its connection) if data waits for the client, but it reads nothing for this
    long.
    """
    response_store: str = Field("memory", pattern=r"^(memory|none|rediss?://\S+)$")
    """Where responses of /v1/responses are kept, unless a client sends `store: false`. `memory`: in this gateway, until
    it ends. A URL such as redis://127.0.0.1:6379/0: in a Redis that several gateways may share; needs the extra
    `redis`. `none`: nowhere."""
    response_store_file: str | None = Field(None, min_length=1)
    """A file with the URL of a Redis, in place of `response_store`: the URL may have a password. Read at the start."""
    response_store_mib: int = Field(256, ge=1)
    """Memory of a store in `memory`, for all callers. If it is full, the caller that uses the most memory loses the
    responses that it used least recently."""
    response_store_caller_mib: int = Field(64, ge=1)
    """Memory for the responses of one caller. If it is full, the responses that the caller used least recently make
    room for new ones."""
    response_store_ttl_s: float = Field(86400.0, gt=0.0, le=2592000.0)
    """A response is forgotten this long after it was stored or last used by another request; at most 30 days."""
    grpc_max_streams: int = Field(1024, ge=1, le=2**31 - 1)
    """gRPC: calls at once over one connection; further ones wait at the client."""
    grpc_keepalive_s: float = Field(60.0, ge=1.0)
    """gRPC: a connection that is silent for this long is pinged, and closed if it does not answer."""
    grpc_min_client_ping_s: float = Field(10.0, ge=0.0)
    """gRPC: shortest interval at which a client may ping, with or without calls; a client that keeps pinging more
    often is disconnected (ENHANCE_YOUR_CALM)."""
    grpc_max_connection_age_s: float | None = Field(None, ge=1.0)
    """gRPC: a connection older than this (give or take a tenth) accepts no new calls. Its client opens another one,
    which a load balancer can send to another gateway. If unset, connections stay."""
    grpc_connection_grace_s: float = Field(600.0, gt=0.0)
    """gRPC: how long calls may continue on a connection that reached its age limit; then they are cancelled."""

    otlp_endpoint: str | None = Field(None, pattern=r"^https?://[^\s/]+(/[^\s]*)?$")
    """Base URL of an OpenTelemetry collector that speaks OTLP over HTTP, such as http://127.0.0.1:4318. Needs the
    extra `otel`. If unset: no traces."""
    trace_sample_ratio: float = Field(1.0, ge=0.0, le=1.0)
    """Share of requests that are traced, among those whose clients send no `traceparent` header."""

    @property
    def max_accepted(self) -> int:
        """How many requests this gateway accepts at once, with workers and in the queue together. The same number of
        other requests may wait before they reach the queue, e.g. for the chat template."""
        return self.max_in_flight + self.max_queued

    @property
    def has_keys(self) -> bool:
        """Whether API keys are configured."""
        return bool(self.api_keys) or self.api_keys_file is not None

    @property
    def is_open_to_its_machine(self) -> bool:
        """Whether every user of this machine, and no one else, may do everything."""
        return is_loopback(self.host) and not self.has_keys

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str) -> str:
        if not host or not is_host(host):
            raise ValueError(f"got '{host}'; use an address or a name, without brackets, scheme or port")
        return host

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        if self.grpc_port and self.grpc_port == self.http_port:
            raise ValueError(
                f"grpc_port and http_port are both {self.grpc_port}; choose another port for one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_hosts(self) -> Self:
        for name in self.allowed_hosts:
            if not name or not is_host(name):
                raise ValueError(
                    f"allowed_hosts: {name!r} is not a host; give names or addresses without a port"
                )
        if self.allowed_hosts and not self.is_open_to_its_machine:
            raise ValueError(
                "allowed_hosts only applies to a gateway on loopback without API keys; this gateway accepts any "
                "name, so remove allowed_hosts"
            )
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        if reason := contradiction_among(self.api_keys):
            raise ValueError(f"api_keys: {reason}")
        if self.isolate_prefix_cache and not self.has_keys:
            raise ValueError(
                "isolate_prefix_cache needs API keys, because all callers without a key count as one caller; set "
                "api_keys_file"
            )
        if is_loopback(self.host):
            return self
        has_client_certificates = self.tls is not None and self.tls.client_ca_file is not None
        if not (self.has_keys or has_client_certificates or self.allow_anonymous):
            raise ValueError(
                f"host '{self.host}' would admit everyone who can reach this machine. Make a key with `baton key "
                "NAME` and set api_keys_file, set tls with a client_ca_file, or set allow_anonymous: true if "
                "something else controls who can connect"
            )
        if self.has_keys and self.tls is None and not self.allow_plaintext:
            raise ValueError(
                f"API keys would be sent to host '{self.host}' in plain text; set tls, or set "
                "allow_plaintext: true if a proxy in front of this gateway terminates TLS"
            )
        return self

    @model_validator(mode="after")
    def _check_response_store(self) -> Self:
        if self.response_store_file is None:
            return self
        if "response_store" in self.model_fields_set:
            raise ValueError(
                "response_store and response_store_file both name a store; remove one of the two keys"
            )
        if "://" in self.response_store_file:
            raise ValueError(
                "response_store_file must name a file that contains the URL; for the URL itself, use response_store"
            )
        return self

    @model_validator(mode="after")
    def _check_unused(self) -> Self:
        """Refuses keys without effect. Its errors name no store, whose address may have a password."""
        bounds = ("response_store_mib", "response_store_caller_mib", "response_store_ttl_s")
        if self.http_port is None:
            unused = "is only for HTTP, but http_port: null turns HTTP off"
            http = ("allowed_hosts", "metrics_need_key", *bounds)
            self.refuse_changed(http, f"{unused}; remove the key, or http_port")
            for key in ("response_store", "response_store_file"):
                if key in self.model_fields_set:
                    raise ValueError(f"{key} {unused}; remove {key} or http_port")
        if self.grpc_max_connection_age_s is None:
            self.refuse_changed(("grpc_connection_grace_s",), "needs grpc_max_connection_age_s")
        if self.response_store == "none":
            self.refuse_changed(
                bounds, "needs a store, but response_store is 'none'; remove one of the two keys"
            )
        if self.response_store != "memory" or self.response_store_file is not None:
            own = "is only for a store in memory; remove the key, and limit a Redis by its `maxmemory`"
            self.refuse_changed(("response_store_mib",), own)
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
        if self.require_disaggregated and self.local_prefill_tokens is not None:
            raise ValueError(
                "require_disaggregated hands over every prompt, even a short one, so local_prefill_tokens "
                f"({self.local_prefill_tokens}) has no effect; remove one of the two keys"
            )
        return self
