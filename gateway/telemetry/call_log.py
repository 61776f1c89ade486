"""CallError: a call that got an error, even if it never became a request; counted and logged once."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "Internal"
"""The name for every error that no client can cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """One failed call. Contains no text of the client except names that the client chose."""

    api: Literal["grpc", "http"]
    error: str
    """The kind of error: a class of baton/errors.py, or a kind that only HTTP has, such as `NotFound`."""
    caller: str | None
    """None if the caller is not authenticated."""
    call: str
    """The HTTP method and route, or the full name of the gRPC method."""
    request_id: str


OnCallError = Callable[[CallError], None]
"""Called with each failed call. Must not raise."""

MAX_CHARACTERS = 200
"""How many characters of each value are logged, since clients choose some names."""


def log_call_error(error: CallError) -> None:
    """Logs the error at level INFO, but only its kind, since the error's text may quote the client."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = {key: value[:MAX_CHARACTERS] for key, value in asdict(error).items() if value}
    logger.info("call failed %s", " ".join(f"{key}={value}" for key, value in fields.items()), extra=fields)
