"""Open files: how many a gateway may need, with a reserve, so that connections never take the last one."""

import logging
import resource

from baton.config import GatewayConfig
from baton.errors import ConfigError

OTHER_FILES = 1024
"""The most files that a gateway has open beside its clients' connections."""

MAX_FILES = 2**20
"""Upper limit for the soft limit: some code closes every possible file, one by one."""

logger = logging.getLogger(__name__)


def fitted_to_open_files(config: GatewayConfig) -> GatewayConfig:
    """The configuration with as many connections as fit into the hard limit of open files, unless it sets their
    number. ConfigError if it sets too many, or none fits."""
    num_ports, needed = _num_ports(config), _num_needed(config)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return config
    num_fitting = (hard - OTHER_FILES) // num_ports
    remedy = "raise the hard limit (`ulimit -Hn`, LimitNOFILE of systemd, --ulimit nofile of Docker)"
    if "max_connections" not in config.model_fields_set and num_fitting > 0:
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
        f"gateway.max_connections ({config.max_connections}) may need {needed} open files: that many "
        f"at each of {num_ports} port(s), and {OTHER_FILES} others; this process may open {hard}; "
        f"{advice}{remedy}"
    )


def raise_open_files(config: GatewayConfig) -> None:
    """Raises the soft limit to the hard one, but at most to MAX_FILES; never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    for wanted in (most, _num_needed(config)):
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
        except (ValueError, OSError) as error:  # macOS reports no limit, but has one
            logger.warning("cannot raise the limit of open files to %d: %s", wanted, error)


def _num_ports(config: GatewayConfig) -> int:
    return 1 if config.http_port is None else 2


def _num_needed(config: GatewayConfig) -> int:
    return _num_ports(config) * config.max_connections + OTHER_FILES
