"""Transports: ways for the bytes of a hand-over to get from one worker to another."""
