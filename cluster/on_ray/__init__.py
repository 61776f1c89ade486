"""Runs workers and a controller as Ray actors; the only user of ray."""
