"""Hostile callers: legal calls and strange connections that try to bring down a whole fleet."""
