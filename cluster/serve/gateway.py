"""The gateway that a configuration describes."""

from pathlib import Path

from baton.clock import SystemClock
from baton.config import BatonConfig
from baton.messages.control import ControlApi
from baton.system.curve import ClusterKeys
from cluster.controller.spec import served_model
from gateway import Gateway, Tokenizer
from gateway.auth.authenticator import Authenticator
from gateway.auth.certificates import watched_certificates
from gateway.open_files import fitted_to_open_files


def check_access(config: BatonConfig) -> None:
    """ConfigError if the gateway could not use its API keys or certificates, or may open too few files; asked before
    workers take minutes to start."""
    clock = SystemClock()
    Authenticator(config.gateway, clock)
    if config.gateway.tls is not None:
        watched_certificates(config.gateway.tls, clock)
    fitted_to_open_files(config.gateway)


def make_gateway(
    config: BatonConfig,
    keys: ClusterKeys,
    model_path: Path,
    tokenizer: Tokenizer,
    control: ControlApi | None = None,
) -> Gateway:
    """Not started yet. Operators' calls go to `control`; without one they are refused."""
    return Gateway(
        config.gateway,
        config.network,
        keys.request,
        keys.prefix,
        config.kv_transfer.load_failure_policy,
        served_model(config, model_path),
        tokenizer,
        SystemClock(),
        control,
        log_prompts=config.logging.log_prompts,
    )
