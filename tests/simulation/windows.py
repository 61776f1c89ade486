"""Scenarios whose model has KV groups with sliding windows; drawn apart from the rest of their seeds."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from baton.config import SchedulerConfig
from baton.kv_groups import KVGroups
from simulator.worker import WorkerSpec

EVERY = 8
GROUPS = [KVGroups(1, 1, 5), KVGroups(1, 1, 9), KVGroups(1, 2, 13), KVGroups(2, 1, 2), KVGroups(0, 1, 9)]


def has_windows(seed: int) -> bool:
    """One seed in eight, none of which is crowded, greedy or poisoned."""
    return seed % EVERY == 4


def with_windows(seed: int, workers: Iterable[WorkerSpec], max_model_len: int) -> tuple[WorkerSpec, ...]:
    """All with one block size, as windows need it, and with pools that the longest request just fits in, or larger."""
    rng = random.Random(f"windows of {seed}")
    specs, groups = tuple(workers), rng.choice(GROUPS)
    block_size, is_small = specs[0].scheduler.block_size, rng.random() < 0.5
    return tuple(
        replace(spec, groups=groups, scheduler=_scheduler(spec, block_size, groups, max_model_len, is_small))
        for spec in specs
    )


def _scheduler(
    spec: WorkerSpec, block_size: int, groups: KVGroups, max_model_len: int, is_small: bool
) -> SchedulerConfig:
    config = spec.scheduler
    assert config.num_blocks is not None
    num_rows = -(-(config.num_blocks - 1) * config.block_size // block_size)
    num_usable = num_rows * groups.num_groups
    if is_small:
        longest, most = max_model_len // block_size, config.max_num_batched_tokens
        num_usable = next(
            n for n in count(1) if (groups.most_rows(n, block_size, most) or longest) >= longest
        )
    return config.model_copy(update={"block_size": block_size, "num_blocks": 1 + num_usable})
