"""The flags of `baton serve`, `fleet`, `gateway` and `models`; each sets a key of the configuration file."""

import argparse
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from baton.config import BatonConfig

Overrides = dict[str, dict[str, Any]]

SERVE_FLAGS: dict[str, tuple[str, str]] = {
    "--model": ("model", "path"),
    "--dtype": ("model", "dtype"),
    "--quantization": ("model", "quantization"),
    "--load-format": ("model", "load_format"),
    "--prefill": ("cluster", "prefill"),
    "--decode": ("cluster", "decode"),
    "--ray-address": ("cluster", "ray_address"),
    "--address": ("cluster", "ray_address"),  # Ray's own commands use this name
    "--name": ("cluster", "name"),
    "--device": ("engine", "device"),
    "--tensor-parallel": ("engine", "tensor_parallel"),
    "--prefill-tensor-parallel": ("cluster", "prefill_tensor_parallel"),
    "--decode-tensor-parallel": ("cluster", "decode_tensor_parallel"),
    "--enable-expert-parallel": ("engine", "enable_expert_parallel"),
    "--prefill-enable-expert-parallel": ("cluster", "prefill_enable_expert_parallel"),
    "--decode-enable-expert-parallel": ("cluster", "decode_enable_expert_parallel"),
    "--num-threads": ("engine", "num_threads"),
    "--prefill-num-threads": ("cluster", "prefill_num_threads"),
    "--decode-num-threads": ("cluster", "decode_num_threads"),
    "--kv-cache-memory-mib": ("engine", "kv_cache_memory_mib"),
    "--gpu-memory-utilization": ("engine", "gpu_memory_utilization"),
    "--kv-cache-dtype": ("engine", "kv_cache_dtype"),
    "--trace-dir": ("engine", "trace_dir"),
    "--max-num-seqs": ("scheduler", "max_num_seqs"),
    "--max-num-batched-tokens": ("scheduler", "max_num_batched_tokens"),
    "--prefill-max-num-batched-tokens": ("cluster", "prefill_max_num_batched_tokens"),
    "--decode-max-num-batched-tokens": ("cluster", "decode_max_num_batched_tokens"),
    "--max-model-len": ("scheduler", "max_model_len"),
    "--block-size": ("scheduler", "block_size"),
    "--num-blocks": ("scheduler", "num_blocks"),
    "--autoscaling": ("autoscaling", "mode"),
    "--max-prefill": ("autoscaling", "max_prefill"),
    "--max-decode": ("autoscaling", "max_decode"),
    "--secret-file": ("network", "secret_file"),
    "--host": ("gateway", "host"),
    "--api-keys-file": ("gateway", "api_keys_file"),
    "--allow-anonymous": ("gateway", "allow_anonymous"),
    "--allow-plaintext": ("gateway", "allow_plaintext"),
    "--grpc-port": ("gateway", "grpc_port"),
    "--http-port": ("gateway", "http_port"),
    "--routing-policy": ("gateway", "routing_policy"),
    "--routing-mode": ("gateway", "routing_mode"),
    "--local-prefill-tokens": ("gateway", "local_prefill_tokens"),
    "--require-disaggregated": ("gateway", "require_disaggregated"),
}

FLEET_FLAGS = {
    flag: (section, key) for flag, (section, key) in SERVE_FLAGS.items() if section != "gateway"
} | {"--fleet-port": ("cluster", "fleet_port"), "--bind-host": ("network", "bind_host")}
"""Flags of a fleet without a gateway."""

_OF_A_WORKERS_ROOM = (
    "--device",
    "--dtype",
    "--quantization",
    "--kv-cache-dtype",
    "--kv-cache-memory-mib",
    "--gpu-memory-utilization",
    "--tensor-parallel",
    "--enable-expert-parallel",
)

MODELS_FLAGS = {flag: SERVE_FLAGS[flag] for flag in _OF_A_WORKERS_ROOM}
"""Flags that change how much memory a model needs on a worker."""

_ALSO_FOR_GATEWAYS = {("cluster", "name"), ("cluster", "ray_address"), ("model", "path")}
"""Keys of other sections that a gateway needs, too."""

GATEWAY_FLAGS = {
    flag: (section, key)
    for flag, (section, key) in SERVE_FLAGS.items()
    if section in ("gateway", "network") or (section, key) in _ALSO_FOR_GATEWAYS
} | {"--fleet-address": ("cluster", "fleet_address")}
"""Flags of a single gateway. It reads the rest of its configuration from the fleet."""


def add_flags(parser: argparse.ArgumentParser, flags: Mapping[str, tuple[str, str]]) -> None:
    """Adds the flags of the table. Names that set the same key become one flag with several names. A flag that is not
    given does not change its key."""
    for section, key in dict.fromkeys(flags.values()):
        names = [flag for flag, place in flags.items() if place == (section, key)]
        field = field_of(section, key)
        kind, choices = _type_of(field.annotation)
        explanation = " ".join((field.description or "").split())
        default = "unset by default" if field.default is None else f"default {field.default}"
        value: dict[str, Any] = {
            "type": kind,
            "choices": choices,
            "metavar": None if choices else key.upper(),
        }
        parser.add_argument(
            *names,
            dest=f"{section}.{key}",
            default=None,
            help=f"{section}.{key} ({default}). {explanation}".replace("%", "%%"),
            **({"action": "store_const", "const": True} if kind is bool else value),
        )


def overrides_from(options: argparse.Namespace) -> Overrides:
    """Section -> key -> value for the flags that were given."""
    overrides: Overrides = {}
    for section, key in {*SERVE_FLAGS.values(), *FLEET_FLAGS.values(), *GATEWAY_FLAGS.values()}:
        value = getattr(options, f"{section}.{key}", None)
        if value is not None:
            overrides.setdefault(section, {})[key] = value
    return overrides


def for_one_fleet(overrides: Overrides) -> Overrides:
    """Lets a flag that names the fleet override all keys of the file that name a fleet."""
    cluster = overrides.get("cluster", {})
    for key, other in (("ray_address", "fleet_address"), ("fleet_address", "ray_address")):
        if key in cluster and other not in cluster:
            return {**overrides, "cluster": {**cluster, other: None}}
    return overrides


def field_of(section: str, key: str) -> FieldInfo:
    """The field that describes this key in the configuration."""
    section_class = BatonConfig.model_fields[section].annotation
    assert section_class is not None
    fields: dict[str, FieldInfo] = section_class.model_fields
    return fields[key]


def _type_of(annotation: Any) -> tuple[type[Any], tuple[str, ...] | None]:
    """The type that parses a flag's text, and the allowed values if there are only a few."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return str, get_args(annotation)
    assert annotation in (int, float, str, bool), f"a flag cannot hold a {annotation}"
    return annotation, None
