"""CallError: a call that was answered with an error, whether or not a request had become of it; told once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

INTERNAL_ERROR = "Internal"
"""Stands for whatever no client can cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """Holds nothing that a client wrote, but for the names that it chose."""

    api: Literal["grpc", "http"]
    error: str
    """What was wrong: a class of baton/errors.py, or what only HTTP knows, such as `NotFound`."""
    caller: str | None
    """None: who called has not proven who they are."""
    call: str
    """Method and route, or gRPC's full method."""
    request_id: str


OnCallError = Callable[[CallError], None]
"""Must not raise."""
