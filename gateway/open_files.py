"""Open files: how many a gateway may need, and leave for them, so that connections never take the last one."""

import logging
import resource

from baton.config import GatewayConfig
from baton.errors import ConfigError

OTHER_FILES = 1024
"""What a gateway has open beside its clients' connections, at most."""

MAX_FILES = 2**20
"""As many as are ever asked for: some code closes every file that there may be, one by one."""

logger = logging.getLogger(__name__)


def fitted_to_open_files(config: GatewayConfig) -> GatewayConfig:
    """The same, with as many connections as fit into the hard limit of open files where the configuration does not say
    how many. ConfigError if it says too many, or none fits."""
    num_ports, needed = _num_ports(config), _num_needed(config)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return config
    num_fitting = (hard - OTHER_FILES) // num_ports
    remedy = "raise the hard limit (`ulimit -Hn`, LimitNOFILE of systemd, --ulimit nofile of Docker)"
    if "max_connections" not in config.model_fields_set and num_fitting > 0:
        logger.warning(
            "gateway.max_connections is %d, not %d: this process may open %d files; for more, %s",
            num_fitting,
            config.max_connections,
            hard,
            remedy,
        )
        return config.model_copy(update={"max_connections": num_fitting})
    advice = f"lower it to {num_fitting}, or " if num_fitting > 0 else ""
    raise ConfigError(
        f"gateway.max_connections ({config.max_connections}) may need {needed} open files, as many as it says at "
        f"each of {num_ports} port(s) and {OTHER_FILES} for everything else, and this process may open {hard}; "
        f"{advice}{remedy}"
    )


def raise_open_files(config: GatewayConfig) -> None:
    """Raises the soft limit to the hard one, or to MAX_FILES where that is less; lowers nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    for wanted in (most, _num_needed(config)):
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
        except (ValueError, OSError) as error:  # macOS says that there is no limit, and has one
            logger.warning("this process may not open %d files: %s", wanted, error)


def _num_ports(config: GatewayConfig) -> int:
    return 1 if config.http_port is None else 2


def _num_needed(config: GatewayConfig) -> int:
    return _num_ports(config) * config.max_connections + OTHER_FILES
