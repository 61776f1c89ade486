"""Logs, metrics, traces and live views of a gateway; decides nothing."""
