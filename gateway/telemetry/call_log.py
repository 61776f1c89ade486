"""CallError: a call that was answered with an error, whether or not it became a request; reported once, and logged."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "Internal"
"""Stands for every error that no client can cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """Contains no client text except names that the client chose."""

    api: Literal["grpc", "http"]
    error: str
    """The kind of error: a class of baton/errors.py, or one that only HTTP has, such as `NotFound`."""
    caller: str | None
    """None: the caller is not authenticated."""
    call: str
    """Method and route, or gRPC's full method."""
    request_id: str


OnCallError = Callable[[CallError], None]
"""Must not raise."""

MAX_CHARACTERS = 200
"""Longest part of a name that a client chose."""


def log_call_error(error: CallError) -> None:
    """At INFO. Only the kind of the error: its text may quote the client."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = {key: value[:MAX_CHARACTERS] for key, value in asdict(error).items() if value}
    logger.info("call failed %s", " ".join(f"{key}={value}" for key, value in fields.items()), extra=fields)
