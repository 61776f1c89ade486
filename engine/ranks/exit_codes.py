"""How the process of a rank ends, beside 0: told to stop."""

EXIT_FAILED = 1
"""The rank failed, and told rank 0."""

EXIT_ALONE = 2
"""Rank 0 is gone."""
