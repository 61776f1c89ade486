"""The configuration: one frozen section per package, validated once at the edge, handed down as values.

Every key here can stand in the YAML file of `baton serve`; nobody below the command reads a file or the
environment. An unknown key, a wrong type or a value that cannot work is a ConfigError that names it.
"""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from baton.addresses import WILDCARDS
from baton.autoscaling_config import AutoscalingConfig
from baton.cluster_config import ClusterConfig
from baton.config_section import Section, describe
from baton.errors import ConfigError
from baton.gateway_config import GatewayConfig
from baton.hosts import is_host, is_loopback
from baton.logging_config import LoggingConfig
from baton.worker import WorkerRole


class ModelConfig(Section):
    """Which weights to serve."""

    path: str = "smollm2"
    """A Hugging Face folder, or the name of a model that Baton knows how to get (`smollm2`)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights, activations and, unless `engine.kv_cache_dtype` says otherwise, the KV cache."""
    quantization: Literal["fp8"] | None = None
    """`fp8`: the layers' matrices become 8-bit floats (e4m3) with a scale for each output while they are loaded,
    which halves their memory; embeddings, norms and the projection to logits stay as they are. On GPUs with 8-bit
    matrix units (NVIDIA Ada, Hopper and newer) their inputs are quantized too, token by token. All workers need the
    same."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: random weights from config.json alone, the same ones in every process on the same kind of device."""


class EngineConfig(Section):
    """One worker's device, or devices."""

    device: Literal["cpu", "cuda"] = "cpu"
    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share one worker's model, each a process with a device of its own, all on one host. It must divide the
    model's KV heads. `cluster.prefill_tensor_parallel` and `cluster.decode_tensor_parallel` win over it."""
    rank_timeout_s: float = Field(60.0, gt=0.0)
    """A worker fails if one of its ranks waits this long for another one."""
    num_threads: int | None = Field(None, ge=1)
    """Threads of a rank's math library on CPU; None shares every core of the machine among a worker's ranks."""
    kv_cache_memory_mib: int | None = Field(None, ge=1)
    """Size of each rank's KV pool; `scheduler.num_blocks`, where set, wins. None: 1024 on a CPU; on a GPU, what the
    largest step leaves of `gpu_memory_utilization`."""
    gpu_memory_utilization: float = Field(0.9, gt=0.0, le=1.0)
    """Share of a GPU's memory that a worker, with everything that was there before it, may fill. Workers that share a
    GPU need `kv_cache_memory_mib`."""
    cuda_graphs: bool = True
    """Record steps that consist of decodes when a worker starts, and replay them: the GPU need not wait for Python."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """`auto`: the model's. `fp8`: 8-bit floats (e4m3) without scales, so twice the tokens in the same memory, and half
    the bytes to hand over. Prefill and decode workers need the same."""
    swap_space_mib: int = Field(256, ge=1)
    """Host memory for preempted requests' KV, taken only if `scheduler.preemption` can use it."""
    trace_dir: str | None = Field(None, min_length=1)
    """A folder for one file per worker and start, WORKER-INCARNATION.jsonl, with every step of its scheduler; `baton
    trace` draws them. None: nothing is written."""
    trace_max_mib: int = Field(64, ge=1)
    """A worker's trace ends when its file is this large; the worker goes on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("gpu_memory_utilization", "cuda_graphs"):
            if self.device == "cpu" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} ({getattr(self, key)}) needs device 'cuda', not 'cpu'")
        return self


class SchedulerConfig(Section):
    """What one step may hold, and who goes first. Units are tokens, requests or blocks."""

    max_num_seqs: int = Field(64, ge=1)
    """Requests that may run at once. On a GPU, unless set: 256."""
    max_num_batched_tokens: int = Field(512, ge=1)
    """Tokens one step may compute. A prompt is handed over in pieces of this size, while the next is computed. On a
    GPU, unless set: up to 8192, as few as keep it busy."""
    max_model_len: int | None = Field(None, ge=1)
    """Prompt and output tokens of one request; None takes the model's own limit."""
    long_prefill_token_threshold: int = Field(0, ge=0)
    """At most this many tokens of one request a step; 0 means no cap."""
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    """`priority`: lower values first, ties by arrival; the worst running request is the first to give way."""
    priority_ageing_s: float = Field(0.0, ge=0.0)
    """With `priority`: waiting this long counts as much as one step of priority, so that nobody starves; 0: never."""
    async_scheduling: bool = True
    """Plan the next step while the device computes this one. Tokens are the same either way."""
    batching: Literal["unified", "prefill_first"] = "unified"
    """`prefill_first`: a step holds whole prompts only or decodes only, and prompts go first (the classical two-phase
    scheduler). It never splits a prompt, so one request is limited to `max_num_batched_tokens`."""
    preemption: Literal["recompute", "swap", "auto"] = "recompute"
    """What becomes of a victim's KV when blocks run out: computed anew, or copied to host memory and back, while that
    has room; `auto` takes what costs less for each victim."""
    swap_block_cost_tokens: float | None = Field(None, ge=0.0)
    """With `auto`: tokens the device could compute in the time of copying one block out and in again; None: one."""
    num_swap_blocks: int | None = Field(None, ge=1)
    """Blocks in host memory for `swap` and `auto`; None: as many as `engine.swap_space_mib` holds."""
    watermark: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the blocks that admissions leave free while requests run, so that these need not be preempted soon."""
    block_size: int = Field(16, ge=1)
    """Tokens in one KV block. On a GPU, unless set: 64."""
    num_blocks: int | None = Field(None, ge=2)
    """Blocks of the pool, the null block included; None: as many as the engine has memory for."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        length = self.max_model_len
        if not self.enable_chunked_prefill and length is not None and self.max_num_batched_tokens < length:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_model_len "
                f"({length}) when enable_chunked_prefill is false, or long prompts could never run"
            )
        if self.batching == "prefill_first" and self.long_prefill_token_threshold:
            raise ValueError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) splits prompts, which batching "
                "'prefill_first' never does; leave it 0"
            )
        if self.policy != "priority" and self.priority_ageing_s:
            raise ValueError(
                f"priority_ageing_s ({self.priority_ageing_s}) needs policy 'priority', not '{self.policy}'"
            )
        if self.preemption != "auto" and self.swap_block_cost_tokens is not None:
            raise ValueError(
                f"swap_block_cost_tokens ({self.swap_block_cost_tokens}) needs preemption 'auto', not "
                f"'{self.preemption}'"
            )
        if self.preemption == "recompute" and self.num_swap_blocks:
            raise ValueError(
                f"num_swap_blocks ({self.num_swap_blocks}) needs preemption 'swap' or 'auto', not 'recompute'"
            )
        return self


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


