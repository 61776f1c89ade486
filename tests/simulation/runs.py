"""Many seeds on all cores; see `results`."""

import multiprocessing
from collections.abc import Generator, Iterable
from itertools import islice

from tests.simulation.run import Result, play

SEEDS_PER_JOB = 8
JOBS_AHEAD = 4
"""For each process: so that whoever stops early has not ordered much in vain."""


def results(seeds: Iterable[int], num_jobs: int) -> Generator[Result, None, None]:
    """Every seed's result, in their order. Processes are forked, so what is patched here is patched there."""
    if num_jobs == 1:
        yield from map(play, seeds)
        return
    waiting, chunk = iter(seeds), SEEDS_PER_JOB * JOBS_AHEAD * num_jobs
    with multiprocessing.get_context("fork").Pool(num_jobs) as pool:
        ahead = pool.imap(play, list(islice(waiting, chunk)), SEEDS_PER_JOB)
        while batch := list(islice(waiting, chunk)):
            behind, ahead = ahead, pool.imap(play, batch, SEEDS_PER_JOB)
            yield from behind
        yield from ahead
