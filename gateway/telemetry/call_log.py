"""The log of calls that were answered with an error: a line each, also for those that never became a request."""

import logging
from dataclasses import asdict

from gateway.telemetry.call_error import CallError

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 200
"""Of a name that a client chose."""


def log_call_error(error: CallError) -> None:
    """At INFO. Of the error its kind alone: its words may quote the client's."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = {key: value[:MAX_CHARACTERS] for key, value in asdict(error).items() if value}
    logger.info("call failed %s", " ".join(f"{key}={value}" for key, value in fields.items()), extra=fields)
