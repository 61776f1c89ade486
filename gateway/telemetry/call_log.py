"""The log of calls that were answered with an error: a line each, including those that never became a request."""

import logging
from dataclasses import asdict

from gateway.telemetry.call_error import CallError

logger = logging.getLogger(__name__)

MAX_CHARACTERS = 200
"""Longest part of a name that a client chose."""


def log_call_error(error: CallError) -> None:
    """At INFO. Only the kind of the error: its text may quote the client."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = {key: value[:MAX_CHARACTERS] for key, value in asdict(error).items() if value}
    logger.info("call failed %s", " ".join(f"{key}={value}" for key, value in fields.items()), extra=fields)
