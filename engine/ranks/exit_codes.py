"""Exit codes of a rank's process, besides 0: it was told to stop."""

EXIT_FAILED = 1
"""The rank failed, and reported that to rank 0."""

EXIT_ALONE = 2
"""Rank 0 is gone."""
