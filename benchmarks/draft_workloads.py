"""Workloads with drafts: derived from any workload, or made by hand. Knows no scheduler."""

import random
from dataclasses import replace
from typing import Any

from benchmarks.scheduler_workloads import RequestSpec, Workload, clip, workload_by_hand


def with_drafts(workload: Workload) -> Workload:
    """The same workload with right and wrong drafts, and with more conversations that continue.

    The pool has room for a whole context, as V1 requires: drafts may go beyond `max_tokens`, up to the end of the
    context.
    """
    rng = random.Random(f"drafts of {workload.seed}")
    settings = workload.settings
    num_whole = -(-settings.max_model_len // settings.block_size)
    requests: list[RequestSpec] = []
    for spec in workload.requests:
        earlier = [other for other in requests if other.arrival_step < spec.arrival_step]
        if earlier and rng.random() < 0.3:
            previous = rng.choice(earlier)
            answer = previous.request_id, rng.randrange(1, 1 + previous.max_tokens)
            prompt = clip([*previous.prompt, answer, ("q", 1)], settings.max_model_len - 1)
            spec = replace(spec, prompt=prompt, min_tokens=0, cache_salt=previous.cache_salt)
        requests.append(replace(spec, draft_quality=rng.choice([0.0, 0.5, 0.8, 0.95, 1.0])))
    settings = replace(
        settings,
        num_blocks=max(settings.num_blocks, 1 + num_whole),
        num_speculative_tokens=rng.choice([1, 2, 4, 8]),
    )
    return Workload(workload.seed, settings, tuple(requests))


def _by_hand(number: int, requests: list[RequestSpec], **settings: Any) -> Workload:
    roomy = {"num_blocks": 60, "max_model_len": 40, "num_speculative_tokens": 4}
    return workload_by_hand(number, requests, **roomy | settings)


def _request(number: int, num_tokens: int, max_tokens: int, quality: float, **values: Any) -> RequestSpec:
    """A request with its own prompt."""
    prompt = values.pop("prompt", ((f"q{number}", num_tokens),))
    arrival = {"arrival_step": 0, "arrival_time": float(number)} | values
    return RequestSpec(
        f"r{number}", prompt=prompt, max_tokens=max_tokens, draft_quality=quality, ignore_eos=True, **arrival
    )


BY_HAND = {
    "drafts take the last blocks, and the youngest gives way": _by_hand(
        1, [_request(n, 8, 20, 0.5) for n in range(3)], num_blocks=14
    ),
    "the worst gives way with the drafts of this step": _by_hand(
        2,
        [
            _request(0, 8, 24, 0.5, priority=2),
            *(_request(n, 8, 24, 0.5, priority=0, arrival_step=2) for n in (1, 2)),
        ],
        num_blocks=15,
        policy="priority",
    ),
    "a prompt in parts beside drafts": _by_hand(
        3, [_request(0, 4, 20, 0.9), _request(1, 30, 4, 0.9, arrival_step=3)], max_num_batched_tokens=9
    ),
    "the budget ends among the drafts of one request, and the next gets none": _by_hand(
        4, [_request(n, 3, 15, 1.0) for n in range(3)], max_num_seqs=3, max_num_batched_tokens=7
    ),
    "the threshold trims drafts": _by_hand(5, [_request(0, 5, 20, 1.0)], long_prefill_token_threshold=3),
    "drafts end where the context ends": _by_hand(6, [_request(0, 20, 24, 1.0), _request(1, 21, 24, 0.0)]),
    "a conversation goes on where drafts were right, and where they were wrong": _by_hand(
        7,
        [
            *(_request(n, 6, 16, quality) for n, quality in enumerate((1.0, 0.5, 0.0))),
            *(
                _request(n + 3, 0, 4, 0.5, prompt=((f"q{n}", 6), (f"r{n}", 9), ("q", 1)), arrival_step=6)
                for n in range(3)
            ),
        ],
    ),
    "preempted with drafts, and resumed by the prefix cache": _by_hand(
        8, [_request(n, 10, 25, 0.8, prompt=(("s", 8), (f"q{n}", 2))) for n in range(4)], num_blocks=20
    ),
    "one leaves while its drafts are verified": _by_hand(
        9, [_request(0, 8, 20, 0.8, abort_step=3), _request(1, 8, 20, 0.8)]
    ),
    "without a prefix cache": _by_hand(
        10, [_request(n, 8, 20, 0.5) for n in range(4)], num_blocks=16, enable_prefix_caching=False
    ),
}
"""Workloads made by hand, by their topic."""
