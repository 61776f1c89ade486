"""Whole deployments: a gateway, the fleet behind it, and the connection between the two."""
