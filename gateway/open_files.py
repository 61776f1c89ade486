"""Open files: how many a gateway may need, with a reserve, so that connections never use up all files."""

import logging
import resource

from baton.config import GatewayConfig
from baton.errors import ConfigError

OTHER_FILES = 1024
"""Files reserved for everything except clients' connections. Each worker needs six of them."""

_FEWEST_OTHER_FILES = 128
"""The least reserve, enough for some workers. If the hard limit is low, the reserve is half of the limit, but not less
than this."""

logger = logging.getLogger(__name__)


def fitted_to_open_files(config: GatewayConfig, *, warns: bool = True) -> GatewayConfig:
    """The configuration, with `max_connections` lowered to fit the hard limit of open files; `warns`: the log says so.
    Raises ConfigError if the operator set `max_connections` too high, or if no connection fits."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        return config
    num_ports, num_others = _num_ports(config), max(_FEWEST_OTHER_FILES, min(OTHER_FILES, hard // 2))
    needed, num_fitting = num_ports * config.max_connections + num_others, (hard - num_others) // num_ports
    if needed <= hard:
        return config
    remedy = "raise the hard limit (`ulimit -Hn`, LimitNOFILE of systemd, --ulimit nofile of Docker)"
    if "max_connections" not in config.model_fields_set and num_fitting > 0:
        if warns:
            logger.warning(
                "lowered gateway.max_connections from %d to %d: this process may open only %d files; to allow "
                "more, %s",
                config.max_connections,
                num_fitting,
                hard,
                remedy,
            )
        return config.model_copy(update={"max_connections": num_fitting})
    advice = f"lower it to {num_fitting}, or " if num_fitting > 0 else ""
    raise ConfigError(
        f"gateway.max_connections ({config.max_connections}) may need {needed} open files: its connections at each of "
        f"{num_ports} port(s), and {num_others} other files; this process may open {hard} files; {advice}{remedy}"
    )


def num_files_needed(config: GatewayConfig) -> int:
    """How many open files the gateway may need if all connections are in use."""
    return _num_ports(config) * config.max_connections + OTHER_FILES


def _num_ports(config: GatewayConfig) -> int:
    return 1 if config.http_port is None else 2
