"""Draws the scheduler steps of workers from their traces; knows no cluster."""
