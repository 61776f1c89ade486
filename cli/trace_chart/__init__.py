"""Draws what workers' schedulers did, step by step, from their traces; knows no cluster."""