class BatonConfig(Section):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    gateway: GatewayConfig = GatewayConfig()
    network: NetworkConfig = NetworkConfig()
    cluster: ClusterConfig = ClusterConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    logging: LoggingConfig = LoggingConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cluster.ray_address == "none" and self.engine.device == "cuda":
            raise ValueError(
                "cluster.ray_address 'none' needs engine.device 'cpu': it is Ray that shares out a machine's GPUs. "
                "Use 'local'"
            )
        prefill, decode = self.num_ranks(WorkerRole.PREFILL), self.num_ranks(WorkerRole.DECODE)
        if self.cluster.prefill and max(prefill, decode) % min(prefill, decode):
            raise ValueError(
                f"prefill workers of {prefill} ranks cannot hand KV over to decode workers of {decode}: one of "
                "cluster.prefill_tensor_parallel and cluster.decode_tensor_parallel must be a multiple of the other"
            )
        if self.autoscaling.mode != "off":
            self._check_bounds()
        return self

    def _check_bounds(self) -> None:
        for role in WorkerRole:
            (low, high), start = self.worker_bounds(role), getattr(self.cluster, role.value)
            if not low <= start <= high:
                raise ValueError(
                    f"cluster.{role.value} ({start}) must be between autoscaling.min_{role.value} ({low}) and "
                    f"autoscaling.max_{role.value} ({high})"
                )
        if all(low == high for low, high in map(self.worker_bounds, WorkerRole)):
            raise ValueError(
                f"autoscaling.mode '{self.autoscaling.mode}' may change nothing: give it room with "
                "autoscaling.max_decode, or another bound"
            )

    def num_ranks(self, role: WorkerRole) -> int:
        """Tensor-parallel ranks of a worker that is started in this role."""
        cluster = self.cluster
        own = (
            cluster.prefill_tensor_parallel if role is WorkerRole.PREFILL else cluster.decode_tensor_parallel
        )
        return own or self.engine.tensor_parallel

    def worker_bounds(self, role: WorkerRole) -> tuple[int, int]:
        """How few and how many workers of this role autoscaling may leave."""
        start, bounds = getattr(self.cluster, role.value), self.autoscaling
        low, high = getattr(bounds, f"min_{role.value}"), getattr(bounds, f"max_{role.value}")
        return start if low is None else low, start if high is None else high

    @classmethod
    def from_mapping(cls, values: dict[str, Any], source: str = "configuration") -> Self:
        """Validates a nested mapping; ConfigError lists every offending key with its value."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(describe(error, source)) from None

    @classmethod
    def from_yaml(cls, path: Path, overrides: dict[str, dict[str, Any]] | None = None) -> Self:
        """Reads a YAML file and lays `overrides` (section -> key -> value) over it."""
        try:
            values = yaml.safe_load(path.read_text()) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read configuration file {path}: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: expected a mapping of sections, got {type(values).__name__}")
        return cls.from_mapping(merge(values, overrides or {}), str(path))


def merge(values: dict[str, Any], overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Section by section, `overrides` over `values`; neither is changed. An override of None takes a key out."""
    merged = dict(values)
    for section, keys in overrides.items():
        under = merged.get(section) or {}
        if isinstance(under, dict):
            removed = {key for key, value in keys.items() if value is None}
            under = {key: value for key, value in {**under, **keys}.items() if key not in removed}
        merged[section] = under
    return merged
