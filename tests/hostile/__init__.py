"""Hostile callers: legal calls and strange connections that mean to take a whole fleet down."""
