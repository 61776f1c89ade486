"""Decides when a waiting request may go to workers: fair order, callers' shares, deadlines, suspects."""
