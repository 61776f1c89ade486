"""Exit codes of a rank's process. 0 means that rank 0 told it to stop."""

EXIT_FAILED = 1
"""The rank failed, and reported that to rank 0; or it did not stop in time."""

EXIT_ALONE = 2
"""Rank 0 is gone, or its messages cannot be read."""
