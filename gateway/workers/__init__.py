"""The workers that a gateway is connected to, and what they say of themselves; knows no client."""
