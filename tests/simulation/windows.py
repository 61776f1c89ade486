"""Scenarios whose model has KV groups with sliding windows; drawn apart from the rest of their seeds."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from baton.config import SchedulerConfig
from baton.kv_groups import KVGroups
from gateway.routing.placement import Mode
from simulator.gateway import RequestSpec
from simulator.worker import WorkerSpec

AMONG_SIXTEEN = (0, 4, 12)
GROUPS = [KVGroups(1, 1, 5), KVGroups(1, 1, 9), KVGroups(1, 2, 13), KVGroups(2, 1, 2), KVGroups(0, 1, 9)]
SHORTEST_PROMPT = 24


def has_windows(seed: int) -> bool:
    """Three seeds in sixteen, none of which is crowded, greedy, poisoned or has drafts."""
    return seed % 16 in AMONG_SIXTEEN


def with_windows(
    seed: int, workers: Iterable[WorkerSpec], requests: Iterable[RequestSpec], max_model_len: int
) -> tuple[tuple[WorkerSpec, ...], tuple[RequestSpec, ...]]:
    """All workers have the same block size, as windows require. The longest request just fits into a pool, or the pool
    is larger. Prompts are longer than a window, and most requests are handed over and continue.
    """
    rng = random.Random(f"windows of {seed}")
    specs, groups = tuple(workers), rng.choice(GROUPS)
    block_size, is_small = specs[0].scheduler.block_size, rng.random() < 0.5
    changed = tuple(
        replace(spec, groups=groups, scheduler=_scheduler(spec, block_size, groups, max_model_len, is_small))
        for spec in specs
    )
    return changed, tuple(_asked(rng, spec) for spec in requests)


def _asked(rng: random.Random, spec: RequestSpec) -> RequestSpec:
    tail = [rng.randrange(1_000) for _ in range(SHORTEST_PROMPT - len(spec.prompt))]
    mode = rng.choice([spec.mode, Mode.DISAGGREGATED, Mode.DISAGGREGATED])
    return replace(spec, prompt=(*spec.prompt, *tail), max_tokens=max(6, spec.max_tokens), mode=mode)


def _scheduler(
    spec: WorkerSpec, block_size: int, groups: KVGroups, max_model_len: int, is_small: bool
) -> SchedulerConfig:
    config = spec.scheduler
    assert config.num_blocks is not None
    num_rows = -(-(config.num_blocks - 1) * config.block_size // block_size)
    num_usable = num_rows * groups.num_groups
    if is_small:
        longest, most = max_model_len // block_size, config.max_num_batched_tokens
        by_blocks = ((n, groups.most_rows(n, block_size, most)) for n in count(1))
        num_usable = next(n for n, num_rows in by_blocks if num_rows is None or num_rows >= longest)
    return config.model_copy(update={"block_size": block_size, "num_blocks": 1 + num_usable})
