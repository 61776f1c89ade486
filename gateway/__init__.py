"""Where clients come in: text to tokens and back, routing, and each request until its last token; knows no Ray."""

from gateway.client import GatewayClient, GatewayError
from gateway.model import ServedModel
from gateway.server import Gateway
from gateway.text import Tokenizer

__all__ = ["Gateway", "GatewayClient", "GatewayError", "ServedModel", "Tokenizer"]
