"""The door: text to tokens and back, routing, and the life of every client request; knows no Ray."""

from gateway.client import GatewayClient, GatewayError
from gateway.model import ServedModel
from gateway.server import Gateway
from gateway.text import Tokenizer

__all__ = ["Gateway", "GatewayClient", "GatewayError", "ServedModel", "Tokenizer"]
