"""Builds the gateway of a configuration."""

import errno
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from baton.clock import SystemClock
from baton.config import BatonConfig, GatewayConfig
from baton.errors import ConfigError
from baton.hub_name import HubName
from baton.messages.control import ControlApi
from baton.sampling import SamplingParams
from baton.system.curve import ClusterKeys
from baton.system.hosts import in_url
from engine.allocator import return_freed_memory
from engine.eos_tokens import read_eos_token_ids
from engine.loading.commit import commit_of, source_of
from engine.loading.dtype import dtype_of
from engine.loading.pretrained import PRETRAINED
from engine.model_config import read_architecture
from engine.sampling_defaults import read_sampling_defaults
from gateway import ServedModel
from gateway.auth.authenticator import Authenticator
from gateway.auth.certificates import watched_certificates
from gateway.http.responses.stores import store_for
from gateway.http.server import address_family
from gateway.open_files import fitted_to_open_files
from gateway.telemetry.trace_export import check_tracing

if TYPE_CHECKING:
    from gateway import Gateway, Tokenizer


def check_access(config: BatonConfig) -> None:
    """Raises ConfigError if the gateway cannot use its API keys, certificates, ports or the URL of its store of
    responses, may open too few files, or cannot export its traces. Does not connect to a Redis.

    Call this before the workers start, which takes minutes.
    """
    clock = SystemClock()
    Authenticator(config.gateway, clock)
    if config.gateway.tls is not None:
        watched_certificates(config.gateway.tls, clock)
    store_for(config.gateway, clock)
    fitted_to_open_files(config.gateway, warns=False)  # the gateway itself warns
    check_ports(config.gateway)
    check_tracing(config.gateway)


def check_ports(config: GatewayConfig) -> None:
    """Raises ConfigError if the gateway cannot listen on its ports, for example because another process listens there.

    The ports are not kept. If two commands check at the same moment, one of them fails only when its gateway
    opens.
    """
    ports = (
        ("grpc_port", config.grpc_port, socket.AF_UNSPEC),
        ("http_port", config.http_port, address_family(config.host)),
    )
    for key, port, family in ports:
        if port is None or (error := _why_not(config.host, port, family)) is None:
            continue
        if error.errno == errno.EADDRINUSE and port:
            raise ConfigError(
                f"gateway.{key}: {in_url(config.host)}:{port} is in use, perhaps by another `baton serve`; end that "
                "process, or use another port"
            )
        raise ConfigError(
            f"gateway.{key}: cannot listen on {in_url(config.host)}:{port}: {error.strerror}; use an address of this "
            "machine as gateway.host, and a port that is free and that this user may use"
        )


def _why_not(host: str, port: int, family: socket.AddressFamily) -> OSError | None:
    """Why this process cannot listen there; None if it can listen on at least one address of the host, and the port
    is in use on none."""
    errors = []
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        for kind, *_, address in found:
            try:
                socket.create_server(address, family=kind).close()
            except OSError as error:
                errors.append(error)
    except OSError as error:
        return error
    in_use = next((error for error in errors if error.errno == errno.EADDRINUSE), None)
    return in_use or (errors[0] if len(errors) == len(found) else None)


def load_tokenizer(config: BatonConfig, model_path: Path) -> "Tokenizer":
    """Loads the tokenizer, and imports the modules of the gateway.

    This takes seconds, so it runs on a thread while the workers start.
    """
    from gateway import Gateway, Tokenizer  # noqa: F401 (`make_gateway` needs it)

    name = config.gateway.answer_format
    return Tokenizer(model_path, None if name == "auto" else name)


def make_gateway(
    config: BatonConfig,
    keys: ClusterKeys,
    model_path: Path,
    tokenizer: "Tokenizer",
    control: ControlApi | None = None,
) -> "Gateway":
    """The gateway, not started yet. It passes operators' calls to `control`; without `control`, it refuses them."""
    from gateway import Gateway

    gateway = Gateway(
        config.gateway,
        config.network,
        keys.request,
        keys.prefix,
        config.kv_transfer.load_failure_policy,
        _served_model(config, model_path),
        tokenizer,
        SystemClock(),
        control,
        log_prompts=config.logging.log_prompts,
        scheduler=config.scheduler,
    )
    # Reading the tokenizer's files frees about as much memory as the tokenizer keeps, and glibc would hold it.
    return_freed_memory()
    return gateway


def _served_model(config: BatonConfig, model_path: Path) -> ServedModel:
    """The description of the model for clients, from its folder and the configuration."""
    dtype = dtype_of(config)
    architecture = read_architecture(model_path)
    hub_name = HubName.parse(config.model.path) if commit_of(model_path) is not None else None
    follows_model = config.gateway.sampling_defaults == "model"
    known_name = config.model.path if config.model.path in PRETRAINED else model_path.name
    return ServedModel(
        name=known_name if hub_name is None else hub_name.served_name,
        path=str(source_of(model_path)),
        max_model_len=config.scheduler.max_model_len or architecture.max_position_embeddings,
        vocab_size=architecture.vocab_size,
        eos_token_ids=read_eos_token_ids(model_path),
        dtype=dtype.dtype,
        kv_cache_dtype=dtype.of_kv,
        sampling_defaults=read_sampling_defaults(model_path) if follows_model else SamplingParams(),
    )
