"""Clients that behave badly, many at once, towards one real gateway whose workers follow scripts."""
