"""CallError: a call that was answered with an error, whether or not it became a request; reported once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
