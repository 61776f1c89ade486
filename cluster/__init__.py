"""Starts, watches, scales and replaces workers, on Ray or as processes; no token passes through here."""
