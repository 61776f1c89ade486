"""Serves clients: converts text to tokens and back, routes each request, and follows it to its last token; uses no Ray.

Each name is imported at its first use, so that code that uses only the router or the dispatcher needs no
gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.client import GatewayClient, GatewayError
    from gateway.model import ServedModel
    from gateway.server import Gateway
    from gateway.text import Tokenizer

__all__ = ["Gateway", "GatewayClient", "GatewayError", "ServedModel", "Tokenizer"]

_MODULES = {
    "Gateway": "gateway.server",
    "GatewayClient": "gateway.client",
    "GatewayError": "gateway.client",
    "ServedModel": "gateway.model",
    "Tokenizer": "gateway.text",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
