"""Raises this process's soft limit of open files, so that connections of strangers do not use up all files."""

import logging
import resource

MAX_FILES = 2**20
"""Upper limit for the soft limit: some code closes every possible file, one by one."""

logger = logging.getLogger(__name__)


def raise_open_files(needed: int) -> None:
    """Raises the soft limit to the hard limit, but at most to MAX_FILES. If this fails, raises it to `needed`. Never
    lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    for wanted in (most, needed):
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            break
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            break
        except (ValueError, OSError) as error:  # macOS reports no limit, but has one
            logger.warning("cannot raise the limit of open files to %d: %s", wanted, error)
