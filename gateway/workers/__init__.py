"""The workers that a gateway is connected to, and their reports; knows no client."""
