"""Workloads with sliding windows: derived from any workload, or made by hand. Knows no scheduler."""

import random
from dataclasses import replace
from typing import Any

from benchmarks.scheduler_workloads import RequestSpec, Settings, Workload, workload_by_hand


def with_windows(workload: Workload) -> Workload:
    """The same workload with several KV groups. Its pool is the smallest for the longest request, or larger.

    V1 does not support models with several groups if none of the groups has full attention.
    """
    rng = random.Random(f"windows of {workload.seed}")
    num_full = rng.choice([1, 1, 2, 0])
    settings = replace(
        workload.settings,
        num_full=num_full,
        num_windowed=rng.choice([1, 1, 2, 3]) if num_full else 1,
        window=rng.choice([2, 3, 5, 8, 9, 16, 17, 33]),
    )
    num_needed = num_blocks_needed(settings, workload.requests)
    num_spare = rng.randrange(1 + rng.choice([1, 2, 6]) * num_needed)
    return replace(workload, settings=replace(settings, num_blocks=1 + num_needed + num_spare))


def num_blocks_needed(settings: Settings, requests: tuple[RequestSpec, ...]) -> int:
    """The number of blocks with which each request can reach its end alone, however its prompt is split."""
    size, most = settings.block_size, settings.max_num_batched_tokens
    lengths = [
        max(
            len(spec.prompt_token_ids) + 1,
            min(settings.max_model_len, len(spec.prompt_token_ids) + spec.max_tokens),
        )
        for spec in requests
    ]
    num_rows = -(-max(lengths) // size)
    num_windowed_rows = min(num_rows, -(-(settings.window - 1 + most) // size) + 1)
    return settings.num_full * num_rows + settings.num_windowed * num_windowed_rows


def _by_hand(number: int, requests: list[RequestSpec], **settings: Any) -> Workload:
    roomy = {"num_blocks": 100, "max_model_len": 96, "num_windowed": 1, "window": 8}
    return workload_by_hand(number, requests, **roomy | settings)


def _request(
    number: int, prompt: tuple[tuple[str, int], ...], max_tokens: int, arrival_step: int
) -> RequestSpec:
    return RequestSpec(
        f"r{number}",
        arrival_step,
        prompt,
        max_tokens,
        arrival_time=float(number),
        ignore_eos=True,
    )


BY_HAND = {
    "a conversation goes on: its last window is here": _by_hand(
        1, [_request(0, (("s", 30),), 9, 0), _request(1, (("s", 30), ("r0", 8), ("q", 5)), 4, 12)]
    ),
    "a shared text whose end has left the window, but not the pool": _by_hand(
        2, [_request(0, (("s", 20), ("q0", 30)), 9, 0), _request(1, (("s", 20), ("q1", 9)), 4, 3)]
    ),
    "a shared text whose end another request took from the pool": _by_hand(
        3,
        [
            _request(0, (("s", 20), ("q0", 30)), 20, 0),
            _request(1, (("t", 40),), 9, 6),
            _request(2, (("s", 20), ("q2", 9)), 4, 18),
        ],
        num_blocks=40,
    ),
    "a prompt in parts gives blocks back before it is whole": _by_hand(
        4,
        [_request(0, (("s", 80),), 5, 0), _request(1, (("t", 30),), 5, 1)],
        max_num_batched_tokens=9,
        num_blocks=35,
    ),
    "the youngest gives way, and comes back by what the cache has of both groups": _by_hand(
        5, [_request(n, (("s", 16), (f"q{n}", 4)), 30, n) for n in range(3)], num_blocks=30, window=5
    ),
    "windows alone": _by_hand(
        6, [_request(n, ((f"s{n % 2}", 40),), 20, 4 * n) for n in range(4)], num_full=0
    ),
}
"""Workloads made by hand, by their topic."""
